"""Plan for region budgets: a price per byte for each region that is short of memory, and the planners for the rest.

Each region that takes more than its budget gets a price per kept byte of its own, raised until its share fits, and then
lowered as far as it still does. Where no price helps, because what is recomputed piles up in backward, the region
is planned by itself as if nothing else took memory, and what that plan does with the region's values is taken over. A
local search improves on the result; a budget of the whole graph is met by the planners for that, at these prices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..memory.schedule import Schedule, Scheduler
from ..memory.shares import Limits, SharePeak
from ..memory.simulate import Simulator
from ..memory.storage import Storages
from .improve import NODES_SIMULATED, Improver
from .moves import Candidate, Move, Touch
from .planner import Offer, Planner, extra_ticks
from .problem import FlowProblem

FIRST_MULTIPLE, FACTOR, NUM_RAISES = 0.25, 4.0, 12
"""Prices per byte that are tried, as multiples of what moving a byte costs: the last keeps only what must be kept."""

SMALL_PART = 2
"""A region whose values are fewer than the graph's over this is searched by itself before the whole graph is."""

NUM_REFINEMENTS = 5
"""How often a price that fits is brought closer to the highest one that does not."""


@dataclass(frozen=True, slots=True, eq=False)
class ShareSearch:
    """What the search for region budgets alone came to."""

    problem: FlowProblem
    """With the prices that were found."""
    schedule: Schedule
    lowest: tuple[int, ...]
    """Per region, the smallest share that was found in any schedule tried."""
    lowest_schedules: tuple[Schedule, ...]
    """The schedules that reach them."""
    is_plain: bool
    """No price was needed."""


class _RegionImprover(Improver[Offer]):
    """Anneals what one region does: the graph may be large, but what can be changed is not."""

    def __init__(self, planner: Planner, inside: Collection[int]) -> None:
        super().__init__(planner.problem, planner.scheduler, planner.improver.judge)
        self.planner, self.inside = planner, inside

    def anneal(self, limit: int) -> Offer | None:
        """Look for a share within a limit around the lowest one that a cut reaches."""
        start = min((self.planner.fastest, *self.planner.dearer_cuts), key=lambda o: (o.peak_bytes, o.extra_ticks))
        self.nodes_left = NODES_SIMULATED
        fitting = [offer for offer in self._anneal([start], limit) if offer.peak_bytes <= limit]
        return min(fitting, key=lambda o: (o.extra_ticks, o.peak_bytes), default=None)

    def _random_move(self, candidate: Candidate, touches: dict[int, list[Touch]], rng: random.Random) -> Move | None:
        own = {v: moments for v, moments in touches.items() if v in self.inside}
        return super()._random_move(candidate, own, rng) if own else None


class _Searcher:
    """Looks for a schedule in which every region keeps within its limit."""

    def __init__(self, problem: FlowProblem, storages: Storages, limits: Limits, *, gives_up: bool) -> None:
        self.problem, self.storages, self.limits, self.gives_up = problem, storages, limits, gives_up
        self.scheduler = Scheduler(problem.graph, problem.constraints)
        self.simulator = Simulator(problem.graph, storages)
        self.lowest: list[tuple[int, Schedule] | None] = [None] * len(limits.num_bytes)

    def search(self) -> ShareSearch:
        """Raise prices, refine them, and plan apart what no price brings down."""
        nothing = [0.0] * len(self.lowest)
        schedule, peaks = self._cut(nothing)
        if not self.limits.exceeded(peaks):
            return self._result(self.problem, schedule, is_plain=True)
        multiples = self._raised(peaks)
        priced = self._priced(multiples)
        schedule, peaks = self._cut(multiples)
        for region in self.limits.exceeded(peaks):
            schedule = self._planned_apart(priced, schedule, region)
            low = self.lowest[region]
            if self.gives_up and low is not None and low[0] > self.limits.num_bytes[region]:
                break
        return self._result(priced, schedule, is_plain=False)

    def _result(self, problem: FlowProblem, schedule: Schedule, *, is_plain: bool) -> ShareSearch:
        found = [low for low in self.lowest if low is not None]
        return ShareSearch(problem, schedule, tuple(low[0] for low in found), tuple(low[1] for low in found), is_plain)

    def _raised(self, peaks: Sequence[SharePeak]) -> list[float]:
        """Raise the prices of regions that are over their limit until none is, then refine."""
        high = [0.0] * len(peaks)
        low = list(high)
        best = [(peak.num_bytes, 0.0) for peak in peaks]
        multiple = FIRST_MULTIPLE
        over = self.limits.exceeded(peaks)
        for _ in range(NUM_RAISES):
            for region in over:
                low[region], high[region] = high[region], multiple
            _, peaks = self._cut(high)
            best = [min(b, (p.num_bytes, m)) for b, p, m in zip(best, peaks, high, strict=True)]
            over = self.limits.exceeded(peaks)
            if not over:
                return self._refined(low, high)
            multiple *= FACTOR
        # More of a price is not less of a share: take each hopeless region's best, and leave the others as they are.
        return [best[region][1] if region in over else m for region, m in enumerate(high)]

    def _refined(self, low: list[float], high: list[float]) -> list[float]:
        """Lower prices again as long as everything fits."""
        fitting = list(high)
        for _ in range(NUM_REFINEMENTS):
            middle = [math.sqrt(a * b) if a else b / FACTOR for a, b in zip(low, high, strict=True)]
            _, peaks = self._cut(middle)
            over = self.limits.exceeded(peaks)
            if not over:
                fitting = list(middle)
            for region, price in enumerate(middle):
                (low if region in over else high)[region] = price
        _, peaks = self._cut(high)
        return fitting if self.limits.exceeded(peaks) else high

    def _priced(self, multiples: Sequence[float]) -> FlowProblem:
        unit, regions_at = self.problem.move_ticks_per_byte, self.limits.shares.regions_at
        prices = {v: unit * sum(multiples[r] for r in regions_at[i]) for v, i in enumerate(self.problem.bases)}
        return replace(self.problem, extra_ticks_per_byte={v: price for v, price in prices.items() if price})

    def _cut(self, multiples: Sequence[float]) -> tuple[Schedule, tuple[SharePeak, ...]]:
        problem = self._priced(multiples)
        schedule = self.scheduler.backward(problem.saved(problem.cut()))
        return schedule, self._peaks(schedule)

    def _peaks(self, schedule: Schedule) -> tuple[SharePeak, ...]:
        peaks = self.limits.shares.peaks(self.simulator.run(schedule))
        for region, peak in enumerate(peaks):
            low = self.lowest[region]
            if low is None or peak.num_bytes < low[0]:
                self.lowest[region] = peak.num_bytes, schedule
        return peaks

    def _planned_apart(self, priced: FlowProblem, schedule: Schedule, region: int) -> Schedule:
        """Plan a region as if it alone took memory, and do with its values what that plan does."""
        shares, limit = self.limits.shares, self.limits.num_bytes[region]
        members = [region in regions for regions in shares.regions_at]
        sizes = tuple(size if is_member else 0 for size, is_member in zip(priced.costs.num_bytes, members, strict=True))
        alone = replace(priced, costs=replace(priced.costs, num_bytes=sizes))
        planner = Planner(alone, shares.masked(self.storages, region))
        inside = {v for v, i in enumerate(priced.bases) if members[i]}
        offer = None
        if SMALL_PART * len(inside) < len(priced.bases):
            offer = _RegionImprover(planner, inside).anneal(limit)
        offer = offer or planner.within(limit) or planner.lowest
        improver = planner.improver
        merged: Candidate = frozenset(
            (
                *(fact for fact in improver.read(schedule) if fact.value not in inside),
                *(fact for fact in improver.read(offer.schedule) if fact.value in inside),
            )
        )
        options = [improver.write(merged), offer.schedule, schedule]
        return min(options, key=self._excess)

    def _excess(self, schedule: Schedule) -> tuple[int, int]:
        """By how much limits are exceeded, then the time."""
        rows = zip(self._peaks(schedule), self.limits.num_bytes, strict=True)
        excess = sum(max(0, peak.num_bytes - limit) for peak, limit in rows)
        return excess, extra_ticks(self.problem, schedule)


def reconciled(search: ShareSearch, storages: Storages, limits: Limits) -> ShareSearch:
    """Look for a schedule within all limits at once, starting from one that leaves some of them exceeded."""
    planner = SharePlanner(search, storages, limits, None)
    offer = planner.within(planner.unit_bytes) or min(planner.seed, planner.lowest, key=lambda o: o.peak_bytes)
    return replace(search, schedule=offer.schedule)


def search_shares(problem: FlowProblem, storages: Storages, limits: Limits, *, gives_up: bool) -> ShareSearch:
    """Look for a schedule in which every region keeps within its limit; the last one tried if there is none.

    `gives_up` at the first region whose limit cannot be met, instead of doing what can be done for the others.
    """
    return _Searcher(problem, storages, limits, gives_up=gives_up).search()


class SharePlanner(Planner):
    """Makes and judges schedules under region budgets: a peak says how near the limits are to being exceeded.

    Peaks are in units of one of the limits, the whole graph's if that has one; see `Limits.scaled`.
    """

    def __init__(self, search: ShareSearch, storages: Storages, limits: Limits, budget_bytes: int | None) -> None:
        super().__init__(search.problem, storages)
        self.search, self.limits = search, limits
        self.counts_whole = budget_bytes is not None
        self.unit_bytes = max(limits.num_bytes) if budget_bytes is None else budget_bytes

    @cached_property
    def seed(self) -> Offer:
        """The schedule that region budgets alone led to."""
        return self._offer(self.search.schedule, "cut" if self.search.is_plain else "regions")

    def best(self) -> Offer | None:
        """The fastest schedule found within all limits; None if none is."""
        if self.seed.peak_bytes > self.unit_bytes:
            return self.within(self.unit_bytes)
        if self.search.is_plain:
            return self.seed
        found = [self.seed, *self.improver.within([self.seed], self.unit_bytes)]
        fitting = [offer for offer in found if offer.peak_bytes <= self.unit_bytes]
        return min(fitting, key=lambda o: (o.extra_ticks, o.peak_bytes))

    def unscaled(self, offer: Offer) -> Offer:
        """An offer with its real bytes."""
        return super()._offer(offer.schedule, offer.planner)

    def _offers(self, budget_bytes: int) -> Iterator[Offer]:
        yield self.seed
        yield from super()._offers(budget_bytes)

    def _offer(self, schedule: Schedule, planner: str) -> Offer:
        offer = super()._offer(schedule, planner)
        scaled = self.limits.scaled(offer.simulation, self.unit_bytes, counts_whole=self.counts_whole)
        return replace(offer, simulation=scaled)
