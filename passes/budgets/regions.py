"""Choose a plan under region budgets, alone or together with a budget of the whole graph, or say why there is none."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from ..memory import Limits, Shares, Simulation
from ..search import FlowProblem, Offer, Planner
from ..shared import InfeasibleBudget
from .budget import Budget, RegionShare
from .infeasible import advice, alive_lines, explain_minimum, op_at, policies_that_keep, sizes_compared
from .region_search import ShareSearch, best_within, planner_within, reconciled, search_shares, unit_of


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What was chosen."""

    offer: Offer
    shares: tuple[RegionShare, ...]
    budget_bytes: int | None
    without_recompute_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class RegionsMet:
    """A graph whose regions keep within their budgets, from which a budget of the whole graph starts."""

    plain: Planner
    """One without limits, of which the extremes are asked."""
    asked: Limits
    limits: Limits
    """The same, but more for regions whose budget cannot be met."""
    search: ShareSearch


def meet_regions(plain: Planner, shares: Shares, *, take_minimum: bool) -> RegionsMet:
    """Have every region keep within its budget, or say why one cannot."""
    bench = plain.bench
    limits = asked = Limits.resolve(shares, plain.without_recompute.simulation)
    search = search_shares(bench, limits, gives_up=not take_minimum)
    short = _exceeded(limits, search.offer)
    if short and all(search.lowest_bytes[region] <= limits.num_bytes[region] for region in short):
        search = reconciled(bench, search, limits)
        short = _exceeded(limits, search.offer)
    if short:
        limits = _relaxed(bench.problem, limits, search, short, take_minimum=take_minimum)
    return RegionsMet(plain, asked, limits, search)


def choose_within_shares(met: RegionsMet, budget: Budget | None) -> Found:
    """Pick the fastest plan found in which every region keeps within its budget, and the graph within its own."""
    plain, limits, search, shares = met.plain, met.limits, met.search, met.asked.shares
    budget_bytes = None if budget is None else budget.resolve(plain)
    planner = planner_within(plain.bench, search, limits, budget_bytes)
    offer = best_within(planner, search, unit_of(limits, budget_bytes))
    if offer is None:
        assert budget is not None and budget_bytes is not None, "region budgets alone are met by the schedule found"
        offer = _lowest(planner, limits, budget, budget_bytes, plain.without_recompute.peak_bytes)
    offer = planner.bench.in_bytes(offer)
    peaks = shares.peaks(offer.simulation)
    rows = zip(shares.budgets, met.asked.num_bytes, peaks, strict=True)
    return Found(
        offer=offer,
        shares=tuple(RegionShare(bound.path, limit, peak.num_bytes) for bound, limit, peak in rows),
        budget_bytes=budget_bytes,
        without_recompute_bytes=plain.without_recompute.peak_bytes,
    )


def _exceeded(limits: Limits, offer: Offer) -> list[int]:
    return limits.exceeded(limits.shares.peaks(offer.simulation))


def _relaxed(
    problem: FlowProblem, limits: Limits, search: ShareSearch, short: list[int], *, take_minimum: bool
) -> Limits:
    """Give regions whose budget cannot be met what the lowest plan takes, with a warning; or raise an error."""
    hopeless = [region for region in short if search.lowest_bytes[region] > limits.num_bytes[region]]
    if hopeless:
        message = _explain(problem, limits, hopeless[0], search.lowest[hopeless[0]].simulation)
    else:
        message = (
            f"{_explain(problem, limits, short[0], search.offer.simulation)}\n"
            f"Its budget can be met by itself, but not together with those of {_others(limits, short[0])}."
        )
    if not take_minimum:
        raise InfeasibleBudget(
            f'{message}\nGive at least as much, or compile with on_infeasible="minimum" to take the lowest plan; '
            "smaller batches lower it, too."
        )
    others = f" {len(short) - 1} more regions are short of memory, too." if len(short) > 1 else ""
    warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.{others}', stacklevel=2)
    peaks = limits.shares.peaks(search.offer.simulation)
    reached = [max(limit, peak.num_bytes) for limit, peak in zip(limits.num_bytes, peaks, strict=True)]
    return replace(limits, num_bytes=tuple(reached))


def _others(limits: Limits, region: int) -> str:
    paths = [bound.path for bound in limits.shares.budgets]
    return ", ".join([*paths[:region], *paths[region + 1 :]][:8])


def _explain(problem: FlowProblem, limits: Limits, region: int, simulation: Simulation) -> str:
    """Say how low a region's share can get, which op sets it, what is alive there, and who insists on keeping it."""
    shares, graph = limits.shares, problem.graph
    bound, peak = shares.budgets[region], shares.peaks(simulation)[region]
    alive = [m for m in simulation.alive_at(peak.moment) if region in shares.regions_at[m.node]]
    whole = limits.whole_bytes[region] if bound.fraction else None
    asked, least = sizes_compared(limits.num_bytes[region], peak.num_bytes, whole)
    lines = [
        f"memory_budget={bound.text} of region {bound.path}: that is {asked}, but the lowest share found is {least}.",
        f"It is set by {op_at(graph, simulation, peak.moment)}, where these of the region are alive:",
        *alive_lines(graph, alive),
    ]
    return "\n".join([*lines, *policies_that_keep(problem, alive)])


def _lowest(planner: Planner, limits: Limits, budget: Budget, budget_bytes: int, whole_bytes: int) -> Offer:
    """The plan with the lowest peak among those that keep within the region budgets."""
    lowest = planner.lowest
    if lowest.peak_bytes <= budget_bytes:
        return lowest
    offers = [planner.bench.in_bytes(offer) for offer in (lowest, *planner.seeds)]
    fitting = [offer for offer in offers if not limits.exceeded(limits.shares.peaks(offer.simulation))]
    best = min(fitting, key=lambda offer: offer.peak_bytes)
    paths = ", ".join(bound.path for bound in limits.shares.budgets)
    message = (
        f"{explain_minimum(budget, budget_bytes, planner.problem, best, whole_bytes)}\n"
        f"The budgets of these regions have to hold at the same time: {paths}."
    )
    if not budget.take_minimum:
        raise InfeasibleBudget(f"{message}\n{advice(budget, best.peak_bytes, whole_bytes)}")
    warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.', stacklevel=2)
    return best
