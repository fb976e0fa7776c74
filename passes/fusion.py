"""Keep a compiler's fusion from undoing the order of backward.

A plan with a tight budget counts on a value being recomputed shortly before it is read and freed soon after. A compiler
that makes one kernel of two loops because they read the same memory moves one of them to the other's place: recomputed
copies of a value end up as one that lives long, and results that were never alive at the same time become so. Loops
that feed each other may always be fused; others only if they run at the same moment of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.fx as fx

from .joint_graph import JointGraph
from .schedule import Schedule
from .storage import FUSED_KINDS

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


def may_fuse(first: Sequence[fx.Node], second: Sequence[fx.Node], *, feed_each_other: bool) -> bool:
    """May the loops made of two groups of backward's nodes become one?"""
    moments, others = _moments(first), _moments(second)
    if not moments or not others:
        return True
    if any(COPY_TAG in node.meta for node in (*first, *second)) and len({m.phase for m in (*moments, *others)}) > 1:
        return False
    return feed_each_other or max(m.slot for m in moments) == max(m.slot for m in others)


def _moments(nodes: Iterable[fx.Node]) -> list[Moment]:
    return [node.meta[MOMENT_TAG] for node in nodes if MOMENT_TAG in node.meta]
