"""At which moment of a plan the nodes of its backward graph run, said on the nodes."""

from __future__ import annotations

from typing import NamedTuple

from ..graph import JointGraph
from ..ops import FUSED_KINDS
from .schedule import Schedule

COPY_TAG = "remat_copy_of"
"""`node.meta` key of a recomputed copy: the name of the forward node that it repeats."""


MOMENT_TAG = "remat_moment"
"""`node.meta` key of backward's nodes: when the plan runs them."""


class Moment(NamedTuple):
    """When a node of backward runs."""

    phase: int
    """Between two points at which the plan forgets what it has recomputed."""
    slot: int
    """Between two ops that are kernels of their own."""


def moments_of(graph: JointGraph, schedule: Schedule) -> list[Moment]:
    """Per event of backward, when it runs."""
    boundaries = frozenset(schedule.phases)
    moments, phase, slot = [], 0, 0
    for number, i in enumerate(schedule.events):
        op = graph.facts[i]
        phase += number in boundaries
        slot += op is None or op.kind not in FUSED_KINDS
        moments.append(Moment(phase, slot))
    return moments
