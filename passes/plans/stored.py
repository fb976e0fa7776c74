"""Apply a stored plan: check that it was made for this graph, and turn it back into an order of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx

from ..graph.constraints import Constraints
from ..graph.joint_graph import JointGraph, describe_graph
from ..graph.region_tag import region_of
from ..memory.schedule import Schedule, Scheduler
from ..memory.storage import Storages
from ..search.problem import FlowProblem
from ..shared.errors import PlanMismatch
from ..sizes.expressions import is_true, to_sympy
from ..sizes.symbols import Sizes
from .plan import Plan
from .stored_check import check_stored, damage, is_kept, name_of, num_common, values_of
from .write_plan import Chosen

EXECUTORS = {"inductor": "inductor", "node by node": 'ops that run node by node, as with inner="aot_eager"'}
"""What runs a plan, for messages."""

MOST_NAMED = 3
"""How many regions an error names."""


def apply_plan(problem: FlowProblem, stored: Sequence[Plan], storages: Storages, key: str) -> Chosen:
    """Apply the one of the stored plans that was made for this graph; `key` is that of plans that are made now."""
    sizes = storages.sizes
    found = describe_graph(problem.graph)
    fitting = [plan for plan in stored if plan.graph == found]
    if not fitting:
        closest = max(stored, key=lambda plan: num_common(plan.graph, found))
        raise PlanMismatch(_difference(closest, problem.graph, found, storages, len(stored)))
    # One plan is applied at all sizes; of several, each in the range of sizes that it was made for.
    covering = next((plan for plan in fitting if _covers(plan, sizes)), None) if len(fitting) > 1 else None
    plan = covering or fitting[0]
    schedule = schedule_from(plan, problem.graph, problem.constraints)
    check_stored(plan, schedule, problem, storages, key)
    return Chosen(plan, schedule, () if covering is None else _guards(plan, sizes))


def _covers(plan: Plan, sizes: Sizes) -> bool:
    """True if a plan's guards hold at the sizes of the example."""
    values = values_of(sizes)
    try:
        return all(is_true(guard, values) for guard in plan.guards)
    except ValueError as error:
        raise PlanMismatch(damage(plan, f"guards say nothing of this graph's sizes: {error}")) from error


def _guards(plan: Plan, sizes: Sizes) -> tuple[Any, ...]:
    symbols = {symbol.name: symbol for symbol in sizes.symbols}
    return tuple(to_sympy(guard, symbols) for guard in plan.guards)


def schedule_from(plan: Plan, graph: JointGraph, constraints: Constraints) -> Schedule:
    """The schedule that a plan for this graph describes."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    named = [(f"order[{k}]", name) for k, name in enumerate(plan.order)]
    named += [(f"decisions[{k}].value", decision.value) for k, decision in enumerate(plan.decisions)]
    unknown = next(((place, name) for place, name in named if name not in position), None)
    if unknown is not None:
        raise PlanMismatch(damage(plan, f"{unknown[0]} is `{unknown[1]}`, which its graph has not"))
    writer = Scheduler(graph, constraints).writer([position[d.value] for d in plan.decisions if is_kept(d)])
    for name in plan.order:
        writer.run_again(position[name])
    for root in (graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)):
        writer.run(root)
    return replace(writer.finish(), phases=plan.phases)


# -------------------------------------------------------------------------------------------------- other graphs


def _difference(closest: Plan, graph: JointGraph, found: Sequence[str], storages: Storages, num_plans: int) -> str:
    """Say what a graph has that the closest plan's has not, and the likeliest cause first."""
    number = num_common(closest.graph, found)
    nodes = [lines[number] if number < len(lines) else "(no more nodes)" for lines in (closest.graph, found)]
    which = f"{name_of(closest)} was" if num_plans == 1 else f"all {num_plans} plans were"
    file = f" ({closest.file!r})" if closest.file else ""
    lines = [
        *_causes(closest, graph, storages),
        f"{which} made for another graph; the first difference{'' if num_plans == 1 else f' of the closest{file}'} is "
        f"at node {number}:",
        f"  plan   {nodes[0]}",
        f"  graph  {nodes[1]}",
        f"The plan's graph has {_counted(closest.graph)}, this one {_counted(found)}.",
        "Plan again for this graph: shapes, dtypes, the model's code and the version of torch all count.",
    ]
    return "\n".join(lines)


def _counted(lines: Sequence[str]) -> str:
    return f"{len(lines)} nodes ({sum(' = placeholder(' in line for line in lines)} of them inputs)"


def _causes(plan: Plan, graph: JointGraph, storages: Storages) -> Iterator[str]:
    """Why a plan may be for another graph although the model is the same."""
    name = name_of(plan)
    executor = "inductor" if any(storages.is_fused) else "node by node"
    if plan.peak.executor != executor:
        yield (
            f"{name} was made for {EXECUTORS.get(plan.peak.executor, plan.peak.executor)}; here {EXECUTORS[executor]} "
            f"{'runs' if executor == 'inductor' else 'run'} the graph, which has other ops then. Make plan and program "
            "with the same `inner`."
        )
    planned, here = sorted(_regions_of(plan)), sorted(_regions_in(graph))
    if here and not planned:
        yield f"{name} was made without regions, and this model has some: {_listed(here)}."
    elif planned and not here:
        yield f"{name} was made for a model with regions ({_listed(planned)}), and this one has none."


def _regions_of(plan: Plan) -> set[str]:
    """The outermost regions that a plan speaks of."""
    paths = [*(decision.region for decision in plan.decisions), *(share.path for share in plan.shares)]
    return {path.partition("/")[0] for path in paths if path}


def _regions_in(graph: JointGraph) -> set[str]:
    found = (region_of(node) for node in graph.nodes)
    return {region.path.partition("/")[0] for region in found if region is not None}


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(f"`{name}`" for name in names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
