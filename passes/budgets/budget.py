"""A budget on the activation peak: what the user promises to be content with, and what is said if it cannot be met."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ..graph.constraints import Reason
from ..graph.joint_graph import JointGraph
from ..graph.region_tag import policy_of, region_of
from ..memory.simulate import Memory, Simulation
from ..memory.storage import Storages
from ..search.bench import Offer
from ..search.planner import Planner
from ..search.problem import FlowProblem
from ..shared.errors import InfeasibleBudget
from ..shared.readable import exact_size, size
from ..shared.source import source_line as source_line

SMALLEST_BYTES = 1024
"""A smaller whole number is more likely a slip than a size: 1 is neither 1.0 nor one byte."""

FUSION_MARGIN = 0.07
"""What is left free of a budget where a compiler fuses and nobody compares its kernels with the budget, or only at one
of many sizes: peaks were measured up to 7 % above the simulated ones (most are within 1 %)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on the activation peak, as the user stated it."""

    text: str
    """The user's words, for messages."""
    fraction: float | None = None
    """Of the peak without recomputation."""
    num_bytes: int | None = None
    take_minimum: bool = False
    """Where the bound cannot be met, warn and take the lowest plan instead of raising an error."""
    margin: float = 0.0
    """The part of it that is left free for what a compiler adds to the simulated peak."""
    is_for_lowest: bool = False
    """Take the lowest plan in any case, to see what a compiler makes of that."""

    def margin_in(self, storages: Storages) -> float:
        """What part of the bound is left free in one graph."""
        return max(self.margin, least_margin(storages))

    def safe_bytes(self, planner: Planner, budget_bytes: int) -> int:
        """The bound that a simulated peak has to keep within."""
        return int((1 - self.margin_in(planner.storages)) * budget_bytes)

    def promised_bytes(self, planner: Planner, offer: Offer) -> int:
        """The smallest bound that a schedule keeps within for certain."""
        return math.ceil(offer.peak_bytes / (1 - self.margin_in(planner.storages)))

    def resolve(self, planner: Planner) -> int:
        """The bound in bytes for one graph."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.fraction is not None
        return int(self.fraction * planner.without_recompute.peak_bytes)

    def when_infeasible(self, planner: Planner, budget_bytes: int) -> Offer:
        """Fall back on the lowest plan with a warning, or raise an error that says how low one can get."""
        lowest = planner.lowest
        promised = self.promised_bytes(planner, lowest)
        least = lowest.peak_bytes if self.fraction == 1.0 else promised
        if least <= budget_bytes:  # all of what a step takes anyway is a promise that needs no margin
            return lowest
        whole = planner.without_recompute.peak_bytes
        message = explain_minimum(self, budget_bytes, planner.problem, lowest, whole, promised)
        if not self.take_minimum:
            raise InfeasibleBudget(message, self.advice(promised, whole))
        warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.', stacklevel=2)
        return lowest

    def advice(self, least_bytes: int, whole_bytes: int) -> str:
        """Say what could be asked for instead, in the user's unit, too."""
        part = "" if self.fraction is None else least_fraction(least_bytes, whole_bytes)
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


def least_margin(storages: Storages) -> float:
    """What is left free whatever the budget: where sizes are symbols, kernels are seen at one size only."""
    return FUSION_MARGIN if storages.executor.fuses and storages.sizes.symbols else 0.0


MOST_POLICIES, MOST_NAMED = 5, 3
"""How many policies an error lists that keep memory up, and how many values of each."""

MOST_ALIVE = 5
"""How many of the values alive at the peak an error lists."""

FRACTION_STEPS = 1000
"""Fractions that an error recommends are multiples of a thousandth."""

LOWEST_PLAN_OPTION = 'on_infeasible="minimum"'
"""What a compiled program can ask for instead of an error; a region outside of one has no such option."""


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


@dataclass(frozen=True, slots=True)
class RegionShare:
    """What one call of a region with a budget has allocated at its worst moment."""

    path: str
    budget_bytes: int
    predicted_bytes: int
