"""Which of the schedules found is taken: the fastest that keeps within the budgets of the graph and of its regions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..memory import NO_SHARES, Shares, Simulation, Storages
from ..search import Bench, FlowProblem, Offer, Planner
from .budget import Budget, RegionShare
from .infeasible import lowest_or_error
from .regions import choose_within_shares, meet_regions


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
    """The schedule that is taken, and what it was made to keep within."""

    offer: Offer
    """With its simulation: where everything is that it allocates."""
    budget_bytes: int | None = None
    without_recompute_bytes: int | None = None
    shares: tuple[RegionShare, ...] = ()
    least_ticks: int | None = None
    """What no schedule within the budget of the whole graph undercuts; None if it has none, or exceeds it."""
    planner: Planner | None = None
    """Who has the extremes at the same sizes: the fastest schedule, and the one without recomputation."""
    regions: Shares = NO_SHARES
    """The regions with a budget, and which nodes are theirs."""

    @property
    def has_budget(self) -> bool:
        """It was made to keep within a budget, of the graph or of a region."""
        return self.budget_bytes is not None or bool(self.shares)

    def shares_in(self, simulation: Simulation) -> tuple[RegionShare, ...]:
        """What the regions with a budget take in another simulation of the same schedule."""
        if not self.shares:
            return ()
        rows = zip(self.shares, self.regions.peaks(simulation), strict=True)
        return tuple(replace(share, predicted_bytes=peak.num_bytes) for share, peak in rows)


def pick(
    problem: FlowProblem,
    storages: Storages,
    budget: Budget | None,
    *,
    take_minimum: bool = False,
    shares: Shares | None = None,
) -> Picked:
    """Pick the fastest schedule found that keeps within the budgets of the graph and of its regions.

    The regions with a budget are looked for, unless they are known.
    """
    shares = Shares.find(problem.graph) if shares is None else shares
    planner = Planner(Bench(problem, storages))
    return pick_from(planner, budget, shares, take_minimum=take_minimum)


def pick_from(
    planner: Planner, budget: Budget | None, shares: Shares = NO_SHARES, *, take_minimum: bool = False
) -> Picked:
    """Pick the fastest schedule that a planner finds within the budgets of the whole graph and of some regions."""
    if shares.budgets:
        found = choose_within_shares(meet_regions(planner, shares, take_minimum=take_minimum), budget)
        return Picked(
            found.offer,
            found.budget_bytes,
            found.without_recompute_bytes,
            found.shares,
            planner=planner,
            regions=shares,
        )
    if budget is None:
        return Picked(planner.fastest, planner=planner)
    budget_bytes = budget.resolve(planner)
    offer = planner.lowest if budget.is_for_lowest else _within(planner, budget, budget_bytes)
    least = planner.least_ticks(budget_bytes) if offer.peak_bytes <= budget_bytes else None
    whole = planner.without_recompute.peak_bytes
    return Picked(offer, budget_bytes, whole, least_ticks=least, planner=planner)


def _within(planner: Planner, budget: Budget, budget_bytes: int) -> Offer:
    found = planner.within_if_any(budget.safe_bytes(planner.storages, budget_bytes))
    return found or lowest_or_error(budget, planner, budget_bytes)
