"""For which sizes a plan holds: where it keeps within its budget, and where it is still the best one.

Found for reports, one symbol at a time with the others as they were. Peaks are expressions, so that a budget in bytes
holds up to a size that is found by bisection; that is a proof where the expression is sure to grow with the size. What
else is a polynomial is proved by its coefficients (see `best_range`). The rest is looked at for some sizes, which are
named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..memory.peaks import PeakTerms, peak_terms, sum_grows
from ..memory.schedule import Schedule
from ..memory.shares import Shares
from ..memory.simulate import simulate
from ..plans.plan import SymbolRange
from ..plans.write_plan import Chosen
from ..search.planner import Planner, extra_ticks
from ..search.problem import FlowProblem
from ..sizes.symbols import Sizes
from ..torch_private import symbol_bounds
from .best_range import Bound, CutProof, Measured, PoolProof, TooLong, widest
from .polynomials import Line, NotPolynomial
from .price_expressions import Prices, schedule_total
from .ranges import LARGEST_SIZE, Counts, byte_limits, largest_where, problem_at, region_counts
from .times import find_prices, with_times

if TYPE_CHECKING:
    from ..plans.request import Prepared, Request

FACTORS = (4, 16, 64)
"""A sampled range is looked at this far above and below the size that was planned for."""

MOST_NODES = 20_000
"""Larger graphs are not cut again to see how far the decisions hold: that takes longer than a report should."""

COARSENESS = 32
"""To which part the ends of a range are found where each look takes a minimum cut."""


def with_ranges(prepared: Prepared, chosen: Chosen, request: Request) -> Chosen:
    """Add to a plan what it costs at other sizes, and for which it holds."""
    sizes = prepared.storages.sizes
    if not sizes.symbols or request.stored:
        return chosen
    prices = find_prices(prepared, request)
    chosen = with_times(prepared, chosen, prices)
    if not sizes.backed:
        return chosen
    rows = [*_budget_rows(prepared, chosen, request), *_best_rows(prepared, chosen, request, prices)]
    return replace(chosen, plan=replace(chosen.plan, ranges=tuple(rows)))


# -------------------------------------------------------------------------------------------------- budgets


def _budget_rows(prepared: Prepared, chosen: Chosen, request: Request) -> Iterator[SymbolRange]:
    graph, storages = prepared.problem.graph, prepared.storages
    limits = byte_limits(Shares.find(graph), request.budget)
    simulation = simulate(graph, storages, chosen.schedule)
    bounded = [(peak_terms(simulation, storages.sizes, limit.counts), limit.num_bytes) for limit in limits]
    if bounded:
        for symbol in storages.sizes.backed:
            yield from _range_in_bytes(bounded, storages.sizes, symbol)
    elif request.budget is not None and request.budget.fraction is not None:
        whole = peak_terms(Planner(prepared.problem, storages).without_recompute.simulation, storages.sizes)
        peak, bound = peak_terms(simulation, storages.sizes), Bound(part=request.budget.fraction, whole=whole)
        for symbol in storages.sizes.backed:
            yield from _range_in_parts(peak, bound, storages.sizes, symbol)


def _range_in_bytes(bounded: list[tuple[PeakTerms, int]], sizes: Sizes, symbol: Any) -> Iterator[SymbolRange]:
    def holds(at: Sizes) -> bool:
        return all(peak.at(at) <= num_bytes for peak, num_bytes in bounded)

    if not is_sure_to_grow([peak for peak, _ in bounded], sizes, symbol):
        yield from _sampled(holds, sizes, symbol, "budget")
    elif holds(sizes):
        low, _ = symbol_bounds(sizes.shape_env, symbol)
        high = largest_where(lambda n: holds(sizes.at({symbol: n})), sizes, symbol)
        yield SymbolRange(symbol.name, "budget", max(low or 0, 0), high, is_proved=True)


def _range_in_parts(peak: PeakTerms, bound: Bound, sizes: Sizes, symbol: Any) -> Iterator[SymbolRange]:
    """Where a peak is no more than a part of another one."""
    try:
        proof = PoolProof(Measured({}, (peak,)), (), (bound,), Line(sizes, symbol))
        yield from _proved(proof, sizes, symbol, "budget", [sizes.values[symbol]])
    except (NotPolynomial, TooLong):
        yield from _sampled(lambda at: peak.at(at) <= bound.at(at), sizes, symbol, "budget")


def is_sure_to_grow(peaks: list[PeakTerms], sizes: Sizes, symbol: Any) -> bool:
    """True if larger values of a symbol never give a smaller peak, also through sizes that it bounds."""
    bound = [s for s, limit in sizes.bounds.items() if symbol in limit.free_symbols]
    grows = all(sum_grows(sizes.bounds[s]) for s in bound)
    return grows and all(peak.grows_with(s) for peak in peaks for s in (symbol, *bound))


# -------------------------------------------------------------------------------------------------- the best plan


def _best_rows(prepared: Prepared, chosen: Chosen, request: Request, prices: Prices) -> Iterator[SymbolRange]:
    """Where no other choice is faster and within the budget."""
    problem, storages = prepared.problem, prepared.storages
    is_measured = getattr(request.cost_model, "measures", False)  # at other sizes it would measure again
    if len(problem.graph.nodes) > MOST_NODES or not chosen.plan.decisions or is_measured:
        return
    symbols = storages.sizes.backed
    if Planner(problem, storages).fastest.schedule.events == chosen.schedule.events:
        for symbol in symbols:
            yield from _best_cut(problem, request, prices, storages.sizes, symbol)
    elif chosen.rivals:
        pool = _Pool.compare(prepared, chosen, request)
        for symbol in symbols:
            yield from _best_found(pool, prepared, request, prices, symbol)


def _best_cut(
    problem: FlowProblem, request: Request, prices: Prices, sizes: Sizes, symbol: Any
) -> Iterator[SymbolRange]:
    """Where the plain cut is the cheapest of all legal choices."""
    cut = problem.cut()

    def is_cheapest(at: Sizes) -> bool:
        other = problem_at(problem, request.cost_model, at)
        return other.price_of(cut) <= other.cut().price

    try:
        proof = CutProof(problem, prices, Line(sizes, symbol))
        yield from _proved(proof, sizes, symbol, "best", [sizes.values[symbol]], coarseness=COARSENESS)
    except (NotPolynomial, TooLong):
        yield from _sampled(is_cheapest, sizes, symbol, "best")


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """A plan and those that it was compared with, each with its peaks under the limits."""

    schedules: tuple[Schedule, ...]
    """The chosen one first."""
    peaks: tuple[tuple[PeakTerms, ...], ...]
    bounds: tuple[Bound, ...]

    @staticmethod
    def compare(prepared: Prepared, chosen: Chosen, request: Request) -> _Pool:
        """Simulate all of them."""
        graph, storages = prepared.problem.graph, prepared.storages
        known = {(s.events, s.received): s for s in (chosen.schedule, *chosen.rivals)}
        simulations = [simulate(graph, storages, schedule) for schedule in known.values()]
        limits = _limits(prepared, request)
        peaks = [tuple(peak_terms(s, storages.sizes, counts) for counts, _ in limits) for s in simulations]
        bounds = [bound for _, bound in limits]
        if request.budget is not None and not Shares.find(graph).budgets:
            safe = replace(bounds[0], part=(1 - request.budget.margin_in(storages)) * bounds[0].part)
            # The margin that the planner leaves for what a compiler does, unless the plan needs all there is.
            bounds[0] = safe if peaks[0][0].at(storages.sizes) <= safe.at(storages.sizes) else bounds[0]
        return _Pool(tuple(known.values()), tuple(peaks), tuple(bounds))

    def is_best(self, problem: FlowProblem, at: Sizes) -> bool:
        """Is the chosen plan the fastest that fits, by the numbers at some sizes?"""
        fits = [all(p.at(at) <= b.at(at) for p, b in zip(row, self.bounds, strict=True)) for row in self.peaks]
        ticks = [extra_ticks(problem, schedule) for schedule in self.schedules]
        return fits[0] and ticks[0] <= min(t for t, is_fitting in zip(ticks, fits, strict=True) if is_fitting)

    def fits_at(self, at: Sizes) -> bool:
        """Does the chosen plan keep within the limits at some sizes?"""
        return all(peak.at(at) <= bound.at(at) for peak, bound in zip(self.peaks[0], self.bounds, strict=True))


def _limits(prepared: Prepared, request: Request) -> list[tuple[Counts, Bound]]:
    """What counts for each budget, and its bound: that of the graph first."""
    graph, sizes = prepared.problem.graph, prepared.storages.sizes
    shares = Shares.find(graph)
    asked: list[tuple[Counts, Any]] = [] if request.budget is None else [(None, request.budget)]
    asked += [(region_counts(shares, region), budget) for region, budget in enumerate(shares.budgets)]
    whole = Planner(prepared.problem, prepared.storages).without_recompute.simulation
    found = []
    for counts, budget in asked:
        if budget.num_bytes is not None:
            found.append((counts, Bound(num_bytes=budget.num_bytes)))
        else:
            found.append((counts, Bound(part=budget.fraction, whole=peak_terms(whole, sizes, counts))))
    return found


def _best_found(
    pool: _Pool, prepared: Prepared, request: Request, prices: Prices, symbol: Any
) -> Iterator[SymbolRange]:
    """Where a plan is the fastest of those found that keep within the budgets."""
    problem, sizes, among = prepared.problem, prepared.storages.sizes, len(pool.schedules) - 1
    # A plan for a range is made for the range's upper end, and need not be the best one here.
    starts = [sizes.values[symbol], _last(lambda n: pool.fits_at(sizes.at({symbol: n})), sizes, symbol)]
    try:
        totals = [schedule_total(problem, schedule, prices) for schedule in pool.schedules]
        rows = [Measured(total, peaks) for total, peaks in zip(totals, pool.peaks, strict=True)]
        proof = PoolProof(rows[0], rows[1:], pool.bounds, Line(sizes, symbol))
        yield from _proved(proof, sizes, symbol, "best", starts, among=among)
    except (NotPolynomial, TooLong):

        def is_best(at: Sizes) -> bool:
            return pool.is_best(problem_at(problem, request.cost_model, at), at)

        yield from _sampled(is_best, sizes, symbol, "best", among=among)


def _last(holds: Callable[[int], bool], sizes: Sizes, symbol: Any) -> int:
    """The largest value of a symbol at which something holds, the present one if it does not hold there."""
    value: int = sizes.values[symbol]
    if not holds(value):
        return value
    found = largest_where(holds, sizes, symbol)
    return value if found is None else found


# -------------------------------------------------------------------------------------------------- rows


class Proof(Protocol):
    """Knows at which values something holds."""

    def holds_at(self, value: int) -> bool:
        """Does it at one value?"""

    def holds_on(self, low: int, high: int) -> bool:
        """Is it certain at all values of a range?"""


def _proved(
    proof: Proof, sizes: Sizes, symbol: Any, meaning: str, starts: Sequence[int], *, coarseness: int = 0, among: int = 0
) -> Iterator[SymbolRange]:
    """The range around the first of some values at which something holds; nothing if it holds at none of them."""
    lowest, highest, has_end = _bounds_of(sizes, symbol)
    start = next((n for n in starts if proof.holds_at(n)), None)
    if start is None:
        return
    low, high = lowest, highest
    if not proof.holds_on(low, high):
        low, high = widest(proof.holds_at, start, lowest, highest, coarseness)
        while not proof.holds_on(low, high):  # it does not hold somewhere in between
            low, high = (low + start + 1) // 2, (high + start) // 2
    end = None if high == highest and not has_end else high
    yield SymbolRange(symbol.name, meaning, low, end, is_proved=True, among=among)


def _sampled(
    holds: Callable[[Sizes], bool], sizes: Sizes, symbol: Any, meaning: str, *, among: int = 0
) -> Iterator[SymbolRange]:
    """The range around a symbol's value in which something held wherever it was looked at."""
    if not holds(sizes):
        return
    value = sizes.values[symbol]
    lowest, highest, _ = _bounds_of(sizes, symbol)
    seen = [value]
    for factor in FACTORS:
        if (n := max(value // factor, lowest)) == seen[-1] or not holds(sizes.at({symbol: n})):
            break
        seen.append(n)
    low = seen[-1]
    for factor in FACTORS:
        if (n := min(value * factor, highest)) in seen or not holds(sizes.at({symbol: n})):
            break
        seen.append(n)
    high = max(seen)
    yield SymbolRange(symbol.name, meaning, low, high, is_proved=False, sampled=tuple(sorted(seen)), among=among)


def _bounds_of(sizes: Sizes, symbol: Any) -> tuple[int, int, bool]:
    """The least and largest value of a symbol, and whether the latter is known."""
    least, most = symbol_bounds(sizes.shape_env, symbol)
    return max(least or 0, 1), LARGEST_SIZE if most is None else most, most is not None
