"""For which sizes a plan holds: where it keeps within its budget, and where the same decisions would be made again.

Found for reports, one symbol at a time with the others as they were. The peak is known as an expression, so that a
budget in bytes holds up to a size that is found by bisection; that is a proof where the expression is sure to grow with
the size. All else is sampled: the peak against a fraction of what it would be without recomputation, and the minimum
cut, which is solved again at some sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .budget import Planner
from .choose import Chosen
from .cost import CostModel
from .peaks import PeakTerms, peak_terms, sum_grows
from .plan import SymbolRange
from .plan_times import find_prices, with_times
from .ranges import LARGEST_SIZE, at_sizes, byte_limits, largest_where
from .shares import Shares
from .simulate import simulate
from .symbols import Sizes
from .torch_private import symbol_bounds

if TYPE_CHECKING:
    from .partition import Prepared, Request

FACTORS = (4, 16, 64)
"""A sampled range is looked at this far above and below the size that was planned for."""

MOST_NODES = 20_000
"""Larger graphs are not cut again to see how far the decisions hold: that takes longer than a report should."""


def with_ranges(prepared: Prepared, chosen: Chosen, request: Request) -> Chosen:
    """Add to a plan what it costs at other sizes, and for which it holds."""
    sizes = prepared.storages.sizes
    if not sizes.symbols or request.stored:
        return chosen
    prices = find_prices(prepared, request)
    chosen = with_times(prepared, chosen, prices)
    if not sizes.backed:
        return chosen
    rows = [*_budget_rows(prepared, chosen, request), *_best_rows(prepared, chosen, request.cost_model, request.fuses)]
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
        peak, fraction = peak_terms(simulation, storages.sizes), request.budget.fraction

        def holds(at: Sizes) -> bool:
            return peak.at(at) <= int(fraction * whole.at(at))

        for symbol in storages.sizes.backed:
            yield from _sampled(holds, storages.sizes, symbol, "budget")


def _range_in_bytes(bounded: list[tuple[PeakTerms, int]], sizes: Sizes, symbol: Any) -> Iterator[SymbolRange]:
    def holds(at: Sizes) -> bool:
        return all(peak.at(at) <= num_bytes for peak, num_bytes in bounded)

    if not is_sure_to_grow([peak for peak, _ in bounded], sizes, symbol):
        yield from _sampled(holds, sizes, symbol, "budget")
    elif holds(sizes):
        low, _ = symbol_bounds(sizes.shape_env, symbol)
        high = largest_where(lambda n: holds(sizes.at({symbol: n})), sizes, symbol)
        yield SymbolRange(symbol.name, "budget", max(low or 0, 0), high, is_proved=True)


def is_sure_to_grow(peaks: list[PeakTerms], sizes: Sizes, symbol: Any) -> bool:
    """True if larger values of a symbol never give a smaller peak, also through sizes that it bounds."""
    bound = [s for s, limit in sizes.bounds.items() if symbol in limit.free_symbols]
    grows = all(sum_grows(sizes.bounds[s]) for s in bound)
    return grows and all(peak.grows_with(s) for peak in peaks for s in (symbol, *bound))


# -------------------------------------------------------------------------------------------------- decisions


def _best_rows(prepared: Prepared, chosen: Chosen, model: CostModel, fuses: bool) -> Iterator[SymbolRange]:
    """Where the minimum cut is the same; nothing for plans that come from a search."""
    problem, sizes = prepared.problem, prepared.storages.sizes
    if len(problem.graph.nodes) > MOST_NODES:
        return
    saved = problem.saved(problem.cut())
    if chosen.plan.planner != "cut" or chosen.plan.guards[1:] or not chosen.plan.decisions:
        return
    if Planner(problem, prepared.storages).fastest.schedule.events != chosen.schedule.events:
        return

    def is_same(at: Sizes) -> bool:
        other, _ = at_sizes(problem, model, at, fuses=fuses)
        return other.saved(other.cut()) == saved

    for symbol in sizes.backed:
        yield from _sampled(is_same, sizes, symbol, "best")


def _sampled(holds: Callable[[Sizes], bool], sizes: Sizes, symbol: Any, meaning: str) -> Iterator[SymbolRange]:
    """The range around a symbol's value in which something held wherever it was looked at."""
    if not holds(sizes):
        return
    value = sizes.values[symbol]
    least, most = symbol_bounds(sizes.shape_env, symbol)
    lowest, highest = max(least or 0, 1), LARGEST_SIZE if most is None else most
    low = high = value
    for factor in FACTORS:
        if (n := max(value // factor, lowest)) == low or not holds(sizes.at({symbol: n})):
            break
        low = n
    for factor in FACTORS:
        if (n := min(value * factor, highest)) == high or not holds(sizes.at({symbol: n})):
            break
        high = n
    yield SymbolRange(symbol.name, meaning, low, high, is_proved=False)
