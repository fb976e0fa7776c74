"""Choose a plan under region budgets, alone or together with a budget of the whole graph, or say why there is none."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from ..memory.schedule import Schedule
from ..memory.shares import Limits, Shares
from ..memory.simulate import simulate
from ..memory.storage import Storages
from ..search.planner import Offer, Planner
from ..search.problem import FlowProblem
from ..search.share_planner import SharePlanner, ShareSearch, reconciled, search_shares
from ..shared.errors import InfeasibleBudget
from .budget import Budget, RegionShare, alive_lines, explain_minimum, op_at, policies_that_keep, sizes_compared


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What was chosen."""

    offer: Offer
    shares: tuple[RegionShare, ...]
    budget_bytes: int | None
    without_recompute_bytes: int


def choose_within_shares(
    problem: FlowProblem, storages: Storages, shares: Shares, budget: Budget | None, *, take_minimum: bool
) -> Found:
    """Pick the fastest plan found in which every region keeps within its budget, and the graph within its own."""
    plain = Planner(problem, storages)
    limits = asked = Limits.resolve(shares, plain.without_recompute.simulation)
    search = search_shares(problem, storages, limits, gives_up=not take_minimum)
    short = _exceeded(problem, storages, limits, search)
    if short and all(search.lowest[region] <= limits.num_bytes[region] for region in short):
        search = reconciled(search, storages, limits)
        short = _exceeded(problem, storages, limits, search)
    if short:
        limits = _relaxed(problem, storages, limits, search, short, take_minimum=take_minimum)
    budget_bytes = None if budget is None else budget.resolve(plain)
    planner = SharePlanner(search, storages, limits, budget_bytes)
    offer = planner.best()
    if offer is None:
        assert budget is not None and budget_bytes is not None, "region budgets alone are met by the schedule found"
        offer = _lowest(planner, budget, budget_bytes, plain.without_recompute.peak_bytes)
    offer = planner.unscaled(offer)
    peaks = shares.peaks(offer.simulation)
    rows = zip(shares.budgets, asked.num_bytes, peaks, strict=True)
    return Found(
        offer=offer,
        shares=tuple(RegionShare(bound.path, limit, peak.num_bytes) for bound, limit, peak in rows),
        budget_bytes=budget_bytes,
        without_recompute_bytes=plain.without_recompute.peak_bytes,
    )


def _exceeded(problem: FlowProblem, storages: Storages, limits: Limits, search: ShareSearch) -> list[int]:
    return limits.exceeded(limits.shares.peaks(simulate(problem.graph, storages, search.schedule)))


def _relaxed(
    problem: FlowProblem,
    storages: Storages,
    limits: Limits,
    search: ShareSearch,
    short: list[int],
    *,
    take_minimum: bool,
) -> Limits:
    """Give regions whose budget cannot be met what the lowest plan takes, with a warning; or raise an error."""
    hopeless = [region for region in short if search.lowest[region] > limits.num_bytes[region]]
    if hopeless:
        message = _explain(problem, storages, limits, hopeless[0], search.lowest_schedules[hopeless[0]])
    else:
        message = (
            f"{_explain(problem, storages, limits, short[0], search.schedule)}\n"
            f"Its budget can be met by itself, but not together with those of {_others(limits, short[0])}."
        )
    if not take_minimum:
        raise InfeasibleBudget(
            f'{message}\nGive at least as much, or compile with on_infeasible="minimum" to take the lowest plan; '
            "smaller batches lower it, too."
        )
    others = f" {len(short) - 1} more regions are short of memory, too." if len(short) > 1 else ""
    warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.{others}', stacklevel=2)
    peaks = limits.shares.peaks(simulate(problem.graph, storages, search.schedule))
    reached = [max(limit, peak.num_bytes) for limit, peak in zip(limits.num_bytes, peaks, strict=True)]
    return replace(limits, num_bytes=tuple(reached))


def _others(limits: Limits, region: int) -> str:
    paths = [bound.path for bound in limits.shares.budgets]
    return ", ".join([*paths[:region], *paths[region + 1 :]][:8])


def _explain(problem: FlowProblem, storages: Storages, limits: Limits, region: int, schedule: Schedule) -> str:
    """Say how low a region's share can get, which op sets it, what is alive there, and who insists on keeping it."""
    shares, graph = limits.shares, problem.graph
    bound, simulation = shares.budgets[region], simulate(graph, storages, schedule)
    peak = shares.peaks(simulation)[region]
    alive = [m for m in simulation.alive_at(peak.moment) if region in shares.regions_at[m.node]]
    whole = limits.whole_bytes[region] if bound.fraction else None
    asked, least = sizes_compared(limits.num_bytes[region], peak.num_bytes, whole)
    lines = [
        f"memory_budget={bound.text} of region {bound.path}: that is {asked}, but the lowest share found is {least}.",
        f"It is set by {op_at(graph, simulation, peak.moment)}, where these of the region are alive:",
        *alive_lines(graph, alive),
    ]
    return "\n".join([*lines, *policies_that_keep(problem, alive)])


def _lowest(planner: SharePlanner, budget: Budget, budget_bytes: int, whole_bytes: int) -> Offer:
    """The plan with the lowest peak among those that keep within the region budgets."""
    lowest = planner.lowest
    if lowest.peak_bytes <= budget_bytes:
        return lowest
    offers = [planner.unscaled(offer) for offer in (lowest, planner.seed)]
    limits = planner.limits
    fitting = [offer for offer in offers if not limits.exceeded(limits.shares.peaks(offer.simulation))]
    best = min(fitting, key=lambda offer: offer.peak_bytes)
    paths = ", ".join(bound.path for bound in limits.shares.budgets)
    message = (
        f"{explain_minimum(budget, budget_bytes, planner.problem, best, whole_bytes)}\n"
        f"The budgets of these regions have to hold at the same time: {paths}."
    )
    if not budget.take_minimum:
        raise InfeasibleBudget(f"{message}\n{budget.advice(best.peak_bytes, whole_bytes)}")
    warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.', stacklevel=2)
    return best
