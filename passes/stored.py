"""Apply a stored plan: check that it was made for this graph, and turn it back into an order of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx

from .choose import Chosen
from .constraints import Constraints
from .errors import PlanMismatch
from .expressions import is_true, to_sympy
from .flow import FlowProblem
from .joint_graph import JointGraph, describe_graph
from .plan import Plan
from .schedule import Schedule, Scheduler
from .symbols import Sizes


def apply_plan(problem: FlowProblem, stored: Sequence[Plan], sizes: Sizes) -> Chosen:
    """Apply the one of the stored plans that was made for this graph."""
    found = describe_graph(problem.graph)
    fitting = [plan for plan in stored if plan.graph == found]
    plan = next((plan for plan in fitting if _covers(plan, sizes)), fitting[0] if fitting else None)
    if plan is None:
        closest = max(stored, key=lambda plan: _num_common(plan.graph, found))
        raise PlanMismatch(_difference(closest.graph, found, len(stored)))
    # One plan is applied at all sizes; of several, each in the range of sizes that it was made for.
    guards = _guards(plan, sizes) if len(fitting) > 1 and _covers(plan, sizes) else ()
    return Chosen(plan, schedule_from(plan, problem.graph, problem.constraints), guards)


def _covers(plan: Plan, sizes: Sizes) -> bool:
    """True if a plan's guards hold at the sizes of the example."""
    values = {symbol.name: value for symbol, value in sizes.values.items()}
    return all(is_true(guard, values) for guard in plan.guards)


def _guards(plan: Plan, sizes: Sizes) -> tuple[Any, ...]:
    symbols = {symbol.name: symbol for symbol in sizes.symbols}
    return tuple(to_sympy(guard, symbols) for guard in plan.guards)


def schedule_from(plan: Plan, graph: JointGraph, constraints: Constraints) -> Schedule:
    """The schedule that a plan for this graph describes."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    unknown = [name for name in plan.order if name not in position]
    if unknown:
        raise PlanMismatch(f"this plan is damaged: its order has `{unknown[0]}`, which its graph has not")
    saved = [position[d.value] for d in plan.saved if d.value in position]
    writer = Scheduler(graph, constraints).writer(saved)
    for name in plan.order:
        writer.run_again(position[name])
    for root in (graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)):
        writer.run(root)
    return replace(writer.finish(), phases=plan.phases)


def _num_common(expected: Sequence[str], actual: Sequence[str]) -> int:
    """How many nodes two graphs have in common before they differ."""
    pairs = zip(expected, actual, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))


def _difference(expected: Sequence[str], actual: Sequence[str], num_plans: int) -> str:
    number = _num_common(expected, actual)
    nodes = [graph[number] if number < len(graph) else "(no more nodes)" for graph in (expected, actual)]
    which = "this plan was" if num_plans == 1 else f"all {num_plans} plans were"
    return (
        f"{which} made for another graph; the first difference{' of the closest' if num_plans > 1 else ''} is at "
        f"node {number}:\n  plan   {nodes[0]}\n  graph  {nodes[1]}\n"
        "Plan again for this graph: shapes, dtypes, the model's code and the version of torch all count."
    )
