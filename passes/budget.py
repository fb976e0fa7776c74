"""A budget on the activation peak: what the user promises to be content with, and what is said if it cannot be met."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from .constraints import Reason
from .errors import InfeasibleBudget
from .flow import FlowProblem
from .planner import Offer, Planner
from .source import source_line
from .storage import Storages

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
        message = explain_minimum(self.text, budget_bytes, planner.problem, lowest, promised)
        if not self.take_minimum:
            raise InfeasibleBudget(message)
        warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.', stacklevel=2)
        return lowest


def least_margin(storages: Storages) -> float:
    """What is left free whatever the budget: where sizes are symbols, kernels are seen at one size only."""
    return FUSION_MARGIN if any(storages.is_fused) and storages.sizes.symbols else 0.0


LOWEST_PLAN_OPTION = 'on_infeasible="minimum"'
"""What a compiled program can ask for instead of an error; a region outside of one has no such option."""


def explain_minimum(
    text: str, budget_bytes: int, problem: FlowProblem, lowest: Offer, promised_bytes: int | None = None
) -> str:
    """Say how low the peak can get, which op sets it, what is alive there, and who insists on keeping it."""
    simulation, graph = lowest.simulation, problem.graph
    least = promised_bytes or lowest.peak_bytes
    beyond = "" if least == lowest.peak_bytes else f", to which the compiler may add {mib(least - lowest.peak_bytes)}"
    moment = simulation.peak_moment
    node = graph.nodes[simulation.order[moment]]
    source = source_line(node.stack_trace or "")
    alive = simulation.alive_at(moment)
    lines = [
        f"memory_budget={text}: that is {mib(budget_bytes)}, but the lowest activation peak found is "
        f"{mib(lowest.peak_bytes)} ({lowest.peak_bytes} bytes){beyond}.",
        f"It is set by `{node.name}` ({node.target}) in {'forward' if moment < simulation.num_forward else 'backward'}"
        + (f", {source}" if source else "")
        + ", where these are alive:",
        *(f"  {mib(m.num_bytes):>10}  {graph.nodes[m.node].name}" for m in alive[:5]),
    ]
    insisted = kept_by_policy(problem, {m.node for m in alive})
    if insisted:
        lines.append("A policy insists on keeping " + ", ".join(f"`{graph.nodes[i].name}`" for i in insisted[:5]) + ".")
    lines.append(
        f"Give at least {max(least, SMALLEST_BYTES)} bytes, or set {LOWEST_PLAN_OPTION} to take the lowest plan; "
        "smaller batches lower it, too."
    )
    return "\n".join(lines)


def kept_by_policy(problem: FlowProblem, alive: set[int]) -> list[int]:
    """Those of the nodes alive whose values a policy insists on keeping."""
    values = (problem.value_of[i] for i in sorted(alive) if i in problem.value_of)
    return [problem.bases[v] for v in values if problem.constraint(v).no_recompute is Reason.POLICY_SAVE]


def mib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**20:.2f} MiB"
