"""What is said if a budget cannot be met: how low one can get, what sets that, what is alive there, and who insists."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch.fx as fx

from ..graph import JointGraph, Reason, policy_of, region_of
from ..memory import Memory, Simulation
from ..search import FlowProblem, Offer, Planner
from ..shared import InfeasibleBudget, exact_size, size, source_line
from .budget import LOWEST_PLAN_OPTION, SMALLEST_BYTES, Budget

MOST_POLICIES, MOST_NAMED = 5, 3
"""How many policies an error lists that keep memory up, and how many values of each."""

MOST_ALIVE = 5
"""How many of the values alive at the peak an error lists."""

FRACTION_STEPS = 1000
"""Fractions that an error recommends are multiples of a thousandth."""


def lowest_or_error(budget: Budget, planner: Planner, budget_bytes: int) -> Offer:
    """Fall back on the lowest plan with a warning, or raise an error that says how low one can get."""
    lowest = planner.lowest
    promised = budget.promised_bytes(planner.storages, lowest.peak_bytes)
    least = lowest.peak_bytes if budget.fraction == 1.0 else promised
    if least <= budget_bytes:  # all of what a step takes anyway is a promise that needs no margin
        return lowest
    whole = planner.without_recompute.peak_bytes
    message = explain_minimum(budget, budget_bytes, planner.problem, lowest, whole, promised)
    if not budget.take_minimum:
        raise InfeasibleBudget(message, advice(budget, promised, whole))
    warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.', stacklevel=2)
    return lowest


def advice(budget: Budget, least_bytes: int, whole_bytes: int) -> str:
    """Say what could be asked for instead, in the user's unit, too."""
    part = "" if budget.fraction is None else least_fraction(least_bytes, whole_bytes)
    return (
        f"Give at least {part}{max(least_bytes, SMALLEST_BYTES)} bytes, or set {LOWEST_PLAN_OPTION} to take the "
        "lowest plan; smaller batches lower it, too."
    )


def least_fraction(least_bytes: int, whole_bytes: int) -> str:
    """The smallest fraction that is enough, `0.273 or `; nothing if all of it is not."""
    steps = math.ceil(FRACTION_STEPS * least_bytes / max(whole_bytes, 1))
    while int(steps / FRACTION_STEPS * whole_bytes) < least_bytes <= whole_bytes:  # fractions are rounded down to bytes
        steps += 1
    return f"{steps / FRACTION_STEPS:g} or " if steps <= FRACTION_STEPS else ""


def explain_minimum(
    budget: Budget,
    budget_bytes: int,
    problem: FlowProblem,
    lowest: Offer,
    whole_bytes: int,
    promised_bytes: int | None = None,
) -> str:
    """Say how low the peak can get, which op sets it, what is alive there, and who insists on keeping it."""
    simulation, graph = lowest.simulation, problem.graph
    added = (promised_bytes or lowest.peak_bytes) - lowest.peak_bytes
    beyond = f", to which the compiler may add {size(added)}" if added else ""
    moment = simulation.peak_moment
    alive = simulation.alive_at(moment)
    asked, least = sizes_compared(budget_bytes, lowest.peak_bytes, whole_bytes if budget.fraction else None)
    lines = [
        f"memory_budget={budget.text}: that is {asked}, but the lowest activation peak found is {least}{beyond}.",
        f"It is set by {op_at(graph, simulation, moment)}, where these are alive:",
        *alive_lines(graph, alive),
        *policies_that_keep(problem, alive),
    ]
    return "\n".join(lines)


def sizes_compared(budget_bytes: int, least_bytes: int, whole_bytes: int | None) -> tuple[str, str]:
    """A budget and the least that is needed, so that they can be told apart, and as parts of a whole if asked."""
    asked, least = exact_size(budget_bytes), exact_size(least_bytes)
    if not whole_bytes:
        return asked, least
    return f"{asked} of {size(whole_bytes)} without recomputation", f"{least}, {least_bytes / whole_bytes:.1%} of that"


def op_at(graph: JointGraph, simulation: Simulation, moment: int) -> str:
    """The op that runs at a moment, where, and for which line."""
    node = graph.nodes[simulation.order[moment]]
    source = source_line(node.stack_trace or "")
    where = "forward" if moment < simulation.num_forward else "backward"
    return f"`{node.name}` ({node.target}) in {where}" + (f", {source}" if source else "")


def alive_lines(graph: JointGraph, alive: Sequence[Memory]) -> Iterator[str]:
    """The largest of what is alive, a line each with what is known of its origin, and how much the rest is."""
    for memory in alive[:MOST_ALIVE]:
        node = graph.nodes[memory.node]
        yield f"  {size(memory.num_bytes):>10}  {node.name}  {source_line(node.stack_trace or '')}".rstrip()
    rest = alive[MOST_ALIVE:]
    if rest:
        yield f"  ... and {len(rest)} more, {size(_total(rest))}"


def policies_that_keep(problem: FlowProblem, alive: Sequence[Memory]) -> list[str]:
    """Which policies insist on keeping something of what is alive, and what: a line for each, the largest first."""
    kept: dict[str, list[Memory]] = {}
    for memory in alive:
        v = problem.value_of.get(memory.node)
        if v is not None and problem.constraint(v).no_recompute in (Reason.POLICY_SAVE, Reason.POLICY_OFFLOAD):
            kept.setdefault(_insists(problem.graph.nodes[problem.bases[v]]), []).append(memory)
    if not kept:
        return []
    ranked = sorted(kept, key=lambda policy: -_total(kept[policy]))
    rows = [f"  {size(_total(kept[policy])):>10}  {policy}: {_named(problem, kept[policy])}" for policy in ranked]
    rest = [f"  and {len(rows) - MOST_POLICIES} more policies"] if len(rows) > MOST_POLICIES else []
    total = sum(map(_total, kept.values()))
    return [f"Policies insist on keeping {size(total)} of that:", *rows[:MOST_POLICIES], *rest]


def _insists(node: fx.Node) -> str:
    """Whose answer it is that keeps a value, and what it was."""
    region, answer = region_of(node), policy_of(node)
    asked = "a policy of torch.utils.checkpoint" if region is None else region.policy
    return f"{asked} says {answer.name if answer is not None else Reason.POLICY_SAVE.value}"


def _named(problem: FlowProblem, kept: Sequence[Memory]) -> str:
    """The largest of some values, with the line that computes the first and the regions that they are in."""
    nodes = [problem.graph.nodes[memory.node] for memory in sorted(kept, key=lambda m: -m.num_bytes)]
    regions = list(dict.fromkeys(region.path for node in nodes if (region := region_of(node)) is not None))
    rest = len(nodes) - MOST_NAMED
    names = ", ".join(f"`{node.name}`" for node in nodes[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
    source = source_line(nodes[0].stack_trace or "")
    return "".join([names, _regions_text(regions), f", {source}" if source else ""])


def _regions_text(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    return f" in region {paths[0]}" if len(paths) == 1 else f" in {len(paths)} regions from {paths[0]} to {paths[-1]}"


def _total(memories: Iterable[Memory]) -> int:
    return sum(memory.num_bytes for memory in memories)
