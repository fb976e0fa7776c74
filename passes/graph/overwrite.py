"""Results written over inputs that nobody reads any more, where ops run one by one.

An executor that runs a graph node by node gives every result memory of its own, and frees an input's afterwards: while
an op runs, both are there. Element by element ops can write to their input's memory instead, with the same kernel and
the same bits; so can a softmax over rows that lie in one piece on a CPU, which has read a row before it writes to it.
The gradient of a large vocabulary's loss is then there once instead of twice, at the moment that often sets the peak.

`overwritable` says what the op itself allows. Whether an input is read later, returned, saved or given by the caller is
the simulation's business (`simulate`), and `verify` follows what was written through the finished graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from ..shared.op_facts import facts_of
from ..torch_private import OpOverload, run_and_save_rng_state, run_with_rng_state, statically_equal
from .joint_graph import tensor_of

OVERWRITE_TAG = "remat_overwrites"
"""`node.meta` key of a node that leaves its result in the memory of an input: the op that does so. What is said of a
node is copied to others that stand for it; those call something else."""

PLAIN_TAG = "remat_plain_op"
"""`node.meta` key of such a node: the op that computes the same in memory of its own."""

TRUSTED_NAMESPACES = frozenset(["aten", "prims"])
"""Libraries whose operators say truthfully whether a result shares an input's memory."""

_aten = torch.ops.aten

_POINTWISE: dict[Any, Any] = {
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

_FIRST_INPUT: dict[Any, Any] = {
    _aten.relu.default: _aten.relu_.default,
    _aten.add.Scalar: _aten.add_.Scalar,
    _aten.sub.Scalar: _aten.sub_.Scalar,
    _aten.div.Scalar: _aten.div_.Scalar,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
}
"""The same, where the other form writes to its first input."""

_BY_ROW: dict[Any, Any] = {
    _aten._softmax.default: _aten._softmax.out,
    _aten._log_softmax.default: _aten._log_softmax.out,
    _aten._softmax_backward_data.default: _aten._softmax_backward_data.out,
    _aten._log_softmax_backward_data.default: _aten._log_softmax_backward_data.out,
}
"""Ops that read a row of their inputs before they write to it, on a CPU and over the last dimension."""

_FORMS = {**_POINTWISE, **_FIRST_INPUT, **_BY_ROW}


def overwritable(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs in whose memory a node could leave its result, as far as its op and their layouts tell."""
    result = tensor_of(node)
    if node.target not in _FORMS or result is None:
        return
    if node.target in _BY_ROW and not _has_rows(node, result):
        return
    inputs = node.args[:1] if node.target in _FIRST_INPUT else node.args
    for source in dict.fromkeys(a for a in inputs if isinstance(a, fx.Node)):
        value = tensor_of(source)
        if value is not None and _is_alike(value, result):
            yield source


def _has_rows(node: fx.Node, result: torch.Tensor) -> bool:
    """True for a softmax on a CPU over rows that lie in one piece; its dimension follows its tensors."""
    num_tensors = sum(isinstance(a, fx.Node) for a in node.args)
    dim: Any = node.args[num_tensors]
    return (
        result.device.type == "cpu"
        and result.dim() > 0
        and dim in (-1, result.dim() - 1)
        and all(_is_alike(value, result) for a in node.all_input_nodes if (value := tensor_of(a)) is not None)
        and is_row_major(result)
    )


def is_row_major(value: torch.Tensor) -> bool:
    """True for a tensor whose elements lie in memory in order and without gaps."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_equal(stride, expected):
            return False
        expected = expected * size
    return True


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
    """Have a node leave its result in the memory of one of its inputs."""
    form = _FORMS[node.target]
    name = _out_name(form)
    node.meta[PLAIN_TAG] = node.target
    node.target = form
    if name is not None:
        node.kwargs = {**node.kwargs, name: source}
    node.meta[OVERWRITE_TAG] = form


def overwritten_by(node: fx.Node) -> fx.Node | None:
    """The input in whose memory a node was made to leave its result."""
    if node.op != "call_function" or node.meta.get(OVERWRITE_TAG) is not node.target:
        return None
    name = _out_name(node.target)
    source = node.args[0] if name is None else node.kwargs[name]
    assert isinstance(source, fx.Node)
    return source


def plain_call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that a node stands for, and its arguments, without what says whose memory the result takes."""
    if overwritten_by(node) is None:
        return node.target, node.args, node.kwargs
    name = _out_name(node.target)
    kwargs = {key: value for key, value in node.kwargs.items() if key != name}
    return node.meta[PLAIN_TAG], node.args, kwargs


@cache
def _out_name(form: Any) -> str | None:
    """The argument by which an op is told where to write; None for one that writes to its first input."""
    return next((argument.name for argument in form._schema.arguments if argument.is_out), None)
