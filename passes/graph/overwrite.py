"""Results written over inputs that nobody reads any more, where ops run one by one.

An executor that runs a graph node by node gives every result memory of its own, and frees an input's afterwards: while
an op runs, both are there. Element by element ops can write to their input's memory instead, with the same kernel and
the same bits; so can a softmax over rows that lie in one piece on a CPU, which has read a row before it writes to it.
The gradient of a large vocabulary's loss is then there once instead of twice, at the moment that often sets the peak.

`overwritable` says what the op itself allows. What is called in its place, `checked_forms`, looks at the inputs when it
runs, since tracing may be wrong about where their elements lie. Whether an input is read later, returned, saved or
given by the caller is the simulation's business (`simulate`), and `verify` follows what was written through the
finished graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from ..ops import facts_of
from ..torch_private import OpOverload, run_and_save_rng_state, run_with_rng_state, statically_equal
from .checked_forms import BY_ROW, FIRST_INPUT, FORMS, ROWS_ONLY, checked_form, given_for, plain_op, written_argument
from .joint_graph import tensor_of
from .layouts import has_no_gaps, is_in_order_of, is_row_major

TRUSTED_NAMESPACES = frozenset(["aten", "prims", "remat"])
"""Libraries whose operators say truthfully whether a result shares an input's memory."""


def overwritable(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs in whose memory a node could leave its result, as far as its op and their layouts tell."""
    result = tensor_of(node)
    if node.target not in FORMS or result is None or None in _letters(node, result):
        return
    values = [value for value in _values(node) if value is not None]
    if not _lies_as_traced(node, values, result) or (node.target in BY_ROW and not _has_rows(node, result)):
        return
    inputs = node.args[:1] if node.target in FIRST_INPUT else node.args
    for source in dict.fromkeys(a for a in inputs if isinstance(a, fx.Node)):
        value = tensor_of(source)
        if value is not None and _is_alike(value, result):
            yield source


def _has_rows(node: fx.Node, result: torch.Tensor) -> bool:
    """True for a softmax on a CPU over rows; its dimension follows its tensors."""
    num_tensors = sum(isinstance(a, fx.Node) for a in node.args)
    dim: Any = node.args[num_tensors]
    return (
        result.device.type == "cpu"
        and result.dim() > 0
        and dim in (-1, result.dim() - 1)
        and all(_is_alike(value, result) for a in node.all_input_nodes if (value := tensor_of(a)) is not None)
    )


def _lies_as_traced(node: fx.Node, values: Sequence[torch.Tensor], result: torch.Tensor) -> bool:
    """Does the result lie as it is traced if the inputs do? Tracing alone does not tell, the ops' kernels do."""
    if all(map(is_row_major, values)):
        return is_row_major(result)
    is_ordered = node.target not in ROWS_ONLY and not any(statically_equal(size, 1) for size in result.shape)
    return is_ordered and has_no_gaps(result) and is_in_order_of(values, result)


def _values(node: fx.Node) -> list[torch.Tensor | None]:
    """The tensors that a node is given by position; None for numbers."""
    return [tensor_of(arg) if isinstance(arg, fx.Node) else None for arg in node.args]


def _letters(node: fx.Node, result: torch.Tensor) -> list[str | None]:
    """What is to be looked for in each argument of a node when it runs; None for one that no look tells enough of."""
    values = _values(node)
    return ["n" if value is None or value.dim() < min(1, result.dim()) else _letter(value, result) for value in values]


def _letter(value: torch.Tensor, result: torch.Tensor) -> str | None:
    """What tells whether an input lies in memory as it was traced. Strides are numbers only where sizes are."""
    is_same_type = value.dtype is result.dtype
    shared = zip(reversed(range(value.dim())), reversed(result.shape), strict=False)
    ones = [dim for dim, size in shared if statically_equal(size, 1)]  # elements may lie alike whatever their strides
    if is_row_major(value) and not ones:
        return "r" if is_same_type else "m" if value.dtype is torch.bool else "o"
    if all(isinstance(number, int) for number in (*value.stride(), *result.shape)):
        return "s" if is_same_type else "t"
    return "f" if is_row_major(value) and is_same_type and ones == [0] and value.dim() == result.dim() else None


def _is_alike(value: torch.Tensor, result: torch.Tensor) -> bool:
    """Of the same type and layout, element for element."""
    return (
        value.dtype is result.dtype
        and value.dtype.is_floating_point
        and value.device == result.device
        and value.layout is result.layout is torch.strided
        and value.dim() == result.dim()
        and all(map(statically_equal, value.shape, result.shape))
        and all(map(statically_equal, value.stride(), result.stride()))
    )


def hides_sharing(node: fx.Node) -> bool:
    """True for a call whose result may share an input's memory without saying so."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    op: Any = node.target
    if op in (run_and_save_rng_state, run_with_rng_state):  # a random op and the state that it draws from
        op = next(a for a in node.args if isinstance(a, OpOverload))
    if isinstance(op, OpOverload):
        return op.namespace not in TRUSTED_NAMESPACES
    return facts_of(op).has_body


def write_over(node: fx.Node, source: fx.Node) -> None:
    """Have a node leave its result in the memory of one of its inputs, if they all lie as they were traced."""
    op: Any = node.target
    result = tensor_of(node)
    assert result is not None
    letters = [letter for letter in _letters(node, result) if letter is not None]
    written = node.args.index(source)
    letters[written] = letters[written].upper()
    said: dict[str, Any] = {}
    for argument, letter, value in zip(op._schema.arguments, letters, _values(node), strict=False):
        if value is not None:
            layout = {"stride": tuple(value.stride()), "dtype": value.dtype}
            said |= {f"{argument.name}_{what}": layout[what] for what in given_for(letter)}
    node.target = checked_form(op, "".join(letters))
    node.kwargs = {**said, **node.kwargs}


def overwritten_by(node: fx.Node) -> fx.Node | None:
    """The input in whose memory a node was made to leave its result."""
    position = written_argument(node.target) if node.op == "call_function" else None
    if position is None:
        return None
    source = node.args[position]
    assert isinstance(source, fx.Node)
    return source


def plain_call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that a node stands for, and its arguments, without what says whose memory the result takes."""
    op = plain_op(node.target)
    if op is None:
        return node.target, node.args, node.kwargs
    own = {argument.name for argument in op._schema.arguments}
    return op, node.args, {key: value for key, value in node.kwargs.items() if key in own}
