"""Search under region budgets: a price per byte for each region that is short of memory, and the planners for the rest.

Each region that takes more than its budget gets a price per kept byte of its own, raised until its share fits, and then
lowered as far as it still does. Where no price helps, because what is recomputed piles up in backward, the region
is planned by itself as if nothing else took memory, and what that plan does with the region's values is taken over. A
local search improves on the result; a budget of the whole graph is met by the planners for that, at these prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..memory import Limits, Schedule, SharePeak, Simulation
from ..search import Bench, Candidate, FlowProblem, Improver, Offer, Planner, by_peak, by_time


@dataclass(frozen=True, slots=True, eq=False)
class ShareSearch:
    """What the search for region budgets alone came to; offers have their real bytes."""

    problem: FlowProblem
    """With the prices that were found."""
    offer: Offer
    lowest: tuple[Offer, ...]
    """Per region, the schedule with the smallest share of all that were tried."""
    lowest_bytes: tuple[int, ...]
    """Per region, that share."""
    is_plain: bool
    """No price was needed."""


def search_shares(bench: Bench, limits: Limits, *, gives_up: bool) -> ShareSearch:
    """Look for a schedule in which every region keeps within its limit; the last one tried if there is none.

    `gives_up` at the first region whose limit cannot be met, instead of doing what can be done for the others.
    """
    return _Searcher(bench, limits, gives_up=gives_up).search()


def reconciled(bench: Bench, search: ShareSearch, limits: Limits) -> ShareSearch:
    """Look for a schedule within all limits at once, starting from one that leaves some of them exceeded."""
    planner = planner_within(bench, search, limits, None)
    unit_bytes = unit_of(limits, None)
    offer = planner.within(unit_bytes) or min(*planner.seeds, planner.lowest, key=lambda o: o.peak_bytes)
    return replace(search, offer=planner.bench.in_bytes(offer))


def planner_within(bench: Bench, search: ShareSearch, limits: Limits, budget_bytes: int | None) -> Planner:
    """A planner at the prices found, to which a peak says how near the limits are to being exceeded.

    Peaks are in units of one of the limits, the whole graph's if that has one; see `Limits.scaled`.
    """
    unit_bytes, counts_whole = unit_of(limits, budget_bytes), budget_bytes is not None

    def judge(schedule: Schedule) -> Simulation:
        return limits.scaled(bench.simulator.run(schedule), unit_bytes, counts_whole=counts_whole)

    judged = bench.judged(judge, search.problem)
    seed = judged.offer(search.offer.schedule, "cut" if search.is_plain else "regions")
    return Planner(judged, seeds=[seed])


def unit_of(limits: Limits, budget_bytes: int | None) -> int:
    """The limit that all others are restated as: that of the whole graph, or the largest of the regions'."""
    return max(limits.num_bytes) if budget_bytes is None else budget_bytes


def best_within(planner: Planner, search: ShareSearch, unit_bytes: int) -> Offer | None:
    """The fastest schedule found within all limits; None if none is."""
    (seed,) = planner.seeds
    if seed.peak_bytes > unit_bytes:
        return planner.within(unit_bytes)
    if search.is_plain:
        return seed
    found = [seed, *planner.improver.within([seed], unit_bytes)]
    return min((offer for offer in found if offer.peak_bytes <= unit_bytes), key=by_time)


class _Searcher:
    """Looks for a schedule in which every region keeps within its limit."""

    def __init__(self, bench: Bench, limits: Limits, *, gives_up: bool) -> None:
        self.bench, self.problem, self.tuning = bench, bench.problem, bench.tuning
        self.limits, self.gives_up = limits, gives_up
        self.lowest: list[tuple[int, Offer] | None] = [None] * len(limits.num_bytes)

    def search(self) -> ShareSearch:
        """Raise prices, refine them, and plan apart what no price brings down."""
        nothing = [0.0] * len(self.lowest)
        offer, peaks = self._cut(nothing)
        if not self.limits.exceeded(peaks):
            return self._result(self.problem, offer, is_plain=True)
        multiples = self._raised(peaks)
        priced = self._priced(multiples)
        offer, peaks = self._cut(multiples)
        for region in self.limits.exceeded(peaks):
            offer = self._planned_apart(priced, offer, region)
            low = self.lowest[region]
            if self.gives_up and low is not None and low[0] > self.limits.num_bytes[region]:
                break
        return self._result(priced, offer, is_plain=False)

    def _result(self, problem: FlowProblem, offer: Offer, *, is_plain: bool) -> ShareSearch:
        found = [low for low in self.lowest if low is not None]
        return ShareSearch(problem, offer, tuple(low[1] for low in found), tuple(low[0] for low in found), is_plain)

    # ---------------------------------------------------------------------------------------------- prices

    def _raised(self, peaks: Sequence[SharePeak]) -> list[float]:
        """Raise the prices of regions that are over their limit until none is, then refine."""
        high = [0.0] * len(peaks)
        low = list(high)
        best = [(peak.num_bytes, 0.0) for peak in peaks]
        multiple = self.tuning.first_multiple
        over = self.limits.exceeded(peaks)
        for _ in range(self.tuning.num_raises):
            for region in over:
                low[region], high[region] = high[region], multiple
            _, peaks = self._cut(high)
            best = [min(b, (p.num_bytes, m)) for b, p, m in zip(best, peaks, high, strict=True)]
            over = self.limits.exceeded(peaks)
            if not over:
                return self._refined(low, high)
            multiple *= self.tuning.raised_by
        # More of a price is not less of a share: take each hopeless region's best, and leave the others as they are.
        return [best[region][1] if region in over else m for region, m in enumerate(high)]

    def _refined(self, low: list[float], high: list[float]) -> list[float]:
        """Lower prices again as long as everything fits."""
        fitting = list(high)
        for _ in range(self.tuning.num_refinements):
            middle = [math.sqrt(a * b) if a else b / self.tuning.raised_by for a, b in zip(low, high, strict=True)]
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

    def _cut(self, multiples: Sequence[float]) -> tuple[Offer, tuple[SharePeak, ...]]:
        problem = self._priced(multiples)
        offer = self.bench.offer(self.bench.scheduler.backward(problem.saved(problem.cut())), "cut")
        return offer, self._peaks(offer)

    def _peaks(self, offer: Offer) -> tuple[SharePeak, ...]:
        peaks = self.limits.shares.peaks(offer.simulation)
        for region, peak in enumerate(peaks):
            low = self.lowest[region]
            if low is None or peak.num_bytes < low[0]:
                self.lowest[region] = peak.num_bytes, offer
        return peaks

    # ---------------------------------------------------------------------------------------------- one region apart

    def _planned_apart(self, priced: FlowProblem, offer: Offer, region: int) -> Offer:
        """Plan a region as if it alone took memory, and do with its values what that plan does."""
        members = [region in regions for regions in self.limits.shares.regions_at]
        inside = {v for v, i in enumerate(priced.bases) if members[i]}
        planner = self._planner_alone(priced, region, members)
        found = _found_apart(planner, inside, self.limits.num_bytes[region])
        moves = planner.moves
        merged: Candidate = frozenset(
            (
                *(fact for fact in moves.read(offer.schedule) if fact.value not in inside),
                *(fact for fact in moves.read(found.schedule) if fact.value in inside),
            )
        )
        options = [self.bench.offer(moves.write(merged), "search"), self.bench.offer(found.schedule, "search"), offer]
        return min(options, key=self._excess)

    def _planner_alone(self, priced: FlowProblem, region: int, members: Sequence[bool]) -> Planner:
        """A planner to which nothing takes memory but what is a region's."""
        sizes = tuple(size if is_member else 0 for size, is_member in zip(priced.costs.num_bytes, members, strict=True))
        alone = replace(priced, costs=replace(priced.costs, num_bytes=sizes))
        storages = self.limits.shares.masked(self.bench.storages, region)
        return Planner(Bench(alone, storages, scheduler=self.bench.scheduler))

    def _excess(self, offer: Offer) -> tuple[int, int]:
        """By how much limits are exceeded, then the time."""
        rows = zip(self._peaks(offer), self.limits.num_bytes, strict=True)
        return sum(max(0, peak.num_bytes - limit) for peak, limit in rows), offer.extra_ticks


def _found_apart(planner: Planner, inside: set[int], limit: int) -> Offer:
    """A schedule within a limit, or the lowest one: of a small region by changing what is done with its values only."""
    if planner.tuning.small_part * len(inside) < len(planner.problem.bases):
        start = min((planner.fastest, *planner.dearer_cuts), key=by_peak)
        annealed = Improver(planner.bench, planner.moves, inside).around(start, limit)
        fitting = [offer for offer in annealed if offer.peak_bytes <= limit]
        if fitting:
            return min(fitting, key=by_time)
    return planner.within(limit) or planner.lowest
