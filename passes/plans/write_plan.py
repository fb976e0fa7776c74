"""A picked schedule written down as a plan: what happens to each value, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ..budgets import Budget, Picked, pick
from ..graph import JointGraph, Reason, Role, base_is_viewed, describe_graph, is_offloaded, region_fields, tensor_of
from ..memory import PeakTerms, Schedule, Simulation, Storages, peak_terms, terms_text
from ..prices import TICKS_PER_SECOND
from ..search import FlowProblem
from ..shared import path_of_node, source_line
from ..sizes import Sizes, describe
from .contents import Action, Decision, PredictedPeak
from .keeping import Runs
from .plan import Plan

NUM_ALIVE = 20
"""How many of the values alive at the peak a plan lists."""


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A plan, and the order of nodes that extraction needs."""

    plan: Plan
    schedule: Schedule
    guards: tuple[Any, ...] = ()
    """Conditions on sizes, in sympy's form, outside of which one has to plan again."""


def choose_plan(
    problem: FlowProblem, storages: Storages, budget: Budget | None, key: str, *, take_minimum: bool = False
) -> Chosen:
    """Pick the fastest plan that keeps within the budgets of the graph and of its regions, and write it down."""
    return write_plan(problem, storages, pick(problem, storages, budget, take_minimum=take_minimum), key)


def write_plan(
    problem: FlowProblem, storages: Storages, picked: Picked, key: str, peak: PeakTerms | None = None
) -> Chosen:
    """Write down what a schedule does with every value; `peak` if that is known in terms of symbols already."""
    graph, offer, sizes = problem.graph, picked.offer, storages.sizes
    plan = Plan(
        decisions=decisions_of(problem, offer.schedule, sizes, has_budget=picked.has_budget),
        order=tuple(graph.nodes[i].name for i in offer.schedule.events),
        phases=offer.schedule.phases,
        peak=_peak(graph, offer.simulation, sizes, peak, storages.executor.name),
        budget_bytes=picked.budget_bytes,
        peak_without_recompute_bytes=picked.without_recompute_bytes,
        planner=offer.planner,
        graph=describe_graph(graph, sizes.forms.text_of if sizes.symbols else None),
        key=key,
        shares=picked.shares,
        symbols=describe(sizes),
        forward_seconds=sum(problem.costs.run_ticks[i] for i in offer.schedule.forward) / TICKS_PER_SECOND,
        extra_seconds=offer.extra_ticks / TICKS_PER_SECOND,
        least_extra_seconds=None if picked.least_ticks is None else picked.least_ticks / TICKS_PER_SECOND,
    )
    return Chosen(plan, offer.schedule)


def _peak(
    graph: JointGraph, simulation: Simulation, sizes: Sizes, terms: PeakTerms | None, executor: str
) -> PredictedPeak:
    if not simulation.order:
        return PredictedPeak(0, "", in_forward=True, source="", alive=(), executor=executor)
    moment = simulation.peak_moment
    node = graph.nodes[simulation.order[moment]]
    alive = simulation.alive_at(moment)[:NUM_ALIVE]
    return PredictedPeak(
        num_bytes=simulation.peak_bytes,
        node=node.name,
        in_forward=moment < simulation.num_forward,
        source=source_line(node.stack_trace or ""),
        alive=tuple((graph.nodes[memory.node].name, memory.num_bytes) for memory in alive),
        executor=executor,
        expression=(terms or peak_terms(simulation, sizes)).text() if sizes.symbols else "",
    )


def decisions_of(problem: FlowProblem, schedule: Schedule, sizes: Sizes, *, has_budget: bool) -> tuple[Decision, ...]:
    """Say for every value that backward uses what a schedule does with it, and why, in graph order."""
    repeats = Counter(schedule.events)
    received = _received_values(problem, schedule)
    rows = [(v, i) for v, i in enumerate(problem.bases) if v in received or repeats[i]]
    expressions = _byte_expressions(problem.graph, [i for _, i in rows], sizes)
    reasons = _Reasons(problem, _BudgetReasons(problem, schedule) if has_budget else None)
    return tuple([_decision(problem, v, v in received, repeats, expressions, reasons) for v, _ in rows])


def _byte_expressions(graph: JointGraph, positions: Sequence[int], sizes: Sizes) -> dict[int, str]:
    """The bytes of nodes' results in terms of symbols, for those that depend on any."""
    if not sizes.symbols:
        return {}
    tensors = ((i, tensor_of(graph.nodes[i])) for i in positions)
    numbers = {i: sizes.size_number(tensor) for i, tensor in tensors if tensor is not None}
    texts = {number: terms_text(sizes.table[number]) for number in dict.fromkeys(numbers.values())}
    return {i: texts[number] for i, number in numbers.items()}


def _received_values(problem: FlowProblem, schedule: Schedule) -> Collection[int]:
    """Values that forward hands over, also those of which backward reads a view only."""
    return {problem.value_of[i] for i in schedule.received if i in problem.value_of}


def _decision(
    problem: FlowProblem,
    v: int,
    is_saved: bool,
    repeats: Mapping[int, int],
    expressions: Mapping[int, str],
    reasons: _Reasons,
) -> Decision:
    i = problem.bases[v]
    node, facts, costs = problem.graph.nodes[i], problem.graph.facts[i], problem.costs
    return Decision(
        value=node.name,
        op=str(node.target),
        action=_action(node, is_saved),
        reason=reasons.of(v, is_saved),
        num_bytes=costs.num_bytes[i],
        expression=expressions.get(i, ""),
        save_seconds=costs.save_ticks[i] / TICKS_PER_SECOND,
        recompute_seconds=costs.recompute_ticks[i] / TICKS_PER_SECOND,
        num_recomputes=repeats[i],
        source=source_line(node.stack_trace or ""),
        module=path_of_node(node),
        is_view=facts is not None and facts.is_view,
        **region_fields(node),
    )


def _action(node: fx.Node, is_saved: bool) -> Action:
    if not is_saved:
        return Action.RECOMPUTE
    return Action.OFFLOAD if is_offloaded(node) else Action.SAVE


class _BudgetReasons:
    """What a plan for a budget does against the prices."""

    def __init__(self, problem: FlowProblem, schedule: Schedule) -> None:
        self.problem, graph = problem, problem.graph
        self.kept_anyway = frozenset(problem.saved(problem.cheapest))
        """What is kept without a budget, too."""
        results = [graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)]
        self.runs = Runs.of(schedule.events, graph.inputs.__getitem__, self._base_of, results)

    def _base_of(self, i: int) -> int | None:
        v = self.problem.value_of.get(i)
        return None if v is None else self.problem.bases[v]

    def is_dearer(self, i: int) -> bool:
        """True if keeping a recomputed value would take less time, all else being as it is."""
        costs = self.problem.costs
        left = costs.save_ticks[i]
        for freed in self.runs.freed_by_keeping(i):
            left -= (costs.recompute_ticks if freed.is_run else costs.save_ticks)[freed.node]
            if left < 0:
                return True
        return False


@dataclass(frozen=True, slots=True, eq=False)
class _Reasons:
    """Says why values are kept or recomputed."""

    problem: FlowProblem
    budget: _BudgetReasons | None
    """None if the schedule is the cheapest cut."""

    def of(self, v: int, is_saved: bool) -> Reason:
        """Say why one value is."""
        constraint = self.problem.constraint(v)
        if constraint.prefers is not None and constraint.no_save is None and constraint.no_recompute is None:
            if is_saved:
                return constraint.prefers if constraint.prefers is Reason.POLICY_SAVE else Reason.AGAINST_RECOMPUTE
            return constraint.prefers if constraint.prefers is Reason.POLICY_RECOMPUTE else Reason.AGAINST_SAVE
        if is_saved:
            return constraint.no_recompute or self._why_saved(self.problem.bases[v])
        return constraint.no_save or self._why_recomputed(self.problem.bases[v])

    def _why_saved(self, i: int) -> Reason:
        is_on_cut = self.budget is None or i in self.budget.kept_anyway
        return Reason.ON_CUT if is_on_cut else Reason.ON_FOR_BUDGET

    def _why_recomputed(self, i: int) -> Reason:
        if base_is_viewed(self.problem.graph, i):
            return Reason.VIEW
        if self.problem.graph.roles[i] is Role.EITHER:
            return Reason.BACKWARD_ONLY
        return Reason.OFF_FOR_BUDGET if self.budget is not None and self.budget.is_dearer(i) else Reason.OFF_CUT
