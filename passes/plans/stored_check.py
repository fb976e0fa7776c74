"""A stored plan does what it says: files are edited and damaged, so nothing that one says is taken on trust.

The schedule that a plan's order makes must be one of this graph, keep and recompute what the plan's decisions say, and
have the peak that the plan states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ..graph.constraints import find_constraints
from ..graph.joint_graph import FORWARD_SIDE, JointGraph
from ..memory.legal import verify_schedule
from ..memory.schedule import Schedule
from ..memory.simulate import simulate
from ..memory.storage import Storages, find_storages
from ..search.problem import FlowProblem
from ..shared.errors import PlanMismatch, VerificationError
from ..sizes.expressions import evaluate
from ..sizes.symbols import Sizes
from .plan import Action, Decision, Plan
from .write_plan import decisions_of

ESTIMATE = 1.5
"""By what factor the peak of a plan for inductor may differ from the one that it states: what is predicted for a
compiler depends on the device, and the plan may have been made for another one."""


def check_stored(plan: Plan, schedule: Schedule, problem: FlowProblem, storages: Storages, key: str) -> None:
    """Raise what names the first thing that a plan says and the schedule of its order does not do.

    `key` is that of plans that are made now.
    """
    values = values_of(storages.sizes)
    wrong = next(_oddities(plan, schedule, problem, values), None)
    if wrong is not None:
        raise PlanMismatch(damage(plan, wrong))
    try:
        verify_schedule(problem.graph, problem.constraints, schedule)
    except VerificationError as error:
        raise PlanMismatch(
            f"{name_of(plan)} breaks a rule of this graph: {error}\nEither the model's policies are not those that it "
            "was made under, or the file was edited or damaged: make the plan anew."
        ) from error
    _check_peak(plan, schedule, problem.graph, storages, key)


def name_of(plan: Plan) -> str:
    """A plan in a sentence."""
    return f"the plan in {plan.file!r}" if plan.file else "this plan"


def damage(plan: Plan, wrong: str) -> str:
    """An error for a plan that contradicts itself or its graph."""
    return (
        f"{name_of(plan)} is damaged: {wrong}.\nThe file was edited or damaged, or the plan changed in memory; make "
        "the plan anew."
    )


def is_kept(decision: Decision) -> bool:
    """True for what waits for backward, in whatever memory."""
    return decision.action is not Action.RECOMPUTE


def values_of(sizes: Sizes) -> dict[str, int]:
    """What the symbols of a graph stand for, by name."""
    return {symbol.name: value for symbol, value in sizes.values.items()}


def num_common(expected: Sequence[str], actual: Sequence[str]) -> int:
    """How many entries two lists have in common before they differ."""
    pairs = zip(expected, actual, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))


def _oddities(plan: Plan, schedule: Schedule, problem: FlowProblem, values: Mapping[str, int]) -> Iterator[str]:
    """What does not fit together, in words that name the field."""
    yield from _of_order(plan, schedule, problem)
    yield from _of_phases(plan)
    wrong = next(_of_decisions(plan, schedule, problem, values), None)
    if wrong is not None:
        # Without a budget a policy's preferences bind, and views that one speaks of are values of their own.
        bound = FlowProblem.build(problem.graph, find_constraints(problem.graph), problem.costs)
        if next(_of_decisions(plan, schedule, bound, values), None) is not None:
            yield wrong


def _of_order(plan: Plan, schedule: Schedule, problem: FlowProblem) -> Iterator[str]:
    graph, constraints = problem.graph, problem.constraints
    made = [graph.nodes[i].name for i in schedule.events]
    number = num_common(plan.order, made)
    if number < len(made):  # which is never shorter
        found = f"order[{number}] is `{plan.order[number]}`" if number < len(plan.order) else "order ends"
        yield f"{found} where, by decisions and what comes later in order, `{made[number]}` has to run"
    own, seen = frozenset(graph.backward_order), set[int]()
    for k, i in enumerate(schedule.events):
        constraint = constraints.of[i]
        is_forward = graph.roles[i] in FORWARD_SIDE
        if (constraint is not None and constraint.is_free) or (not is_forward and i not in own):
            yield f"order[{k}] is `{made[k]}`, which is no op of backward's"
        if i in seen and not is_forward:
            yield f"order[{k}] is `{made[k]}` again, but only values of forward may run again"
        seen.add(i)


def _of_phases(plan: Plan) -> Iterator[str]:
    for k, phase in enumerate(plan.phases):
        if phase > len(plan.order):
            yield f"phases[{k}] is {phase}, but order has {len(plan.order)} entries"
    for k, (first, second) in enumerate(pairwise(plan.phases), start=1):
        if first >= second:
            yield f"phases[{k}] is {second}, which is not above phases[{k - 1}], {first}"
    boundaries, latest, phase = frozenset(plan.phases), dict[str, int](), 0
    for k, name in enumerate(plan.order):
        phase += k in boundaries
        if latest.get(name) == phase:
            yield f"phases has nothing between order[{k}], `{name}`, and the copy of it that is there already"
        latest[name] = phase


def _of_decisions(plan: Plan, schedule: Schedule, problem: FlowProblem, values: Mapping[str, int]) -> Iterator[str]:
    expected = decisions_of(problem, schedule, Sizes.find(()), has_budget=False)  # whose reasons are not compared
    for k, (stated, made) in enumerate(zip(plan.decisions, expected, strict=False)):
        yield from (f"decisions[{k}].{wrong}" for wrong in _of_decision(stated, made, values))
    k = len(expected)
    if len(plan.decisions) > k:
        yield f"decisions[{k}].value is `{plan.decisions[k].value}`, of which order makes no use"
    if len(plan.decisions) < k:
        yield f"decisions ends without `{expected[len(plan.decisions)].value}`, of which order makes use"


def _of_decision(stated: Decision, made: Decision, values: Mapping[str, int]) -> Iterator[str]:
    """Where a decision is not what the order makes of the value."""
    if stated.value != made.value:
        yield f"value is `{stated.value}`, but the next value that order makes use of is `{made.value}`"
    if stated.op != made.op:
        yield f"op is {stated.op!r}, but `{made.value}` is computed by {made.op!r}"
    if stated.num_recomputes != made.num_recomputes:
        yield (f"num_recomputes is {stated.num_recomputes}, but order has `{made.value}` {made.num_recomputes} time(s)")
    if is_kept(stated) != is_kept(made):
        done = "is handed to backward" if is_kept(made) else "is not handed to backward"
        yield f"action is {stated.action.name}, but by order and decisions `{made.value}` {done}"
    # At other sizes than those of the plan bytes are known where there is an expression for them.
    if not values and stated.num_bytes != made.num_bytes:
        yield f"num_bytes is {stated.num_bytes}, but `{made.value}` has {made.num_bytes} bytes"


# -------------------------------------------------------------------------------------------------- the peak


def _check_peak(plan: Plan, schedule: Schedule, graph: JointGraph, storages: Storages, key: str) -> None:
    stated = _stated_bytes(plan, values_of(storages.sizes))
    found = simulate(graph, storages, schedule).peak_bytes
    if stated is None or found == stated or _version(plan.key) != _version(key):
        return  # other versions of remat may know more of what takes memory, or less
    is_fused = plan.peak.executor == "inductor"
    if is_fused and storages.workspace:
        return  # which depends on how many threads a machine has
    for overwrites in (False, True):
        other = find_storages(graph, fuses=is_fused, overwrites=overwrites and not is_fused, sizes=storages.sizes)
        simulated = simulate(graph, other, schedule).peak_bytes
        if simulated == stated or (is_fused and stated / ESTIMATE <= simulated <= stated * ESTIMATE):
            return
    raise PlanMismatch(
        f"{name_of(plan)} does not have the peak that it states: {stated} bytes, but its order takes {found} bytes.\n"
        "Either the tensors are laid out in memory in another way than those that it was made for, or the file was "
        "edited or damaged: make the plan anew."
    )


def _stated_bytes(plan: Plan, values: Mapping[str, int]) -> int | None:
    """The peak that a plan states for some sizes; None if it says nothing of those."""
    if plan.peak.expression:
        try:
            return evaluate(plan.peak.expression, values)
        except ValueError as error:
            raise PlanMismatch(damage(plan, f"peak.expression says nothing of this graph's sizes: {error}")) from error
    return plan.peak.num_bytes if {symbol.name: symbol.value for symbol in plan.symbols} == values else None


def _version(key: str) -> str:
    """The part of a key that says which version of remat made a plan."""
    return key.rpartition("-")[0]
