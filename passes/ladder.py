"""Prices per byte at which the cheapest cut changes, found by looking between cuts that differ.

Raising the price of a kept byte walks the lower convex hull of time against bytes. The hull has too many corners to
visit them all; what is looked at next is the widest gap in kept bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from .flow import FlowProblem
from .min_cut import Cut

NUM_CUTS = 12
"""How many cuts are made at most."""

SMALLEST_GAP = 0.02
"""Gaps below this part of the widest choice are not looked into."""

CLOSE = 1.2
"""Prices this close together are not looked between: what flips there flips all at once."""

START = (0.0, 1.0, 32.0, 1e9)
"""Prices to begin with, as multiples of what moving a byte out and back costs; the last one keeps only what must be."""


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """A cut at one price."""

    multiple: float
    cut: Cut
    saved: tuple[int, ...]
    """The values that it keeps."""
    saved_bytes: int


def ladder(problem: FlowProblem, kept: Collection[int] = ()) -> tuple[Rung, ...]:
    """Cut at rising prices, `kept` values being there for nothing; the first keeps most, the last least."""
    rungs = [_rung(problem, multiple, kept) for multiple in START]
    smallest = SMALLEST_GAP * max(rung.saved_bytes for rung in rungs)
    closed: set[float] = set()
    while len(rungs) < NUM_CUTS:
        gaps = [
            (low.saved_bytes - high.saved_bytes, -k)
            for k, (low, high) in enumerate(pairwise(rungs))
            if low.multiple not in closed and low.saved_bytes - high.saved_bytes > smallest
        ]
        if not gaps:
            break
        k = -max(gaps)[1]
        low, high = rungs[k], rungs[k + 1]
        middle = _rung(problem, _between(low.multiple, high.multiple), kept)
        if low.multiple and high.multiple < CLOSE * low.multiple:
            closed.add(low.multiple)
        rungs.insert(k + 1, middle)
    return tuple(rungs)


def keep_least(problem: FlowProblem) -> tuple[int, ...]:
    """The values that are kept however dear a byte is."""
    return _rung(problem, START[-1], ()).saved


def _between(low: float, high: float) -> float:
    if low == 0.0:
        return high / 16
    return low * 16 if high > 256 * low else math.sqrt(low * high)


def _rung(problem: FlowProblem, multiple: float, kept: Collection[int]) -> Rung:
    cut = problem.cut(multiple * problem.move_ticks_per_byte, kept)
    saved = tuple(problem.value_of[i] for i in problem.saved(cut))
    return Rung(multiple, cut, saved, sum(problem.num_bytes(v) for v in saved))
