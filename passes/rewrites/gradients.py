"""Gradients handed over in the layout of what they are gradients of.

Autograd takes over a gradient as it is if it lies in memory like its parameter. Of any other, a slice of a larger
tensor or a transposed one, it makes a copy. Eager does so as soon as the gradient is there; a compiled backward hands
over all of them at its end, and until then what they are parts of stays in memory. So the copy is made where the
gradient is: the same bits, at the same cost, and the memory is free again. The same goes for a slice that autograd
would take over and keep the whole for, unless the rest of it are gradients, too.

The gradient of an intermediate result, which code outside of the graph has computed, autograd hands on as it is to the
formula of the op that computed it, and a sum over it is rounded in the order in which it lies in memory. It is left as
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from ..graph import PARTITIONER_TAG, leaves, output_descriptors, tensor_of, views
from ..ops import facts_of
from ..sizes import hint_of
from ..torch_private import GradAOTOutput, PlainAOTInput, statically_at_least, statically_equal

_aten = torch.ops.aten


INTERMEDIATE_TAG = "remat_intermediate"
"""`node.meta` key of an input that is no leaf: ops outside of the graph have computed it, and want its gradient."""

Split = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def telling_intermediates(split: Split, example_inputs: Sequence[Any]) -> Split:
    """The same partition function, given joint graphs on which it is written which inputs are no leaves."""
    intermediates = {PlainAOTInput(k) for k, x in enumerate(example_inputs) if _has_history(x)}

    def tell_and_split(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in joint.graph.find_nodes(op="placeholder"):
            if node.meta.get("desc") in intermediates:
                node.meta[INTERMEDIATE_TAG] = True
        return split(joint, *args, **kwargs)

    return tell_and_split


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_leaf


def lay_out_gradients(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Copy each gradient that autograd would copy at the end of backward, or that would keep more than itself alive."""
    output, copies = joint.graph.output_node(), dict[fx.Node, fx.Node]()
    returned = {node for node in leaves(output.args[0])[:num_fwd_outputs] if isinstance(node, fx.Node)}
    gradients = {
        gradient: value for gradient, value in gradients_of(joint, num_fwd_outputs) if gradient not in returned
    }
    used: dict[fx.Node, Any] = {}
    for gradient, value in gradients.items():
        if is_taken_over(gradient, value):
            used[_base(gradient)] = used.get(_base(gradient), 0) + value.numel()
    for gradient, value in gradients.items():
        is_final = is_taken_over(gradient, value) and _is_no_larger(_base(gradient), used[_base(gradient)])
        if not is_final and _is_memory_of_its_own(gradient):
            copies[gradient] = _copied(joint.graph, gradient, value)
    if copies:
        output.args = map_arg(output.args, lambda node: copies.get(node, node))
        joint.recompile()


def _base(gradient: fx.Node) -> fx.Node:
    """The node in whose memory a gradient is."""
    *_, base = views(gradient)
    return base


def _is_no_larger(node: fx.Node, num_elements: Any) -> bool:
    """Has a result at most so many elements? Of several results that is not asked: each has memory of its own."""
    value = tensor_of(node)
    return value is None or statically_at_least(num_elements, value.numel())


def gradients_of(joint: fx.GraphModule, num_fwd_outputs: int) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The gradients that a joint graph computes for leaves, each with what it is the gradient of."""
    for gradient, source, value in _gradients(joint, num_fwd_outputs):
        if INTERMEDIATE_TAG not in source.meta:
            yield gradient, value


def left_over(joint: fx.GraphModule, num_fwd_outputs: int) -> Iterator[fx.Node]:
    """Gradients in whose memory something waits for the end of backward that is not the step's result."""
    for gradient, source, value in _gradients(joint, num_fwd_outputs):
        is_intermediate = INTERMEDIATE_TAG in source.meta
        if is_intermediate and not _is_no_larger(_base(gradient), value.numel()):
            yield gradient  # and all that it is a part of
        if not is_intermediate and not is_taken_over(gradient, value):
            yield gradient  # of which autograd makes a copy


def _gradients(joint: fx.GraphModule, num_fwd_outputs: int) -> Iterator[tuple[fx.Node, fx.Node, torch.Tensor]]:
    """The gradients that a joint graph computes, each with the input that it is the gradient of."""
    inputs = {node.meta["desc"]: node for node in joint.graph.find_nodes(op="placeholder") if "desc" in node.meta}
    outputs = leaves(joint.graph.output_node().args[0])
    rows = list(zip(outputs, output_descriptors(joint), strict=True))
    for output, descriptor in rows[num_fwd_outputs:]:
        source = inputs.get(descriptor.grad_of) if isinstance(descriptor, GradAOTOutput) else None
        value = None if source is None else tensor_of(source)
        if isinstance(output, fx.Node) and tensor_of(output) is not None and source is not None and value is not None:
            yield output, source, value


def is_taken_over(gradient: fx.Node, value: torch.Tensor) -> bool:
    """Does autograd take a gradient as it is? It does if that lies in memory like what it is the gradient of."""
    found = tensor_of(gradient)
    if found is None or found.layout is not torch.strided or value.layout is not torch.strided:
        return True  # which has no strides to compare
    wanted = value.stride() if _is_dense(value) else _contiguous_strides(value)
    return all(
        statically_equal(size, 1) or statically_equal(stride, other)
        for size, stride, other in zip(value.shape, found.stride(), wanted, strict=True)
    )


def _is_memory_of_its_own(gradient: fx.Node) -> bool:
    """True for what the graph computes; what is expanded has no memory that a copy could free."""
    base = _base(gradient)
    whole, part = tensor_of(base), tensor_of(gradient)
    return (
        base.op == "call_function"
        and not facts_of(base.target).is_view  # of what the step is given
        and whole is not None
        and part is not None
        and part.layout is torch.strided
        and statically_at_least(whole.numel(), part.numel())
    )


def _copied(graph: fx.Graph, gradient: fx.Node, value: torch.Tensor) -> fx.Node:
    """A copy that lies in memory like something else."""
    order = _from_outermost(value) if _is_dense(value) else list(range(value.dim()))
    if order == sorted(order):
        return _added(graph, gradient, "copy", _aten.clone.default, memory_format=torch.contiguous_format)
    turned = _added(graph, gradient, "turned", _aten.permute.default, order)
    copy = _added(graph, turned, "copy", _aten.clone.default, memory_format=torch.contiguous_format)
    return _added(graph, copy, "back", _aten.permute.default, [order.index(dim) for dim in range(len(order))])


def _added(graph: fx.Graph, source: fx.Node, what: str, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """An op of the same formula behind another one."""
    with graph.inserting_after(source):
        node = graph.create_node("call_function", op, (source, *args), kwargs, name=f"{source.name}_{what}")
    node.meta = {key: kept for key, kept in source.meta.items() if key not in ("desc", "tensor_meta")}
    node.meta[PARTITIONER_TAG] = "is_backward"
    node.meta["val"] = op(source.meta["val"], *args, **kwargs)
    return node


def _from_outermost(value: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, the one with the longest stride first."""
    rank = {dim: hint_of(stride) for dim, stride in enumerate(value.stride())}
    return sorted(rank, key=lambda dim: (-rank[dim], -hint_of(value.shape[dim]), dim))


def _is_dense(value: torch.Tensor) -> bool:
    """True for a tensor without gaps, whatever the order of its dimensions."""
    expected: Any = 1
    for dim in reversed(_from_outermost(value)):
        if statically_equal(value.shape[dim], 1):
            continue
        if not statically_equal(value.stride(dim), expected):
            return False
        expected = expected * value.shape[dim]
    return True


def _contiguous_strides(value: torch.Tensor) -> tuple[Any, ...]:
    strides: list[Any] = []
    expected: Any = 1
    for size in reversed(value.shape):
        strides.insert(0, expected)
        expected = expected * size
    return tuple(strides)
