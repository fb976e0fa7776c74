"""Plan for a range of sizes: where does a budget in bytes hold, and when must one plan again?

A plan is made with numbers for the size symbols, and its peak is known as an expression. A budget in bytes that is met
at one size need not be met at a larger one, and at a much smaller one a faster plan would do. So a plan with such a
budget holds for a range of sizes, and states it as guards: who compiled the graph compiles anew outside.

Ranges are few. Where the fastest plan fits, it holds up to the largest size at which it does. Beyond, a range ends
where the fastest plan would take twice the memory that it takes at the range's beginning: the budget, twice the budget,
four times the budget. The last range has no end but that of the budget: its plan is made for the largest size at which
there is one. So there are at most MOST_RANGES of them, and one more if plans that exceed the budget are asked for. A
plan is made for the upper end of its range, so that it fits everywhere in it, and leaves the margin for a compiler.

Where several sizes change, a range is one of all of them: what the fastest plan takes there. The same memory may be
many short rows or a few long ones, and a plan that fits for the one need not fit for the other. So a plan is looked for
that fits at all ends (see `ends`); if there is none, the one with the lowest peak is taken.

Whatever the range, there is one search. Planning for the last one looks for the lowest peak here, and from there for
a plan that is faster where that one ends to fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ..budgets.budget import Budget
from ..budgets.pick import Picked, pick, pick_from
from ..memory.peaks import PeakTerms, peak_terms, sum_grows
from ..memory.schedule import Schedule
from ..memory.shares import Shares
from ..memory.simulate import Memory, Simulation
from ..memory.storage import Storages, storages_at
from ..plans.write_plan import Chosen, write_plan
from ..prices.cost import CostModel, price
from ..search.bench import Bench, Offer, extra_ticks
from ..search.planner import Planner
from ..search.problem import FlowProblem
from ..sizes.expressions import NotExpressible, write
from ..sizes.symbols import Sizes
from ..torch_private import add_guard, fixed_ranges, guards_of, symbol_bounds, sympy_functions
from .ends import EndPlanner

if TYPE_CHECKING:
    import sympy

    from ..plans.request import Prepared, Request

LARGEST_SIZE = 2**40
"""No size is larger: where a search for the end of a range stops."""

FAR = 2**20
"""How many times the present sizes a search goes."""

PARTS_OF_ONE, PARTS_OF_SEVERAL = 2**20, 2**6
"""In how many parts the present sizes are grown. One size is, in parts so fine that a search for the end of a range
meets every value of it: a plan made for a little less would leave out what lies between. The end of a range of several
sizes is no size but a curve, of which a few points are looked at."""

TRIES_TO_ALIGN = 64
"""How many sizes below the wanted one are tried until what the graph takes for granted holds (multiples of 8, say)."""

MOST_RANGES = {0: 1, 1: 4}
"""At most how many plans serve all sizes at which a budget can be met, by how many sizes change. Torch compiles eight
graphs of a function: the first is for the first sizes alone, and where a size is 1 there is another graph, with ranges
of its own."""

MOST_RANGES_OF_SEVERAL = 3
"""The same where more than one size changes."""

Values = dict[Any, int]
Counts = Callable[[Memory], bool] | None


@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """A bound in bytes on what the whole step, or one region, has alive."""

    num_bytes: int
    counts: Counts
    """Which memory counts; None for all of it."""


def byte_limits(graph_shares: Shares, budget: Budget | None) -> tuple[Limit, ...]:
    """The budgets that are stated in bytes; a fraction is one at any size."""
    found = [] if budget is None or budget.num_bytes is None else [Limit(budget.num_bytes, None)]
    for region, bound in enumerate(graph_shares.budgets):
        if bound.num_bytes is not None:
            found.append(Limit(bound.num_bytes, _counts_for(graph_shares, region)))
    return tuple(found)


def _counts_for(shares: Shares, region: int) -> Callable[[Memory], bool]:
    """Say which memory counts for a region's budget."""
    return lambda memory: region in shares.regions_at[memory.node]


def choose_for_range(prepared: Prepared, request: Request, limits: tuple[Limit, ...]) -> Chosen:
    """Choose a plan for the range of sizes that the example is in, and say where that range ends."""
    return _RangePlanner(prepared, request, limits).choose()


@dataclass(frozen=True, slots=True, eq=False)
class _Bounded:
    """A schedule's peak under one limit."""

    peak: PeakTerms
    limit_bytes: int

    def fits(self, sizes: Sizes) -> bool:
        return self.peak.at(sizes) <= self.limit_bytes

    def level(self, sizes: Sizes) -> int:
        """How often the limit must be doubled to be no less than the peak."""
        return max(0, (max(self.peak.at(sizes) - 1, 0) // max(self.limit_bytes, 1)).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A schedule at the sizes of the example."""

    schedule: Schedule
    simulation: Simulation
    bounded: list[_Bounded]


class _RangePlanner:
    """Plans one graph under limits in bytes."""

    def __init__(self, prepared: Prepared, request: Request, limits: tuple[Limit, ...]) -> None:
        self.prepared, self.request, self.limits = prepared, request, limits
        self.problem, self.storages = prepared.problem, prepared.storages
        self.fixed = fixed_ranges(self.storages.sizes.shape_env)
        """Symbols of which the user wants one graph for all sizes up to a stated one."""
        highest = {s: symbol_bounds(self.storages.sizes.shape_env, s)[1] for s in self.fixed}
        stated = {s: n for s, n in highest.items() if n is not None and s in self.storages.sizes.values}
        self.example = self.storages.sizes
        self.base = self.example.at(stated) if stated else self.example
        """Where a plan has to fit in any case."""
        self.open = [s for s in self.example.backed if s not in self.fixed]
        self.num_ranges = MOST_RANGES.get(len(self.open), MOST_RANGES_OF_SEVERAL)
        self.shares = Shares.find(self.problem.graph)
        self.is_of_graph = not self.shares.budgets
        """There is one limit, and it is one of the whole graph."""
        budget = request.budget if self.is_of_graph else None
        self.margin = 0.0 if budget is None else budget.margin_in(self.storages)
        """What is left for a compiler, as the planner does for a budget of the whole graph alone."""
        self.whole = PARTS_OF_ONE if len(self.open) == 1 else PARTS_OF_SEVERAL
        self._known: dict[int, _Known] = {}
        self._low_of = self.at_base

    def choose(self) -> Chosen:
        """Plan where the fastest plan ends to fit, or for the upper end of a range beyond that."""
        fastest = self._bounded(self.at_base.fastest.schedule)
        if all(bounded.fits(self.base) for bounded in fastest) or not self.open:
            picked = self._pick()
            return self._finish(picked, self._upper(picked.offer.schedule))
        level = min(max(bounded.level(self.base) for bounded in fastest), self.num_ranges - 1)
        picked = self._beyond(fastest, level) or self._pick()
        reached = self._bounded(picked.offer.schedule)
        if all(bounded.fits(self.base) for bounded in reached):
            return self._finish(picked, self._upper(picked.offer.schedule), self._lower(fastest, level))
        return self._finish(picked, (), self._lower(reached, 1))  # the lowest plan, which exceeds the budget

    @property
    def _takes_minimum(self) -> bool:
        """True if sizes at which no plan fits get one all the same."""
        budget = self.request.budget
        return self.request.take_minimum or (budget is not None and budget.take_minimum)

    # ---------------------------------------------------------------------------------------------- planning

    def _beyond(self, fastest: Sequence[_Bounded], level: int) -> Picked | None:
        """A plan for the upper end of a range, or for the largest size at which there is one; None if at none."""
        if level < self.num_ranges - 1:
            picked = self._planned_for(self._ends(lambda sizes: max(b.level(sizes) for b in fastest) <= level))
            if picked is not None:
                return picked
        # What is lowest far out need not be lowest here. How far it reaches is as far as a plan is known to.
        lowest = self._lowest()
        bounded = self._bounded(lowest.offer.schedule)
        ends = self._ends(lambda sizes: all(b.fits(sizes) for b in bounded))
        return (self._planned_for(ends, lowest.offer) or lowest) if ends else None

    def _lowest(self) -> Picked:
        """The plan with the lowest peak here; of plans for regions' budgets alone, the one for very large sizes."""
        if self.request.budget is None:
            return self._quietly(self._scaled(self.whole * FAR))
        planner = self._low_of
        offer = planner.low if self._fits_here(planner.low) else planner.lowest
        return Picked(offer, self.request.budget.resolve(self.at_base))

    def _take_low_of(self, planner: Planner) -> None:
        """Take another planner's low plan where it fits here: it has looked at most of the graph already."""
        if self._fits_here(planner.low):
            self._low_of = planner

    def _fits_here(self, offer: Offer) -> bool:
        return all(b.fits(self.base) for b in self._bounded(offer.schedule))

    def _planned_for(self, ends: Sequence[Sizes], lowest: Offer | None = None) -> Picked | None:
        """A plan that fits at some ends of a range, and here; None if there is none. Where no plan fits, none has to.

        The first of the ends is in the direction of the present sizes. If the `lowest` plan is given, the ends are
        those of where it fits.
        """
        if not ends:
            return None
        if not self.is_of_graph:
            return self._fitting_all(ends)
        planner = EndPlanner.at(*self._at(ends[0]), ends[1:], self.here.bench.scheduler)
        bound = self._limit_bytes(self.limits[0])
        if lowest is not None:
            planner.refine(self._low_of, lowest, bound)
        else:
            reachable = planner.reachable(bound)
            if not reachable[0]:
                self._take_low_of(planner.planner)
                return None
            planner = planner.only(reachable)
            planner.planner.within(bound)
        offers = filter(self._fits_here, planner.best(bound))
        return next((Picked(offer, self.limits[0].num_bytes) for offer in offers), None)

    def _fitting_all(self, ends: Sequence[Sizes]) -> Picked | None:
        """A plan made for one of some sizes that fits at the others, too, and here; None if there is none.

        Where no plan fits, none has to. The first of the sizes are those in the direction of the present ones.
        """
        tried: list[tuple[Picked, list[bool]]] = []
        for end in ends:
            picked = self._quietly(end)
            bounded = self._bounded(picked.offer.schedule)
            fits = [all(b.fits(sizes) for b in bounded) for sizes in ends]
            if all(b.fits(self.base) for b in bounded):
                if all(fits):
                    return picked
                tried.append((picked, fits))
        can_fit = [any(fits[k] for _, fits in tried) for k in range(len(ends))]
        return next((p for p, fits in tried if fits == can_fit), None) if any(can_fit) else None

    def _quietly(self, sizes: Sizes) -> Picked:
        """The best plan at other sizes, the lowest if none fits there: it may fit at smaller ones."""
        budget = None if self.request.budget is None else replace(self.request.budget, take_minimum=True)
        problem, storages = self._at(sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pick(problem, storages, budget, take_minimum=True, shares=self.shares)

    def _pick(self) -> Picked:
        """The best plan where a plan has to fit in any case."""
        return pick_from(self.at_base, self.request.budget, self.shares, take_minimum=self.request.take_minimum)

    def _at(self, sizes: Sizes) -> tuple[FlowProblem, Storages]:
        return at_sizes(self.problem, self.storages, self.request.cost_model, sizes)

    @cached_property
    def here(self) -> Planner:
        """A planner at the example's sizes."""
        return Planner(Bench(self.problem, self.storages))

    @cached_property
    def at_base(self) -> Planner:
        """A planner where a plan has to fit in any case."""
        if self.base is self.example:
            return self.here
        return Planner(Bench(*self._at(self.base), scheduler=self.here.bench.scheduler))

    def _ends(self, holds: Callable[[Sizes], bool]) -> list[Sizes]:
        """The largest sizes at which something holds that ends somewhere: all grown alike, then each by itself."""
        if not holds(self.base):
            return []
        found = [self._furthest(holds, self._scaled)]
        if len(self.open) > 1:
            found += [self._furthest(holds, partial(self._stretched, symbol)) for symbol in self.open]
        return [sizes for sizes in found if sizes is not None]

    def _furthest(self, holds: Callable[[Sizes], bool], grown: Callable[[int], Sizes]) -> Sizes | None:
        """The largest sizes on a line at which something holds; None if it does not at its beginning."""
        if not holds(grown(self.whole)):
            return None
        low, high = self.whole, 2 * self.whole
        while high < self.whole * FAR and holds(grown(high)):
            low, high = high, 2 * high
        while high - low > 1 and grown(low).values != grown(high).values:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(grown(middle)) else (low, middle)
        return self._allowed(grown(low))

    def _scaled(self, num_parts: int) -> Sizes:
        """The present sizes, all of them grown to so many parts of what they are."""
        return self.base.at({symbol: self._grown(symbol, num_parts) for symbol in self.open})

    def _stretched(self, symbol: Any, num_parts: int) -> Sizes:
        """One size grown, the others as small as they get."""
        least = {s: max(symbol_bounds(self.base.shape_env, s)[0] or 0, 1) for s in self.open}
        return self.base.at({**least, symbol: self._grown(symbol, num_parts)})

    def _grown(self, symbol: Any, num_parts: int) -> int:
        _, high = symbol_bounds(self.base.shape_env, symbol)
        grown: int = self.base.values[symbol] * num_parts // self.whole
        return grown if high is None else min(grown, high)

    def _allowed(self, sizes: Sizes) -> Sizes | None:
        """The nearest smaller sizes for which all holds that the graph takes for granted."""
        conditions = guards_of(sizes.shape_env)
        for step in range(TRIES_TO_ALIGN):
            lowered = {s: max(sizes.values[s] - step, min(self.base.values[s], sizes.values[s])) for s in self.open}
            candidate = sizes.at(lowered)
            if all(condition.xreplace(_integers(candidate.values)) != False for condition in conditions):  # noqa: E712
                return candidate
        return None

    # ---------------------------------------------------------------------------------------------- ranges

    def _bounded(self, schedule: Schedule) -> list[_Bounded]:
        """The peaks of a schedule, each with its limit."""
        known = self._known.get(id(schedule))
        if known is None:
            simulation = self.here.bench.simulator.run(schedule)
            bounded = [
                _Bounded(peak_terms(simulation, self.example, limit.counts), self._limit_bytes(limit))
                for limit in self.limits
            ]
            known = self._known[id(schedule)] = _Known(schedule, simulation, bounded)
        return known.bounded

    def _limit_bytes(self, limit: Limit) -> int:
        """A limit without what is left for a compiler."""
        return int((1 - self.margin) * limit.num_bytes)

    def _upper(self, schedule: Schedule) -> tuple[Any, ...]:
        """Conditions on sizes under which a schedule keeps within the limits."""
        import sympy

        bounded = self._bounded(schedule)
        symbol = self._only(bounded)
        if symbol is not None:
            high = largest_where(lambda n: all(b.fits(self.base.at({symbol: n})) for b in bounded), self.base, symbol)
            return () if high is None else (sympy.Le(symbol, high),)
        return tuple(sympy.Le(self._backed(e), b.limit_bytes) for b in bounded for e in b.peak.expressions)

    def _lower(self, bounded: Sequence[_Bounded], level: int) -> tuple[Any, ...]:
        """A condition on sizes under which the peaks stay above half of what they may be at this level."""
        import sympy

        def exceeds(sizes: Sizes) -> bool:
            return max(b.level(sizes) for b in bounded) >= level

        symbol = self._only(bounded)
        if symbol is not None:
            low = smallest_where(lambda n: exceeds(self.base.at({symbol: n})), self.base, symbol)
            return (sympy.Ge(symbol, low),)
        most = max(bounded, key=lambda b: b.level(self.base))
        threshold = most.limit_bytes * 2 ** (level - 1)
        rows = [self._backed(row) for row in most.peak.expressions]
        peak = rows[0] if len(rows) == 1 else sympy_functions()["Max"](*rows)
        return (sympy.Gt(peak, threshold),) if self.base.value_of(peak) > threshold else ()

    def _only(self, bounded: Sequence[_Bounded]) -> Any:
        """The one symbol whose size may change, if peaks are certain to grow with it."""
        changing = [*self.open, *(s for s, bound in self.base.bounds.items() if bound.free_symbols)]
        if len(self.open) != 1 or not all(sum_grows(bound) for bound in self.base.bounds.values()):
            return None
        return self.open[0] if all(b.peak.grows_with(s) for b in bounded for s in changing) else None

    def _backed(self, expression: Any) -> Any:
        """An expression of sizes of inputs alone: others are replaced by what they cannot exceed."""
        others = {s: n for s, n in self.base.values.items() if s not in self.base.backed or s in self.fixed}
        return expression.xreplace(self.base.bounds).xreplace(_integers(others))

    def _finish(self, picked: Picked, *conditions: tuple[Any, ...]) -> Chosen:
        """Write the plan at the example's sizes, with the conditions on others."""
        schedule = picked.offer.schedule
        bounded, simulation = self._bounded(schedule), self._known[id(schedule)].simulation
        offer = replace(picked.offer, simulation=simulation, extra_ticks=extra_ticks(self.problem, schedule))
        moved = replace(picked, offer=offer, shares=picked.shares_in(simulation))
        if picked.budget_bytes is not None or picked.without_recompute_bytes is not None:
            moved = replace(moved, without_recompute_bytes=self.here.without_recompute.peak_bytes)
        guards = tuple(c for group in conditions for c in group if self._may_guard(c))
        peak = next((b.peak for b, limit in zip(bounded, self.limits, strict=True) if limit.counts is None), None)
        chosen = write_plan(self.problem, self.storages, moved, self.request.key, peak)
        most = self.num_ranges + self._takes_minimum
        plan = replace(chosen.plan, guards=tuple(_relation_text(guard) for guard in guards), most_ranges=most)
        return replace(chosen, plan=plan, guards=guards)

    def _may_guard(self, condition: Any) -> bool:
        # Without a symbol it is true, or it is false at all sizes: a plan that exceeds the budget is all there is.
        return bool(condition.free_symbols) and not condition.free_symbols & self.fixed


def _relation_text(relation: Any) -> str:
    try:
        return f"{write(relation.lhs)} {relation.rel_op} {write(relation.rhs)}"
    except NotExpressible:
        return str(relation)


def at_sizes(problem: FlowProblem, storages: Storages, model: CostModel, sizes: Sizes) -> tuple[FlowProblem, Storages]:
    """The same choice at other sizes: prices and memory change, what may be done does not."""
    costs = price(problem.graph, model, sizes, problem.costs.likes)
    return replace(problem, costs=costs), storages_at(storages, sizes)


def take_for_granted(chosen: Chosen, storages: Storages) -> None:
    """Let whoever compiled the graph compile anew for sizes outside of a plan's range."""
    for condition in chosen.guards:
        held = add_guard(storages.sizes.shape_env, condition)
        assert held, f"the plan does not hold at the sizes it was made for: {condition}"


def largest_where(holds: Callable[[int], bool], sizes: Sizes, symbol: Any) -> int | None:
    """The largest value of a symbol at which something holds that ends somewhere; None if it never ends."""
    _, high = symbol_bounds(sizes.shape_env, symbol)
    low: int = sizes.values[symbol]
    above = LARGEST_SIZE if high is None else high
    if holds(above):
        return None
    return last_where(holds, low, next((n for n in _doubled(low, above) if not holds(n)), above))


def smallest_where(holds: Callable[[int], bool], sizes: Sizes, symbol: Any) -> int:
    """The smallest value of a symbol at which something holds that holds from some size on."""
    least, _ = symbol_bounds(sizes.shape_env, symbol)
    below = max(least or 0, 0)
    high: int = sizes.values[symbol]
    return below if holds(below) else last_where(holds, high, below)


def last_where(holds: Callable[[int], bool], inside: int, outside: int) -> int:
    """On the way from a value at which something holds to one at which it does not, the last one at which it does."""
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside


def _doubled(start: int, end: int) -> Iterator[int]:
    while start < end:
        start = max(2 * start, 1)
        yield min(start, end)


def _integers(values: Mapping[sympy.Symbol, int]) -> dict[Any, Any]:
    import sympy

    return {symbol: sympy.Integer(value) for symbol, value in values.items()}
