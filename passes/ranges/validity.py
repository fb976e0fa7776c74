"""For which sizes a plan keeps within its budget, one symbol at a time with the others as they were; for reports.

Peaks are expressions. Where a peak is sure to grow with a size, a budget in bytes holds up to a size that is found by
bisection, and that is a proof. Any other budget is looked at for some sizes, which are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..memory import PeakTerms, Shares, peak_terms, simulate, sum_grows
from ..plans import Chosen, Prepared, Request, SymbolRange
from ..search import Bench
from ..sizes import Sizes
from ..torch_private import symbol_bounds
from .along import LARGEST_SIZE, largest_where, last_where
from .limits import byte_limits
from .times import find_prices, with_times

FACTORS = (4, 16, 64)
"""A sampled range is looked at this far above and below the size that was planned for."""

Holds = Callable[[Sizes], bool]
"""Does something hold at given sizes?"""


def with_ranges(prepared: Prepared, chosen: Chosen, request: Request) -> Chosen:
    """Add to a plan what it costs at other sizes, and for which of them its budget holds."""
    sizes = prepared.storages.sizes
    if not sizes.symbols or request.stored:
        return chosen
    chosen = with_times(prepared, chosen, find_prices(prepared, request))
    return replace(chosen, plan=replace(chosen.plan, ranges=tuple(_ranges(prepared, chosen, request))))


def _ranges(prepared: Prepared, chosen: Chosen, request: Request) -> Iterable[SymbolRange]:
    """Where the budgets in bytes hold, or the fraction."""
    graph, storages = prepared.problem.graph, prepared.storages
    sizes, simulation = storages.sizes, simulate(graph, storages, chosen.schedule)
    limits = byte_limits(Shares.find(graph), request.budget)
    if limits:
        bounded = [(peak_terms(simulation, sizes, limit.counts), limit.num_bytes) for limit in limits]
        found = (_range_in_bytes(bounded, sizes, symbol) for symbol in sizes.backed)
    elif sizes.backed and request.budget is not None and request.budget.fraction is not None:
        whole = peak_terms(Bench(prepared.problem, storages).without_recompute.simulation, sizes)
        peak, part = peak_terms(simulation, sizes), request.budget.fraction
        found = (_sampled(lambda at: peak.at(at) <= int(part * whole.at(at)), sizes, symbol) for symbol in sizes.backed)
    else:
        return ()
    return [row for row in found if row is not None]


def _range_in_bytes(bounded: list[tuple[PeakTerms, int]], sizes: Sizes, symbol: Any) -> SymbolRange | None:
    def holds(at: Sizes) -> bool:
        return all(peak.at(at) <= num_bytes for peak, num_bytes in bounded)

    if not _is_sure_to_grow([peak for peak, _ in bounded], sizes, symbol):
        return _sampled(holds, sizes, symbol)
    if not holds(sizes):
        return None
    low, _ = symbol_bounds(sizes.shape_env, symbol)
    high = largest_where(lambda n: holds(sizes.at({symbol: n})), sizes, symbol)
    return SymbolRange(symbol.name, max(low or 0, 0), high, is_proved=True)


def _is_sure_to_grow(peaks: list[PeakTerms], sizes: Sizes, symbol: Any) -> bool:
    """True if larger values of a symbol never give a smaller peak, also through sizes that it bounds."""
    bound = [s for s, limit in sizes.bounds.items() if symbol in limit.free_symbols]
    grows = all(sum_grows(sizes.bounds[s]) for s in bound)
    return grows and all(peak.grows_with(s) for peak in peaks for s in (symbol, *bound))


def _sampled(holds: Holds, sizes: Sizes, symbol: Any) -> SymbolRange | None:
    """The range around a symbol's value in which something held wherever it was looked at; None if not even here."""
    if not holds(sizes):
        return None

    def holds_at(n: int) -> bool:
        return holds(sizes.at({symbol: n}))

    value = sizes.values[symbol]
    least, most = symbol_bounds(sizes.shape_env, symbol)
    lowest, highest = max(least or 0, 1), LARGEST_SIZE if most is None else most
    below, above = [max(value // f, lowest) for f in FACTORS], [min(value * f, highest) for f in FACTORS]
    seen = sorted({value, *_seen(holds_at, value, below), *_seen(holds_at, value, above)})
    return SymbolRange(symbol.name, seen[0], seen[-1], is_proved=False, sampled=tuple(seen))


def _seen(holds: Callable[[int], bool], inside: int, further: Iterable[int]) -> Iterator[int]:
    """Values further and further away at which something holds, and the last one before it does not."""
    for n in further:
        if not holds(n):
            yield last_where(holds, inside, n)
            return
        yield n
        inside = n
