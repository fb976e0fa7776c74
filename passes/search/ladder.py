"""The cheapest cuts at rising prices per kept byte, and the place in a row of plans where they cease to fit a budget.

The cuts are the lower convex hull of time against bytes.
Two cuts that are neighbours as far as is known cost the same at one price: the slope between them. Cutting at that
price gives a cut between the two, or shows that there is none (Eisner and Severance, 1976). The hull may have many
corners; what is looked into next is the widest gap in kept bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

from ..memory import Scheduler
from .min_cut import Choice
from .problem import FlowProblem
from .tuning import Tuning


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
    problem: FlowProblem, tuning: Tuning, kept: Collection[int] = (), unpriced: Collection[int] = ()
) -> tuple[Rung, ...]:
    """Cut at rising prices; the first keeps most, the last least.

    `kept` values are there for nothing; `unpriced` ones cost what they cost where memory is not short.
    """
    unpriced = frozenset(unpriced)
    rungs = [_rung(problem, price, kept, unpriced) for price in (0.0, _dearest(problem, tuning))]
    smallest = tuning.smallest_gap * max(rung.priced_bytes for rung in rungs)
    closed: set[int] = set()
    """Kept bytes of rungs that have no cut between them and the next one."""
    for _ in range(tuning.num_cuts - len(rungs)):
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


def keep_least(problem: FlowProblem, tuning: Tuning) -> tuple[int, ...]:
    """The values that are kept however dear a byte is."""
    return _rung(problem, _dearest(problem, tuning), (), frozenset()).saved


def _dearest(problem: FlowProblem, tuning: Tuning) -> float:
    return tuning.dearest * problem.move_ticks_per_byte


def _rung(problem: FlowProblem, ticks_per_byte: float, kept: Collection[int], unpriced: frozenset[int]) -> Rung:
    cut = problem.cut(ticks_per_byte, kept, unpriced)
    saved = tuple(v for v, choice in enumerate(cut.choices) if choice is Choice.SAVE)
    priced = [problem.num_bytes(v) for v in saved if v not in unpriced and v not in kept]
    ticks = cut.price - sum(round(ticks_per_byte * num_bytes) for num_bytes in priced)
    return Rung(saved, sum(priced), ticks, ticks_per_byte)


class Ladders:
    """The ladders of one graph, by the stage of backward at which memory is taken to be short; each is found once."""

    def __init__(self, problem: FlowProblem, scheduler: Scheduler, tuning: Tuning) -> None:
        self.problem, self.scheduler, self.tuning = problem, scheduler, tuning
        self._found: dict[int, tuple[Rung, ...]] = {}

    @property
    def stages(self) -> tuple[int, ...]:
        """The end of forward, which is stage -1, and the stages that were asked for."""
        return (-1, *self._found)

    def beyond(self, stage: int) -> tuple[Rung, ...]:
        """Cuts at rising prices for bytes that are still kept after a stage of backward.

        If the peak is there, what is used up by then takes no memory that anything else could have: whether it is kept
        or computed again just before, it is there.
        """
        if stage not in self._found:
            self._found[stage] = ladder(self.problem, self.tuning, unpriced=self.used_up_by(stage))
        return self._found[stage]

    def used_up_by(self, stage: int) -> list[int]:
        """The values that nothing after a stage of backward needs; none at the end of forward, which is stage -1."""
        return [v for v, last in enumerate(self._last_stages) if last <= stage] if stage >= 0 else []

    @cached_property
    def _last_stages(self) -> tuple[int, ...]:
        """Per value, the last stage of backward that needs it or anything computed from it."""
        problem = self.problem
        last = [-1] * len(problem.bases)
        for stage, root in enumerate(self.scheduler.roots):
            for i in problem.graph.inputs[root]:
                if i in problem.value_of:
                    last[problem.value_of[i]] = stage
        for v in range(len(last) - 1, -1, -1):
            for u in problem.inputs[v]:
                last[u] = max(last[u], last[v])
        return tuple(last)


# -------------------------------------------------------------------------------------------------- rows of plans


class HasPeak(Protocol):
    """A plan that was simulated."""

    @property
    def peak_bytes(self) -> int:
        """Its activation peak."""


P = TypeVar("P", bound=HasPeak)


class End(NamedTuple):
    """A place in the row, and what the plan there takes."""

    place: int
    peak_bytes: int


def narrow(
    plan_at: Callable[[int], P | None],
    fitting: End,
    exceeding: End,
    budget_bytes: int,
    close_bytes: int | None,
    num_guesses: int,
) -> Iterator[P]:
    """Try plans between one that fits and one that does not, until neighbours are found of which one does.

    With `close_bytes` that many bytes are near enough to the budget, and peaks are taken to grow in proportion at
    first, so one guesses so often before one halves what is left. A plan that is None, because it would be too long,
    counts as one that takes too little.
    """
    guesses = 0 if close_bytes is None else num_guesses
    while abs(exceeding.place - fitting.place) > 1 and (close_bytes is None or fitting.peak_bytes < close_bytes):
        place = _guess(fitting, exceeding, budget_bytes) if guesses > 0 else (fitting.place + exceeding.place) // 2
        guesses -= 1
        plan = plan_at(place)
        if plan is not None:
            yield plan
        if plan is None:
            fitting = End(place, fitting.peak_bytes)
        elif plan.peak_bytes <= budget_bytes:
            fitting = End(place, plan.peak_bytes)
        else:
            exceeding = End(place, plan.peak_bytes)


def _guess(fitting: End, exceeding: End, budget_bytes: int) -> int:
    """Where the budget is met if peaks grow in proportion; between the ends in any case."""
    growth = max(1, exceeding.peak_bytes - fitting.peak_bytes)
    part = (budget_bytes - fitting.peak_bytes) / growth
    way = exceeding.place - fitting.place
    step = max(1, min(abs(way) - 1, int(part * abs(way))))
    return fitting.place + (step if way > 0 else -step)
