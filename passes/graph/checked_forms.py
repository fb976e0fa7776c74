"""Ops that leave their result in the memory of an input, if all that they read lies in memory as it was traced.

A result takes the layout of what it is computed from. Written over an input it takes that input's instead, which is the
same if tracing was right about all inputs, and tracing is not always right: kernels lay out their results in other ways
than their stand-ins for fake tensors say. What follows would then lie in another way than without remat: random numbers
are drawn in another order, sums are rounded in another order, and a view may be an error. So each of these functions
looks at its inputs when it runs, and where one lies in another way than traced it is the plain op, with new memory.

What is looked for is one letter per argument, a capital for the input that is written over:

    r   lies row by row without gaps, and has the type of the input that is written over
    f   the same, where the first dimension has size 1: its stride says nothing of where elements are, but is compared
    s   has the strides that are given as `<name>_stride`, and the type of the input that is written over
    m   lies row by row without gaps, and is a mask, of which ops are certain themselves
    o   lies row by row without gaps, and has the type that is given as `<name>_dtype`
    t   has the strides and the type that are given
    n   a number, or a tensor with one element: nothing to look for

Arguments without a letter are not looked at. The functions are found by name, `add_Tensor__Rr` say, so that graphs that
call them can be printed, copied and stored. They are written out for each op and letters: to hand arguments on as
`*args` would take as long as the look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

_aten = torch.ops.aten

POINTWISE: Mapping[Any, Any] = {
    _aten.add.Tensor: _aten.add.out,
    _aten.sub.Tensor: _aten.sub.out,
    _aten.mul.Tensor: _aten.mul.out,
    _aten.mul.Scalar: _aten.mul.out,  # mul_.Scalar rounds the number to half precision first
    _aten.div.Tensor: _aten.div.out,
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Scalar_out,
    _aten.maximum.default: _aten.maximum.out,
    _aten.minimum.default: _aten.minimum.out,
    _aten.where.self: _aten.where.self_out,
    _aten.neg.default: _aten.neg.out,
    _aten.abs.default: _aten.abs.out,
    _aten.exp.default: _aten.exp.out,
    _aten.log.default: _aten.log.out,
    _aten.sin.default: _aten.sin.out,
    _aten.cos.default: _aten.cos.out,
    _aten.sqrt.default: _aten.sqrt.out,
    _aten.rsqrt.default: _aten.rsqrt.out,
    _aten.reciprocal.default: _aten.reciprocal.out,
    _aten.sigmoid.default: _aten.sigmoid.out,
    _aten.tanh.default: _aten.tanh.out,
    _aten.erf.default: _aten.erf.out,
    _aten.silu.default: _aten.silu.out,
    _aten.gelu.default: _aten.gelu.out,
    _aten.silu_backward.default: _aten.silu_backward.grad_input,
    _aten.gelu_backward.default: _aten.gelu_backward.grad_input,
    _aten.tanh_backward.default: _aten.tanh_backward.grad_input,
    _aten.sigmoid_backward.default: _aten.sigmoid_backward.grad_input,
    _aten.threshold_backward.default: _aten.threshold_backward.grad_input,
}
"""Ops that compute each element from the same element of their inputs, and their forms that are told where to write.
Only those whose second form has a kernel of its own: others compute the result elsewhere and copy it."""

FIRST_INPUT: Mapping[Any, Any] = {
    _aten.relu.default: _aten.relu_.default,
    _aten.add.Scalar: _aten.add_.Scalar,
    _aten.sub.Scalar: _aten.sub_.Scalar,
    _aten.div.Scalar: _aten.div_.Scalar,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
}
"""The same, where the other form writes to its first input."""

BY_ROW: Mapping[Any, Any] = {
    _aten._softmax.default: _aten._softmax.out,
    _aten._log_softmax.default: _aten._log_softmax.out,
    _aten._softmax_backward_data.default: _aten._softmax_backward_data.out,
    _aten._log_softmax_backward_data.default: _aten._log_softmax_backward_data.out,
}
"""Ops that read a row of their inputs before they write to it, on a CPU and over the last dimension."""

FORMS: Mapping[Any, Any] = {**POINTWISE, **FIRST_INPUT, **BY_ROW}

ROWS_ONLY = frozenset({*BY_ROW, _aten.masked_fill.Scalar})
"""Ops that lay out their result row by row, whatever their inputs."""

_LOOKS = {
    "r": "{0}.is_contiguous()",
    "f": "{0}.is_contiguous() and {0}.stride(0) == {0}.numel()",
    "m": "{0}.is_contiguous()",
    "s": "{0}.stride() == {0}_stride",
    "o": "{0}.is_contiguous() and {0}.dtype is {0}_dtype",
    "t": "{0}.stride() == {0}_stride and {0}.dtype is {0}_dtype",
}
_GIVEN = {"s": ("stride",), "o": ("dtype",), "t": ("stride", "dtype")}
"""What has to be said of an argument, by its letter."""

_OPS = {op.__name__.replace(".", "_"): op for op in FORMS}
"""The ops, by what the names of their functions begin with."""

_TEMPLATE = """
def make(op, form):
    def {name}({parameters}):
        if {looks}:
            return form({arguments}{target})
        return op({arguments})
    return {name}
"""

_made: dict[Any, tuple[Any, int]] = {}
"""Per function that was made, the op that it stands for and the position of the argument that it writes over."""


@cache
def checked_form(op: Any, letters: str) -> Callable[..., Any]:
    """The function that leaves an op's result in the memory of an input if its arguments are what the letters say."""
    scope: dict[str, Callable[..., Callable[..., Any]]] = {}
    exec(_written_out(op, letters), {"__name__": __name__}, scope)
    function = scope["make"](op, FORMS[op])
    function.__qualname__ = function.__name__
    _made[function] = op, next(k for k, letter in enumerate(letters) if letter.isupper())
    return function


def __getattr__(name: str) -> Any:
    start, _, letters = name.rpartition("__")
    is_known = start in _OPS and set(letters.lower()) <= {*_LOOKS, "n"} and sum(map(str.isupper, letters)) == 1
    if not is_known:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return checked_form(_OPS[start], letters)


def written_argument(target: Any) -> int | None:
    """The position of the argument that a function of this module writes over; None for anything else."""
    return _made[target][1] if target in _made else None


def plain_op(target: Any) -> Any:
    """The op that a function of this module stands for; None for anything else."""
    return _made[target][0] if target in _made else None


def given_for(letter: str) -> tuple[str, ...]:
    """What has to be said of an argument: its "stride", its "dtype"."""
    return _GIVEN.get(letter.lower(), ())


def _written_out(op: Any, letters: str) -> str:
    """A function that makes the function, as text."""
    taken = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    options = [argument for argument in op._schema.arguments if argument.kwarg_only]
    names = [argument.name for argument in taken]
    looked_at = [(name, letter) for name, letter in zip(names, letters, strict=False) if letter != "n"]
    (written,) = [name for name, letter in looked_at if letter.isupper()]
    given = [f"{name}_{what}" for name, letter in looked_at for what in given_for(letter)]
    later = [*given, *map(_with_default, options)]
    looks = [_LOOKS[letter.lower()].format(name) for name, letter in looked_at]
    looks += [f"{name}.dtype is {written}.dtype" for name, letter in looked_at if letter in "rfs"]
    place = next((argument.name for argument in FORMS[op]._schema.arguments if argument.is_out), None)
    return _TEMPLATE.format(
        name=f"{op.__name__.replace('.', '_')}__{letters}",
        parameters=", ".join([*map(_with_default, taken), *(["*", *later] if later else [])]),
        looks=" and ".join(looks),
        arguments=", ".join([*names, *(f"{option.name}={option.name}" for option in options)]),
        target="" if place is None else f", {place}={written}",
    )


def _with_default(argument: Any) -> str:
    """A parameter as it is written."""
    return f"{argument.name}={argument.default_value!r}" if argument.has_default_value() else str(argument.name)
