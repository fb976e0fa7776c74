"""The order of backward's own nodes: as traced, but for what gives memory back, which runs as soon as it can.

Autograd's formula of a linear layer computes the gradient of its input first and that of its weight after it. Between
the two, the layer's input has to be there, and the new gradient is there already. The other way round the gradient of
the weight, which is the step's result and not an activation, is done before the other one takes memory, and what only
it has read is free by then. In the same way a sum that alone reads a large value lets go of that at once, and the two
gradients of a product of two branches take the place of the product's own and of what both are computed from; a
compiler can then make one loop of them. The results are the same to the bit: nothing but the order changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
import torch.fx as fx

from ..graph import JointGraph, Role, split_closing_writes, tensor_of
from ..ops import Kind
from ..sizes import hint_of

_CASTS = frozenset({torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default})
"""What may stand between the op that finishes a gradient and the gradient: another type, and the same memory after."""

_ELEMENTWISE = frozenset({Kind.POINTWISE, Kind.TRANSCENDENTAL, Kind.SLOW_TRANSCENDENTAL})

MOST_BRANCHES = 2
"""How many readers of a value may run at once to let go of it: one of their results takes its place, and another one
that of what it is computed with. With more of them memory would grow."""


def roots(graph: JointGraph) -> list[int]:
    """What backward computes, in order. Its closing writes come last: what they overwrite may still be read."""
    body, writes = split_closing_writes(graph)
    sources = [j for i in writes for j in graph.inputs[i]]
    return [*_giving_back_early(graph, body), *sources, *_forward_values_returned(graph), *writes]


def _forward_values_returned(graph: JointGraph) -> list[int]:
    """Gradients that are forward values themselves, such as the gradient of a sum."""
    returned = [graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)]
    return [i for i in returned if graph.roles[i] is not Role.BACKWARD]


def _giving_back_early(graph: JointGraph, body: Sequence[int]) -> Sequence[int]:
    """Move what gives memory back to where the last of what it reads is computed."""
    if any(op.is_mutating for i in body if (op := graph.facts[i]) is not None):
        return body  # who reads what is written in between may not be moved
    own, readers = frozenset(body), _readers(graph, body)
    urgency = {
        **dict.fromkeys(_finishing(graph, body, readers), 2),
        **dict.fromkeys(_replacing(graph, body, readers), 1),
        **dict.fromkeys(_shrinking(graph, body, readers), 0),
    }
    sources = {i: _computed_for(graph, i, own) for i in body if i in urgency}
    waiting: dict[int, list[int]] = {}
    for i, found in sources.items():
        for source in found:
            waiting.setdefault(source, []).append(i)
    order: list[int] = []
    done: set[int] = set()

    def run(wanted: int) -> None:
        """Run a node, the views that it reads before it, and what it lets give memory back after it."""
        stacks: tuple[list[int], ...] = ([], [], [], [wanted])
        while stack := next(filter(None, stacks), None):
            i = stack.pop()
            missing = [j for j in graph.inputs[i] if j in own and j not in done]
            if missing:
                stack += [i, *missing]
            elif i not in done:
                done.add(i)
                order.append(i)
                for k in reversed(waiting.get(i, ())):
                    if sources[k] <= done:
                        stacks[urgency[k]].append(k)

    for i in body:
        run(i)
    return order


def _readers(graph: JointGraph, body: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i in body:
        for j in graph.inputs[i]:
            found.setdefault(j, []).append(i)
    return found


def _shrinking(graph: JointGraph, body: Sequence[int], readers: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Sums over a value that nothing else reads; and the value, if it is computed element by element for the sum."""
    sums = {
        i
        for i in body
        if (op := graph.facts[i]) is not None
        and op.kind is Kind.REDUCTION
        and op.is_pure
        and all(len(readers[j]) == 1 for j in graph.inputs[i])
    }
    read = {j for i in sums for j in graph.inputs[i]}
    return frozenset(sums.union(j for j in read.intersection(body) if _is_elementwise(graph, j)))


def _replacing(graph: JointGraph, body: Sequence[int], readers: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """All readers of a value, if each of them makes something of its size of it, element by element."""
    found: set[int] = set()
    for j in body:
        read_by = set() if _is_view(graph, j) else set(_through_views(graph, j, readers))
        if len(read_by) <= MOST_BRANCHES and all(_is_replacing(graph, i, j) for i in read_by):
            found |= read_by
    return frozenset(found)


def _through_views(graph: JointGraph, j: int, readers: Mapping[int, Sequence[int]]) -> Iterator[int]:
    for i in readers.get(j, ()):
        if _is_view(graph, i):
            yield from _through_views(graph, i, readers)
        else:
            yield i


def _is_replacing(graph: JointGraph, i: int, j: int) -> bool:
    """Could a node's result take the memory of a value that it reads?"""
    result, source = tensor_of(graph.nodes[i]), tensor_of(graph.nodes[j])
    if not _is_elementwise(graph, i) or result is None or source is None:
        return False
    return _elements(result) == _elements(source) and result.dtype.itemsize <= source.dtype.itemsize


def _is_elementwise(graph: JointGraph, i: int) -> bool:
    op = graph.facts[i]
    return op is not None and op.is_pure and op.kind in _ELEMENTWISE


def _elements(tensor: torch.Tensor) -> int:
    return prod(map(hint_of, tensor.shape))


def _finishing(graph: JointGraph, body: Sequence[int], readers: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Nodes whose result is a finished gradient, maybe by another view or type of it, and nothing else."""
    returned = {graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)}
    found: set[int] = set()
    """With views and casts, which are told apart in the end."""
    for i in reversed(body):
        op, read_by = graph.facts[i], readers.get(i, ())
        is_last = (i in returned) if not read_by else all(_hands_on(graph, k) and k in found for k in read_by)
        if is_last and op is not None and op.is_pure:
            found.add(i)
    return frozenset(i for i in found if not _is_view(graph, i))


def _hands_on(graph: JointGraph, i: int) -> bool:
    return _is_view(graph, i) or graph.nodes[i].target in _CASTS


def _is_view(graph: JointGraph, i: int) -> bool:
    op = graph.facts[i]
    return op is not None and op.is_view


def _computed_for(graph: JointGraph, i: int, own: frozenset[int]) -> frozenset[int]:
    """What of backward's a node reads, seen through views."""
    found: set[int] = set()
    stack = [i]
    while stack:
        for j in own.intersection(graph.inputs[stack.pop()]):
            if _is_view(graph, j):
                stack.append(j)
            else:
                found.add(j)
    return frozenset(found)
