"""The order of backward: its own nodes as traced, and each recomputation just before its first reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from .constraints import Constraints, split_closing_writes
from .joint_graph import FORWARD_SIDE, JointGraph, Role


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What backward runs, in order, and what it receives from forward."""

    events: tuple[int, ...]
    """Node positions; a forward-side position means: recompute it here."""
    received: tuple[int, ...]
    """Forward-side values that backward reads without recomputing them, in graph order."""


def schedule_backward(graph: JointGraph, constraints: Constraints, saved: Sequence[int]) -> Schedule:
    """Place every recomputation as late as its first reader allows."""
    available = set(saved)
    given = {i for i, c in enumerate(constraints.of) if c is not None and c.is_free}
    available |= given | {i for i, role in enumerate(graph.roles) if role is Role.BACKWARD_INPUT}
    received: set[int] = set()
    events: list[int] = []
    for root in _roots(graph):
        stack = [root]
        while stack:
            i = stack[-1]
            if i in available:
                stack.pop()
                continue
            missing = [j for j in reversed(graph.inputs[i]) if j not in available]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            available.add(i)
            events.append(i)
            received.update(j for j in graph.inputs[i] if graph.roles[j] in FORWARD_SIDE)
        if graph.roles[root] in FORWARD_SIDE:
            received.add(root)
    received -= set(events)
    return Schedule(tuple(events), tuple(sorted(received)))


def _roots(graph: JointGraph) -> list[int]:
    """What backward computes, in order. Its closing writes come last: what they overwrite may still be read."""
    body, writes = split_closing_writes(graph)
    sources = [j for i in writes for j in graph.inputs[i]]
    return [*body, *sources, *_forward_values_returned(graph), *writes]


def _forward_values_returned(graph: JointGraph) -> list[int]:
    """Gradients that are forward values themselves, such as the gradient of a sum."""
    returned = [graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)]
    return [i for i in returned if graph.roles[i] is not Role.BACKWARD]
