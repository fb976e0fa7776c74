"""The order of backward's own nodes: as traced, but for what gives memory back, which runs as soon as it can.

Autograd's formula of a linear layer computes the gradient of its input first and that of its weight after it. Between
the two, the layer's input has to be there, and the new gradient is there already. The other way round the gradient of
the weight, which is the step's result and not an activation, is done before the other one takes memory, and what only
it has read is free by then. In the same way a sum that alone reads a large value lets go of that at once. The results
are the same to the bit: nothing but the order changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.fx as fx

from .constraints import split_closing_writes
from .joint_graph import JointGraph, Role
from .op_facts import Kind

_CASTS = frozenset({torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default})
"""What may stand between the op that finishes a gradient and the gradient: another type, and the same memory after."""


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
    early = _finishing(graph, body, readers) | _shrinking(graph, body, readers)
    sources = {i: _computed_for(graph, i, own) for i in body if i in early}
    waiting: dict[int, list[int]] = {}
    for i, found in sources.items():
        for source in found:
            waiting.setdefault(source, []).append(i)
    order: list[int] = []
    done: set[int] = set()

    def run(wanted: int) -> None:
        """Run a node, the views that it reads before it, and what it lets give memory back after it."""
        stack = [wanted]
        while stack:
            i = stack.pop()
            missing = [j for j in graph.inputs[i] if j in own and j not in done]
            if missing:
                stack += [i, *missing]
            elif i not in done:
                done.add(i)
                order.append(i)
                stack += [k for k in reversed(waiting.get(i, ())) if sources[k] <= done]

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
    """Sums over a value that nothing else reads."""
    return frozenset(
        i
        for i in body
        if (op := graph.facts[i]) is not None
        and op.kind is Kind.REDUCTION
        and op.is_pure
        and all(len(readers[j]) == 1 for j in graph.inputs[i])
    )


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
