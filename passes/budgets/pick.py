"""Which of the schedules found is taken: the fastest that keeps within the budgets of the graph and of its regions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..graph.joint_graph import JointGraph
from ..memory.shares import Shares
from ..memory.simulate import Simulation
from ..memory.storage import Storages
from ..search.planner import Offer, Planner
from ..search.problem import FlowProblem
from .budget import Budget, RegionShare
from .regions import choose_within_shares


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
    """The schedule that is taken, and what it was made to keep within."""

    offer: Offer
    budget_bytes: int | None = None
    without_recompute_bytes: int | None = None
    shares: tuple[RegionShare, ...] = ()
    least_ticks: int | None = None
    """What no schedule within the budget of the whole graph undercuts; None if it has none, or exceeds it."""

    @property
    def has_budget(self) -> bool:
        """It was made to keep within a budget, of the graph or of a region."""
        return self.budget_bytes is not None or bool(self.shares)

    def shares_in(self, graph: JointGraph, simulation: Simulation) -> tuple[RegionShare, ...]:
        """What the regions with a budget take in another simulation of the same schedule."""
        peaks = Shares.find(graph).peaks(simulation) if self.shares else ()
        rows = zip(self.shares, peaks, strict=True)
        return tuple(replace(share, predicted_bytes=peak.num_bytes) for share, peak in rows)


def pick(problem: FlowProblem, storages: Storages, budget: Budget | None, *, take_minimum: bool = False) -> Picked:
    """Pick the fastest schedule found that keeps within the budgets of the graph and of its regions."""
    shares = Shares.find(problem.graph)
    if shares.budgets:
        found = choose_within_shares(problem, storages, shares, budget, take_minimum=take_minimum)
        return Picked(found.offer, found.budget_bytes, found.without_recompute_bytes, found.shares)
    return pick_from(Planner(problem, storages), budget)


def pick_from(planner: Planner, budget: Budget | None) -> Picked:
    """Pick the fastest schedule that a planner finds within the budget of the whole graph."""
    if budget is None:
        return Picked(planner.fastest)
    budget_bytes = budget.resolve(planner)
    offer = planner.lowest if budget.is_for_lowest else _within(planner, budget, budget_bytes)
    least = planner.least_ticks(budget_bytes) if offer.peak_bytes <= budget_bytes else None
    return Picked(offer, budget_bytes, planner.without_recompute.peak_bytes, least_ticks=least)


def _within(planner: Planner, budget: Budget, budget_bytes: int) -> Offer:
    found = planner.within_if_any(budget.safe_bytes(planner, budget_bytes))
    return found or budget.when_infeasible(planner, budget_bytes)
