"""Keep a compiler's fusion from undoing the order of backward.

A plan with a tight budget counts on a value being recomputed shortly before it is read and freed soon after. A compiler
that makes one kernel of two loops because they read the same memory moves one of them to the other's place: recomputed
copies of a value end up as one that lives long, and results that were never alive at the same time become so. Loops
that feed each other may be fused, except that a reduction stays where it is: put off until its small result is read, it
would keep what it reads alive until then. Other loops may be fused only if they run at the same moment of the plan.

A compiler that puts a kernel made of an early and a late loop where the early one was, and all that it waits for before
it, runs the main line of backward first and everything beside it (gradients of weights, say) in the end, with what that
reads alive until then. Kernels are to run as soon as they can, and no earlier than the last of their loops, nor than
the plan runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import torch.fx as fx

from ..memory import COPY_TAG, MOMENT_TAG, Moment
from ..ops import FUSED_KINDS, INLINED_KINDS, facts_of
from .readers import readers_of

_REDUCTIONS = FUSED_KINDS - INLINED_KINDS


def may_fuse(first: Sequence[fx.Node], second: Sequence[fx.Node], *, feed_each_other: bool) -> bool:
    """May the loops made of two groups of backward's nodes become one?"""
    moments, others = _moments(first), _moments(second)
    if not moments or not others:
        return True
    slot, other = max(m.slot for m in moments), max(m.slot for m in others)
    if slot == other:
        return True
    if any(COPY_TAG in node.meta for node in (*first, *second)) and len({m.phase for m in (*moments, *others)}) > 1:
        return False
    if not feed_each_other or _reduces_before(max(slot, other), (*first, *second)):
        return False
    early = first if slot < other else second
    return not _is_read_before(max(slot, other), early)


def _reduces_before(slot: int, nodes: Iterable[fx.Node]) -> bool:
    """Is any of the nodes a reduction that the plan runs before a slot?"""
    return any(
        MOMENT_TAG in node.meta
        and node.meta[MOMENT_TAG].slot < slot
        and node.op == "call_function"
        and facts_of(node.target).kind in _REDUCTIONS
        for node in nodes
    )


def _is_read_before(slot: int, nodes: Sequence[fx.Node]) -> bool:
    """Does anything else read one of the nodes before a slot? Then all that is made one with it has to run by then."""
    own = set(nodes)
    readers = (reader for node in nodes for reader, _, _ in readers_of(node) if reader not in own)
    return any(moment.slot < slot for moment in _moments(readers))


def _moments(nodes: Iterable[fx.Node]) -> list[Moment]:
    return [node.meta[MOMENT_TAG] for node in nodes if MOMENT_TAG in node.meta]


def planned_order(
    places: Sequence[int], nodes: Sequence[Sequence[fx.Node]], waits_for: Sequence[set[int]]
) -> list[int]:
    """The order of kernels, given the place of each in the compiler's own order and the graph's nodes behind it.

    A compiler makes a loop when it meets who reads its result from memory, and not when it meets the loop's own nodes.
    The plan may have something run between the two.
    """
    slots = [max((moment.slot for moment in _moments(own)), default=None) for own in nodes]
    ranks: list[tuple[int, int]] = [(0, 0)] * len(places)
    latest = 0
    for place, k in sorted(zip(places, range(len(places)), strict=True)):
        slot = slots[k]
        latest = latest if slot is None else slot
        ranks[k] = (latest, place)
    return kernel_order(ranks, waits_for)


def kernel_order(ranks: Sequence[tuple[int, int]], waits_for: Sequence[set[int]]) -> list[int]:
    """Run what is ready, the lowest rank first: nothing is moved ahead because something late waits for it."""
    missing = [len(others) for others in waits_for]
    waiting: list[list[int]] = [[] for _ in ranks]
    for k, others in enumerate(waits_for):
        for other in others:
            waiting[other].append(k)
    ready = [(ranks[k], k) for k, number in enumerate(missing) if not number]
    heapify(ready)
    order = []
    while ready:
        _, done = heappop(ready)
        order.append(done)
        for k in waiting[done]:
            missing[k] -= 1
            if not missing[k]:
                heappush(ready, (ranks[k], k))
    assert len(order) == len(ranks), "kernels wait for each other"
    return order
