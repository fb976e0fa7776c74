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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..budgets import Picked, pick, pick_from
from ..memory import Schedule, Shares, Simulation, Storages, peak_terms, storages_at
from ..plans import Chosen, Prepared, Request, write_plan
from ..prices import CostModel, price
from ..search import Bench, FlowProblem, Offer, Planner, extra_ticks
from ..sizes import Sizes
from ..torch_private import add_guard, fixed_ranges, symbol_bounds
from .ends import EndPlanner
from .growth import Growth
from .guards import Guards, relation_text
from .limits import Bounded, Limit

MOST_RANGES = {0: 1, 1: 4}
"""At most how many plans serve all sizes at which a budget can be met, by how many sizes change. Torch compiles eight
graphs of a function: the first is for the first sizes alone, and where a size is 1 there is another graph, with ranges
of its own."""

MOST_RANGES_OF_SEVERAL = 3
"""The same where more than one size changes."""


def choose_for_range(prepared: Prepared, request: Request, limits: tuple[Limit, ...]) -> Chosen:
    """Choose a plan for the range of sizes that the example is in, and say where that range ends."""
    return _RangePlanner(prepared, request, limits).choose()


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A schedule at the sizes of the example."""

    schedule: Schedule
    simulation: Simulation
    bounded: list[Bounded]


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
        self.growth, self.guards = Growth(self.base, self.open), Guards(self.base, self.open, self.fixed)
        self._known: dict[int, _Known] = {}
        self._low_of = self.at_base

    def choose(self) -> Chosen:
        """Plan where the fastest plan ends to fit, or for the upper end of a range beyond that."""
        fastest = self._bounded(self.at_base.fastest.schedule)
        if all(bounded.fits(self.base) for bounded in fastest) or not self.open:
            picked = self._pick()
            return self._finish(picked, self.guards.upper(self._bounded(picked.offer.schedule)))
        level = min(max(bounded.level(self.base) for bounded in fastest), self.num_ranges - 1)
        picked = self._beyond(fastest, level) or self._pick()
        reached = self._bounded(picked.offer.schedule)
        if all(bounded.fits(self.base) for bounded in reached):
            return self._finish(picked, self.guards.upper(reached), self.guards.lower(fastest, level))
        return self._finish(picked, (), self.guards.lower(reached, 1))  # the lowest plan, which exceeds the budget

    @property
    def _takes_minimum(self) -> bool:
        """True if sizes at which no plan fits get one all the same."""
        budget = self.request.budget
        return self.request.take_minimum or (budget is not None and budget.take_minimum)

    # ---------------------------------------------------------------------------------------------- planning

    def _beyond(self, fastest: Sequence[Bounded], level: int) -> Picked | None:
        """A plan for the upper end of a range, or for the largest size at which there is one; None if at none."""
        if level < self.num_ranges - 1:
            picked = self._planned_for(self.growth.ends(lambda sizes: max(b.level(sizes) for b in fastest) <= level))
            if picked is not None:
                return picked
        # What is lowest far out need not be lowest here. How far it reaches is as far as a plan is known to.
        lowest = self._lowest()
        bounded = self._bounded(lowest.offer.schedule)
        ends = self.growth.ends(lambda sizes: all(b.fits(sizes) for b in bounded))
        return (self._planned_for(ends, lowest.offer) or lowest) if ends else None

    def _lowest(self) -> Picked:
        """The plan with the lowest peak here; of plans for regions' budgets alone, the one for very large sizes."""
        if self.request.budget is None:
            return self._quietly(self.growth.far)
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
            offers = planner.refine(self._low_of, lowest, bound)
        else:
            reachable = planner.reachable(bound)
            if not reachable[0]:
                self._take_low_of(planner.planner)
                return None
            offers = planner.only(reachable).within(bound)
        return next((Picked(offer, self.limits[0].num_bytes) for offer in offers if self._fits_here(offer)), None)

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

    # ---------------------------------------------------------------------------------------------- ranges

    def _bounded(self, schedule: Schedule) -> list[Bounded]:
        """The peaks of a schedule, each with its limit."""
        known = self._known.get(id(schedule))
        if known is None:
            simulation = self.here.bench.simulator.run(schedule)
            bounded = [
                Bounded(peak_terms(simulation, self.example, limit.counts), self._limit_bytes(limit))
                for limit in self.limits
            ]
            known = self._known[id(schedule)] = _Known(schedule, simulation, bounded)
        return known.bounded

    def _limit_bytes(self, limit: Limit) -> int:
        """A limit without what is left for a compiler."""
        return int((1 - self.margin) * limit.num_bytes)

    def _finish(self, picked: Picked, *conditions: tuple[Any, ...]) -> Chosen:
        """Write the plan at the example's sizes, with the conditions on others."""
        schedule = picked.offer.schedule
        bounded, simulation = self._bounded(schedule), self._known[id(schedule)].simulation
        offer = replace(picked.offer, simulation=simulation, extra_ticks=extra_ticks(self.problem, schedule))
        moved = replace(picked, offer=offer, shares=picked.shares_in(simulation))
        if picked.budget_bytes is not None or picked.without_recompute_bytes is not None:
            moved = replace(moved, without_recompute_bytes=self.here.without_recompute.peak_bytes)
        guards = tuple(c for group in conditions for c in group if self.guards.may_be(c))
        peak = next((b.peak for b, limit in zip(bounded, self.limits, strict=True) if limit.counts is None), None)
        chosen = write_plan(self.problem, self.storages, moved, self.request.key, peak)
        most = self.num_ranges + self._takes_minimum
        plan = replace(chosen.plan, guards=tuple(relation_text(guard) for guard in guards), most_ranges=most)
        return replace(chosen, plan=plan, guards=guards)


def at_sizes(problem: FlowProblem, storages: Storages, model: CostModel, sizes: Sizes) -> tuple[FlowProblem, Storages]:
    """The same choice at other sizes: prices and memory change, what may be done does not."""
    costs = price(problem.graph, model, sizes, problem.costs.likes)
    return replace(problem, costs=costs), storages_at(storages, sizes)


def take_for_granted(chosen: Chosen, storages: Storages) -> None:
    """Let whoever compiled the graph compile anew for sizes outside of a plan's range."""
    for condition in chosen.guards:
        held = add_guard(storages.sizes.shape_env, condition)
        assert held, f"the plan does not hold at the sizes it was made for: {condition}"
