"""How a compiler that fuses loops will run a value that is computed again in backward.

A loop's result that only loops read is computed inside them. If one of them runs over more elements than the result
has, as where the exponential of a row is applied to all columns, it is computed that many times. What a kernel of its
own reads, such as a matrix product, is written to memory for it.
"""

from __future__ import annotations

import torch.fx as fx

from ..graph import JointGraph, Role, tensor_of
from ..ops import FUSED_KINDS, INLINED_KINDS, Kind
from ..sizes import Sizes
from .op_call import UNKNOWN_USE, Use


def find_uses(graph: JointGraph, sizes: Sizes) -> list[Use]:
    """Look at the readers of every node."""
    is_read_by_kernel = _read_by_kernels(graph)
    lengths = [_length(node, sizes) for node in graph.nodes]
    longest = list(range(len(graph.nodes)))
    """Per node, the one over whose elements it is computed."""
    for i in range(len(graph.nodes) - 1, -1, -1):
        op = graph.facts[i]
        if op is None or not (op.is_view or (op.kind in INLINED_KINDS and not is_read_by_kernel[i])):
            continue
        for j in graph.inputs[i]:
            if lengths[longest[i]] > lengths[longest[j]]:
                longest[j] = longest[i]
    return [_use(graph, i, longest[i], is_read_by_kernel[i]) for i in range(len(graph.nodes))]


def _use(graph: JointGraph, i: int, longest: int, is_read_by_kernel: bool) -> Use:
    op = graph.facts[i]
    if op is None or op.is_view or op.kind not in INLINED_KINDS or tensor_of(graph.nodes[i]) is None:
        return UNKNOWN_USE
    if all(tensor_of(graph.nodes[j]) is None for j in graph.inputs[i]):
        return UNKNOWN_USE  # a constant or an index, which a loop knows without computing it
    if is_read_by_kernel:
        return Use(is_written=True)
    if longest == i or op.kind is Kind.POINTWISE:
        return UNKNOWN_USE  # what is simple arithmetic, a loop over more elements hardly notices
    return Use(loop=graph.nodes[longest])


def _read_by_kernels(graph: JointGraph) -> list[bool]:
    """Per node, whether something of backward that is not part of a loop reads it, maybe through views."""
    found = [False] * len(graph.nodes)
    for i in range(len(graph.nodes) - 1, -1, -1):
        op = graph.facts[i]
        if op is None:
            continue
        is_kernel = graph.roles[i] is Role.BACKWARD and op.kind not in FUSED_KINDS
        if is_kernel or (op.is_view and found[i]):
            for j in graph.inputs[i]:
                found[j] = True
    return found


def _length(node: fx.Node, sizes: Sizes) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else sizes.bytes_of(tensor) // tensor.element_size()
