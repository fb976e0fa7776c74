"""A schedule checked against the rules: what backward needs is there, and what runs once runs once."""

from __future__ import annotations

from itertools import pairwise

import torch.fx as fx

from ..graph import FORWARD_SIDE, Constraints, JointGraph, Role, backward_inputs, base_of, written_arguments
from ..shared import VerificationError
from .schedule import Schedule


def verify_schedule(graph: JointGraph, constraints: Constraints, schedule: Schedule) -> None:
    """Everything backward reads is there when it is read, and nothing is saved or recomputed that may not be."""
    there = set(backward_inputs(graph)) | set(schedule.received)
    for i in schedule.received:
        constraint = constraints.of[i]
        if constraint is None or (constraint.no_save is not None and not constraint.is_free):
            raise VerificationError(f"`{graph.nodes[i].name}` is handed to backward although it may not be saved")
    _check_own_ops(graph, constraints, schedule)
    overwritten: set[int] = set()
    for i in schedule.events:
        stale = [j for j in graph.inputs[i] if graph.roles[i] is not Role.BACKWARD and base_of(graph, j) in overwritten]
        if stale:
            raise VerificationError(
                f"`{graph.nodes[i].name}` is recomputed after backward has overwritten `{graph.nodes[stale[0]].name}`"
            )
        op = graph.facts[i]
        if op is not None and op.is_mutating:
            overwritten |= written_arguments(graph, i)
        late = [j for j in graph.inputs[i] if j not in there]
        if late:
            raise VerificationError(
                f"`{graph.nodes[i].name}` runs in backward before `{graph.nodes[late[0]].name}`, which it reads"
            )
        constraint = constraints.of[i]
        if constraint is not None and constraint.no_recompute is not None:
            raise VerificationError(
                f"`{graph.nodes[i].name}` is recomputed although it may not be: {constraint.no_recompute.value}"
            )
        there.add(i)
    _check_collectives(graph, schedule)
    missing = [i for i in graph.backward_order if i not in there]
    missing += [
        graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node) and graph.resolve(o) not in there
    ]
    if missing:
        raise VerificationError(f"backward never computes `{graph.nodes[missing[0]].name}`")


def _check_own_ops(graph: JointGraph, constraints: Constraints, schedule: Schedule) -> None:
    """Backward runs ops of its own, each once, and values of forward; neither inputs nor what was not asked for."""
    own, seen = frozenset(graph.backward_order), set[int]()
    for i in schedule.events:
        constraint, is_forward = constraints.of[i], graph.roles[i] in FORWARD_SIDE
        if (constraint is not None and constraint.is_free) or not (is_forward or i in own):
            raise VerificationError(f"`{graph.nodes[i].name}` runs in backward, of which it is no op")
        if i in seen and not is_forward:
            raise VerificationError(f"`{graph.nodes[i].name}` runs twice, but only values of forward may run again")
        seen.add(i)


def _check_collectives(graph: JointGraph, schedule: Schedule) -> None:
    """Collectives run in the order of the program, so that ranks with different plans still meet each other."""
    for order in (schedule.forward, schedule.events):
        found = [i for i in order if (op := graph.facts[i]) is not None and op.is_collective]
        if found != sorted(found):
            late = next(a for a, b in pairwise(found) if a > b)
            raise VerificationError(f"the collective `{graph.nodes[late].name}` is moved ahead of an earlier one")
