"""Plan for a range of sizes: where does a budget in bytes hold, and when must one plan again?

A plan is made with numbers for the size symbols, and its peak is known as an expression. A budget in bytes that is met
at one size need not be met at a larger one, and at a much smaller one a faster plan would do. So a plan with such a
budget holds for a range of sizes, and states it as guards: who compiled the graph compiles anew outside.

Ranges are few. Where the fastest plan fits, it holds up to the largest size at which it does. Beyond, a range ends
where the fastest plan would take twice the memory that it takes at the range's beginning: the budget, twice the budget,
four times the budget, and so on. The plan is made for the upper end of its range, so that it fits everywhere in it; if
nothing fits there, for the largest size at which something does. Since recomputation saves a factor of ten at most on
real models, there are four or five ranges between the smallest size and the one at which no plan fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .budget import FUSION_MARGIN, Budget, Offer, Planner, extra_ticks
from .choose import Chosen, Picked, pick, write_plan
from .cost import CostModel, price
from .expressions import NotExpressible, write
from .flow import FlowProblem
from .peaks import PeakTerms, peak_terms, sum_grows
from .schedule import Schedule
from .shares import Shares
from .simulate import Memory, simulate
from .storage import Storages, find_storages
from .symbols import Sizes
from .torch_private import add_guard, fixed_ranges, guards_of, symbol_bounds

if TYPE_CHECKING:
    import sympy

    from .partition import Prepared, Request

LARGEST_SIZE = 2**40
"""No size is larger: where a search for the end of a range stops."""

TRIES_TO_ALIGN = 64
"""How many sizes below the wanted one are tried until what the graph takes for granted holds (multiples of 8, say)."""

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
            found.append(Limit(bound.num_bytes, region_counts(graph_shares, region)))
    return tuple(found)


def region_counts(shares: Shares, region: int) -> Callable[[Memory], bool]:
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

    def choose(self) -> Chosen:
        """Plan where the fastest plan ends to fit, or for the upper end of a range beyond that."""
        problem, storages = (self.problem, self.storages) if self.base is self.example else self._at(self.base)
        fastest = self._bounded(Planner(problem, storages).fastest.schedule, has_margin=True)
        if all(bounded.fits(self.base) for bounded in fastest) or not self.open:
            picked = self._pick(problem, storages)
            return self._finish(picked, self._upper(picked.offer.schedule))
        level = max(bounded.level(self.base) for bounded in fastest)
        picked = self._beyond(fastest, level) or self._pick(problem, storages)
        reached = self._bounded(picked.offer.schedule)
        if all(bounded.fits(self.base) for bounded in reached):
            return self._finish(picked, self._upper(picked.offer.schedule), self._lower(fastest, level))
        return self._finish(picked, (), self._lower(reached, 1))  # the lowest plan, which exceeds the budget

    # ---------------------------------------------------------------------------------------------- planning

    def _beyond(self, fastest: Sequence[_Bounded], level: int) -> Picked | None:
        """A plan for the upper end of a range, or for the largest size at which there is one; None if at none."""
        end = self._furthest(lambda sizes: max(b.level(sizes) for b in fastest) <= level)
        if end is None:
            return None
        picked = self._quietly(end)
        if self._fits(picked.offer.schedule, end):
            return picked
        # What is lowest at the end need not be lowest here. How far the two reach is as far as a plan is known to.
        reached = [self._reach(picked.offer.schedule)]
        if self.request.budget is not None:
            problem, storages = self._at(self.base)
            reached.append(self._reach(Planner(problem, storages).lowest.schedule))
        known = [sizes for sizes in reached if sizes is not None]
        if not known:
            return None
        furthest = max(known, key=lambda sizes: [sizes.values[symbol] for symbol in self.open])
        picked = self._quietly(furthest)
        return picked if self._fits(picked.offer.schedule, furthest) else None

    def _fits(self, schedule: Schedule, sizes: Sizes) -> bool:
        return all(bounded.fits(sizes) for bounded in self._bounded(schedule))

    def _reach(self, schedule: Schedule) -> Sizes | None:
        """The largest sizes at which a schedule keeps within the limits; None if it does not here."""
        bounded = self._bounded(schedule)
        return self._furthest(lambda sizes: all(b.fits(sizes) for b in bounded))

    def _quietly(self, sizes: Sizes) -> Picked:
        """The best plan at other sizes, the lowest if none fits there: it may fit at smaller ones."""
        budget = None if self.request.budget is None else replace(self.request.budget, take_minimum=True)
        problem, storages = self._at(sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pick(problem, storages, budget, take_minimum=True)

    def _pick(self, problem: FlowProblem, storages: Storages) -> Picked:
        return pick(problem, storages, self.request.budget, take_minimum=self.request.take_minimum)

    def _at(self, sizes: Sizes) -> tuple[FlowProblem, Storages]:
        return at_sizes(self.problem, self.request.cost_model, sizes, fuses=self.request.fuses)

    def _furthest(self, holds: Callable[[Sizes], bool]) -> Sizes | None:
        """The largest sizes, all symbols grown alike, at which something holds; None if it holds nowhere above."""
        if not holds(self.base):
            return None
        low, high = 64, 128  # sixty-fourths of the sizes at hand
        while high < 64 * 2**20 and holds(self._scaled(high)):
            low, high = high, 2 * high
        while high - low > 1 and self._scaled(low).values != self._scaled(high).values:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(self._scaled(middle)) else (low, middle)
        return self._allowed(self._scaled(low))

    def _scaled(self, sixty_fourths: int) -> Sizes:
        values: Values = {}
        for symbol in self.open:
            _, high = symbol_bounds(self.base.shape_env, symbol)
            grown = self.base.values[symbol] * sixty_fourths // 64
            values[symbol] = grown if high is None else min(grown, high)
        return self.base.at(values)

    def _allowed(self, sizes: Sizes) -> Sizes | None:
        """The nearest smaller sizes for which all holds that the graph takes for granted."""
        conditions = guards_of(sizes.shape_env)
        for step in range(TRIES_TO_ALIGN):
            lowered = {s: max(sizes.values[s] - step, self.base.values[s]) for s in self.open}
            candidate = sizes.at(lowered)
            if all(condition.xreplace(_integers(candidate.values)) != False for condition in conditions):  # noqa: E712
                return candidate
        return None

    # ---------------------------------------------------------------------------------------------- ranges

    def _bounded(self, schedule: Schedule, *, has_margin: bool = False) -> list[_Bounded]:
        """The peaks of a schedule, each with its limit.

        A margin is left for what a compiler does, as the planner does, unless the plan needs all there is.
        """
        simulation = simulate(self.problem.graph, self.storages, schedule)
        found = []
        for limit in self.limits:
            peak = peak_terms(simulation, self.example, limit.counts)
            safe = int((1 - FUSION_MARGIN) * limit.num_bytes)
            is_safe = self.request.fuses and limit.counts is None and (has_margin or peak.at(self.base) <= safe)
            found.append(_Bounded(peak, safe if is_safe else limit.num_bytes))
        return found

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
        row = max(most.peak.expressions, key=self.base.value_of)
        return (sympy.Gt(self._backed(row), threshold),) if self.base.value_of(row) > threshold else ()

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
        offer = _moved(picked.offer, self.problem, self.storages)
        moved = replace(picked, offer=offer, shares=picked.shares_in(self.problem.graph, offer.simulation))
        if moved.without_recompute_bytes is not None:
            whole = Planner(self.problem, self.storages).without_recompute.peak_bytes
            moved = replace(moved, without_recompute_bytes=whole)
        guards = tuple(c for group in conditions for c in group if self._may_guard(c))
        chosen = write_plan(self.problem, self.storages, moved, self.request.key)
        plan = replace(chosen.plan, guards=tuple(_relation_text(guard) for guard in guards))
        return replace(chosen, plan=plan, guards=guards)

    def _may_guard(self, condition: Any) -> bool:
        return bool(condition != True) and not condition.free_symbols & self.fixed  # noqa: E712 (sympy's own true)


def _relation_text(relation: Any) -> str:
    try:
        return f"{write(relation.lhs)} {relation.rel_op} {write(relation.rhs)}"
    except NotExpressible:
        return str(relation)


def at_sizes(problem: FlowProblem, model: CostModel, sizes: Sizes, *, fuses: bool) -> tuple[FlowProblem, Storages]:
    """The same choice at other sizes: prices and memory change, what may be done does not."""
    costs = price(problem.graph, model, sizes)
    storages = find_storages(problem.graph, fuses=fuses, sizes=sizes)
    return FlowProblem.build(problem.graph, problem.constraints, costs), storages


def take_for_granted(chosen: Chosen, storages: Storages) -> None:
    """Let whoever compiled the graph compile anew for sizes outside of a plan's range."""
    for condition in chosen.guards:
        held = add_guard(storages.sizes.shape_env, condition)
        assert held, f"the plan does not hold at the sizes it was made for: {condition}"


def _moved(offer: Offer, problem: FlowProblem, storages: Storages) -> Offer:
    """An offer as it is at other sizes."""
    simulation = simulate(problem.graph, storages, offer.schedule)
    return replace(offer, simulation=simulation, extra_ticks=extra_ticks(problem, offer.schedule))


def largest_where(holds: Callable[[int], bool], sizes: Sizes, symbol: Any) -> int | None:
    """The largest value of a symbol at which something holds that ends somewhere; None if it never ends."""
    _, high = symbol_bounds(sizes.shape_env, symbol)
    low: int = sizes.values[symbol]
    above = LARGEST_SIZE if high is None else high
    if holds(above):
        return None
    above = next((n for n in _doubled(low, above) if not holds(n)), above)
    while above - low > 1:
        middle = (low + above) // 2
        low, above = (middle, above) if holds(middle) else (low, middle)
    return low


def smallest_where(holds: Callable[[int], bool], sizes: Sizes, symbol: Any) -> int:
    """The smallest value of a symbol at which something holds that holds from some size on."""
    least, _ = symbol_bounds(sizes.shape_env, symbol)
    below = max(least or 0, 0)
    high: int = sizes.values[symbol]
    if holds(below):
        return below
    while high - below > 1:
        middle = (below + high) // 2
        below, high = (below, middle) if holds(middle) else (middle, high)
    return high


def _doubled(start: int, end: int) -> Iterator[int]:
    while start < end:
        start = max(2 * start, 1)
        yield min(start, end)


def _integers(values: Mapping[sympy.Symbol, int]) -> dict[Any, Any]:
    import sympy

    return {symbol: sympy.Integer(value) for symbol, value in values.items()}
