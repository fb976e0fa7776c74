"""Apply a stored plan: check that it was made for this graph and does what it says, and turn it into an order of nodes.

A file's digest tells edits and damage. What is checked here is what counts for the graph, whoever wrote the plan: the
schedule that its order makes breaks no rule, and has the peak that the plan states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx

from ..graph import Constraints, JointGraph, describe_graph, region_of
from ..memory import Schedule, Scheduler, Storages, find_storages, simulate, verify_schedule
from ..search import FlowProblem
from ..shared import Executor, PlanMismatch, VerificationError
from ..sizes import Sizes, evaluate, is_true, to_sympy
from .contents import Action
from .plan import Plan
from .write_plan import Chosen

EXECUTORS = {"inductor": "inductor", "node by node": 'ops that run node by node, as with inner="aot_eager"'}
"""What runs a plan, for messages."""

MOST_NAMED = 3
"""How many regions an error names."""

ESTIMATE = 1.5
"""By what factor the peak of a plan for inductor may differ from the one that it states: what is predicted for a
compiler depends on the device, and the plan may have been made for another one."""


def apply_plan(problem: FlowProblem, stored: Sequence[Plan], storages: Storages, key: str) -> Chosen:
    """Apply the one of the stored plans that was made for this graph; `key` is that of plans that are made now."""
    sizes = storages.sizes
    found = describe_graph(problem.graph)
    fitting = [plan for plan in stored if plan.graph == found]
    if not fitting:
        closest = max(stored, key=lambda plan: _num_common(plan.graph, found))
        raise PlanMismatch(_difference(closest, problem.graph, found, storages, len(stored)))
    # One plan is applied at all sizes; of several, each in the range of sizes that it was made for.
    covering = next((plan for plan in fitting if _covers(plan, sizes)), None) if len(fitting) > 1 else None
    plan = covering or fitting[0]
    schedule = schedule_from(plan, problem.graph, problem.constraints)
    try:
        verify_schedule(problem.graph, problem.constraints, schedule)
    except VerificationError as error:
        raise PlanMismatch(
            f"{_name_of(plan)} breaks a rule of this graph: {error}\nEither the model's policies are not those that "
            "it was made under, or the plan was changed: make it anew."
        ) from error
    _check_peak(plan, schedule, problem.graph, storages, key)
    return Chosen(plan, schedule, () if covering is None else _guards(plan, sizes))


def _covers(plan: Plan, sizes: Sizes) -> bool:
    """True if a plan's guards hold at the sizes of the example."""
    return all(is_true(guard, _values_of(sizes)) for guard in plan.guards)


def _guards(plan: Plan, sizes: Sizes) -> tuple[Any, ...]:
    symbols = {symbol.name: symbol for symbol in sizes.symbols}
    return tuple(to_sympy(guard, symbols) for guard in plan.guards)


def schedule_from(plan: Plan, graph: JointGraph, constraints: Constraints) -> Schedule:
    """The schedule that a plan for this graph describes."""
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    kept = [decision.value for decision in plan.decisions if decision.action is not Action.RECOMPUTE]
    unknown = next((name for name in (*kept, *plan.order) if name not in position), None)
    if unknown is not None:
        raise PlanMismatch(f"{_name_of(plan)} speaks of `{unknown}`, which its graph has not: make it anew.")
    writer = Scheduler(graph, constraints).writer([position[name] for name in kept])
    for name in plan.order:
        writer.run_again(position[name])
    for root in (graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)):
        writer.run(root)
    made = tuple([graph.nodes[i].name for i in writer.events])
    if made != plan.order:
        name = made[_num_common(made, plan.order)]  # what a writer adds makes its order the longer one
        raise PlanMismatch(f"{_name_of(plan)} has an order in which `{name}` is missing: make it anew.")
    return replace(writer.finish(), phases=plan.phases)


def _check_peak(plan: Plan, schedule: Schedule, graph: JointGraph, storages: Storages, key: str) -> None:
    stated = _stated_bytes(plan, storages.sizes)
    found = simulate(graph, storages, schedule).peak_bytes
    if stated is None or found == stated or _version(plan.key) != _version(key):
        return  # other versions of remat may know more of what takes memory, or less
    is_fused = plan.peak.executor == "inductor"
    if is_fused and storages.workspace:
        return  # which depends on how many threads a machine has
    for overwrites in (False, True):
        other = find_storages(graph, Executor(is_fused, overwrites and not is_fused), storages.sizes)
        simulated = simulate(graph, other, schedule).peak_bytes
        if simulated == stated or (is_fused and stated / ESTIMATE <= simulated <= stated * ESTIMATE):
            return
    raise PlanMismatch(
        f"{_name_of(plan)} does not have the peak that it states: {stated} bytes, but its order takes {found} bytes.\n"
        "Either the tensors are laid out in memory in another way than those that it was made for, or the plan was "
        "changed: make it anew."
    )


def _stated_bytes(plan: Plan, sizes: Sizes) -> int | None:
    """The peak that a plan states for some sizes; None if it says nothing of those."""
    values = _values_of(sizes)
    if plan.peak.expression:
        return evaluate(plan.peak.expression, values)
    return plan.peak.num_bytes if {symbol.name: symbol.value for symbol in plan.symbols} == values else None


def _version(key: str) -> str:
    """The part of a key that says which version of remat made a plan."""
    return key.rpartition("-")[0]


def _name_of(plan: Plan) -> str:
    """A plan in a sentence."""
    return f"the plan in {plan.file!r}" if plan.file else "this plan"


def _values_of(sizes: Sizes) -> dict[str, int]:
    """What the symbols of a graph stand for, by name."""
    return {symbol.name: value for symbol, value in sizes.values.items()}


def _num_common(expected: Sequence[str], actual: Sequence[str]) -> int:
    """How many entries two lists have in common before they differ."""
    pairs = zip(expected, actual, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))


# -------------------------------------------------------------------------------------------------- other graphs


def _difference(closest: Plan, graph: JointGraph, found: Sequence[str], storages: Storages, num_plans: int) -> str:
    """Say what a graph has that the closest plan's has not, and the likeliest cause first."""
    number = _num_common(closest.graph, found)
    nodes = [lines[number] if number < len(lines) else "(no more nodes)" for lines in (closest.graph, found)]
    which = f"{_name_of(closest)} was" if num_plans == 1 else f"all {num_plans} plans were"
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
    name = _name_of(plan)
    executor = storages.executor.name
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
