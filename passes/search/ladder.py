"""The cheapest cuts at rising prices per kept byte: the lower convex hull of time against bytes.

Two cuts that are neighbours as far as is known cost the same at one price: the slope between them. Cutting at that
price gives a cut between the two, or shows that there is none (Eisner and Severance, 1976). The hull may have many
corners; what is looked into next is the widest gap in kept bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from .min_cut import Choice
from .problem import FlowProblem

NUM_CUTS = 16
"""How many cuts are made at most."""

SMALLEST_GAP = 0.02
"""Gaps below this part of the widest choice are not looked into."""

DEAREST = 1e9
"""The last price, as a multiple of what moving a byte out and back costs: it keeps only what must be kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Rung:
    """A cut at one price."""

    saved: tuple[int, ...]
    """The values that it keeps."""
    priced_bytes: int
    """The bytes of those that have a price."""
    ticks: int
    """What it costs without the price of bytes."""
    ticks_per_byte: float = 0.0
    """The price at which it is the cheapest."""

    def least_ticks(self, num_bytes: float) -> float:
        """What any choice costs that keeps no more bytes: at this rung's price none is cheaper than the rung."""
        return self.ticks + self.ticks_per_byte * (self.priced_bytes - num_bytes) - len(self.saved)


def ladder(
    problem: FlowProblem, kept: Collection[int] = (), unpriced: Collection[int] = (), num_cuts: int = NUM_CUTS
) -> tuple[Rung, ...]:
    """Cut at rising prices; the first keeps most, the last least.

    `kept` values are there for nothing; `unpriced` ones cost what they cost where memory is not short.
    """
    unpriced = frozenset(unpriced)
    rungs = [_rung(problem, price, kept, unpriced) for price in (0.0, DEAREST * problem.move_ticks_per_byte)]
    smallest = SMALLEST_GAP * max(rung.priced_bytes for rung in rungs)
    closed: set[int] = set()
    """Kept bytes of rungs that have no cut between them and the next one."""
    for _ in range(num_cuts - len(rungs)):
        gaps = [
            (more.priced_bytes - less.priced_bytes, -k)
            for k, (more, less) in enumerate(pairwise(rungs))
            if more.priced_bytes not in closed and more.priced_bytes - less.priced_bytes > smallest
        ]
        if not gaps:
            break
        k = -max(gaps)[1]
        more, less = rungs[k], rungs[k + 1]
        slope = (less.ticks - more.ticks) / (more.priced_bytes - less.priced_bytes)
        middle = _rung(problem, slope, kept, unpriced)
        if less.priced_bytes < middle.priced_bytes < more.priced_bytes:
            rungs.insert(k + 1, middle)
        else:
            closed.add(more.priced_bytes)
    return tuple(rungs)


def keep_least(problem: FlowProblem) -> tuple[int, ...]:
    """The values that are kept however dear a byte is."""
    return _rung(problem, DEAREST * problem.move_ticks_per_byte, (), frozenset()).saved


def _rung(problem: FlowProblem, ticks_per_byte: float, kept: Collection[int], unpriced: frozenset[int]) -> Rung:
    cut = problem.cut(ticks_per_byte, kept, unpriced)
    saved = tuple(v for v, choice in enumerate(cut.choices) if choice is Choice.SAVE)
    priced = [problem.num_bytes(v) for v in saved if v not in unpriced and v not in kept]
    ticks = cut.price - sum(round(ticks_per_byte * num_bytes) for num_bytes in priced)
    return Rung(saved, sum(priced), ticks, ticks_per_byte)
