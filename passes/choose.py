"""From prices and constraints to a plan: set up the flow problem, cut it, write down what was decided and why.

A view costs nothing to make again and keeps its base's storage alive, so no minimum cut can gain from saving it
instead of its base: views are joined to their bases before the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.fx as fx

from .constraints import Constraint, Constraints, Reason, base_is_viewed, explain_policy
from .cost import TICKS_PER_SECOND, Costs
from .errors import InfeasibleCut
from .joint_graph import JointGraph, Role
from .min_cut import FORBIDDEN, Choice, Contradiction, Cut, Value, solve
from .offload import is_offloaded
from .plan import Action, Decision, Plan, module_path, source_line
from .region_tag import region_fields


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A plan with the node positions that extraction needs."""

    plan: Plan
    saved: tuple[int, ...]
    """Values that forward hands to backward, in graph order; inputs are not among them."""


def choose_plan(graph: JointGraph, constraints: Constraints, costs: Costs, key: str) -> Chosen:
    """Pick the cheapest legal set of saved values."""
    members = _join_views(graph, constraints)
    values = _as_values(graph, constraints, costs, members)
    try:
        cut = solve(values)
    except Contradiction as contradiction:
        raise InfeasibleCut(_explain(graph, constraints, members.bases, contradiction)) from None
    saved = tuple(i for i, choice in zip(members.bases, cut.choices, strict=True) if choice is Choice.SAVE)
    plan = Plan(_decisions(graph, constraints, costs, members.bases, cut), num_nodes=len(graph.nodes), key=key)
    return Chosen(plan, saved)


# -------------------------------------------------------------------------------------------------- the flow problem


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """Which node stands for which value of the flow problem."""

    bases: tuple[int, ...]
    """Per value, the node that computes it."""
    value_of: dict[int, int]
    """Node position to value; nodes that backward has anyway are missing."""


def _join_views(graph: JointGraph, constraints: Constraints) -> _Members:
    bases: list[int] = []
    value_of: dict[int, int] = {}
    for i, constraint in enumerate(constraints.of):
        if constraint is None or constraint.is_free:
            continue
        base = _joined_base(graph, constraints, i, constraint)
        if base is not None and base in value_of:
            value_of[i] = value_of[base]
        else:
            value_of[i] = len(bases)
            bases.append(i)
    return _Members(tuple(bases), value_of)


def _joined_base(graph: JointGraph, constraints: Constraints, i: int, constraint: Constraint) -> int | None:
    """The value a view is joined to, if it is a view that nobody constrained."""
    if not base_is_viewed(graph, i) or i in constraints.saved_by_copy:
        return None
    if constraint.no_recompute is not None or constraint.no_save not in (None, Reason.NOT_A_TENSOR):
        return None
    base = graph.inputs[i][0]
    base_constraint = constraints.of[base]
    if base_constraint is None or base_constraint.no_save not in (None, Reason.NOT_A_TENSOR):
        return None
    # The list that `split` returns is not a tensor, but its parts lead through it to the tensor that was split.
    return base if base_constraint.no_save is None or base_is_viewed(graph, base) else None


def _as_values(graph: JointGraph, constraints: Constraints, costs: Costs, members: _Members) -> list[Value]:
    needed = {members.value_of[i] for i in graph.needed if i in members.value_of}
    values = []
    for v, i in enumerate(members.bases):
        constraint = constraints.of[i]
        assert constraint is not None
        inputs = dict.fromkeys(members.value_of[j] for j in graph.inputs[i] if j in members.value_of)
        values.append(
            Value(
                save_price=FORBIDDEN if constraint.no_save else costs.save_ticks[i],
                recompute_price=FORBIDDEN if constraint.no_recompute else costs.recompute_ticks[i],
                inputs=tuple(inputs),
                needed=v in needed,
            )
        )
    return values


# -------------------------------------------------------------------------------------------------- reasons


def _decisions(
    graph: JointGraph, constraints: Constraints, costs: Costs, bases: Sequence[int], cut: Cut
) -> tuple[Decision, ...]:
    return tuple(
        _decision(graph, constraints, costs, i, choice)
        for i, choice in zip(bases, cut.choices, strict=True)
        if choice is not Choice.UNUSED
    )


def _decision(graph: JointGraph, constraints: Constraints, costs: Costs, i: int, choice: Choice) -> Decision:
    node = graph.nodes[i]
    return Decision(
        value=node.name,
        op=str(node.target),
        action=_action(node, choice),
        reason=_reason(graph, constraints, i, choice),
        num_bytes=costs.num_bytes[i],
        save_seconds=costs.save_ticks[i] / TICKS_PER_SECOND,
        recompute_seconds=costs.recompute_ticks[i] / TICKS_PER_SECOND,
        source=source_line(node.stack_trace or ""),
        module=module_path(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")),
        **region_fields(node),
    )


def _action(node: fx.Node, choice: Choice) -> Action:
    if choice is not Choice.SAVE:
        return Action.RECOMPUTE
    return Action.OFFLOAD if is_offloaded(node) else Action.SAVE


def _reason(graph: JointGraph, constraints: Constraints, i: int, choice: Choice) -> Reason:
    constraint = constraints.of[i]
    assert constraint is not None
    if choice is Choice.SAVE:
        return constraint.no_recompute or Reason.ON_CUT
    if constraint.no_save is not None:
        return constraint.no_save
    if base_is_viewed(graph, i):
        return Reason.VIEW
    return Reason.BACKWARD_ONLY if graph.roles[i] is Role.EITHER else Reason.OFF_CUT


def _explain(graph: JointGraph, constraints: Constraints, bases: Sequence[int], found: Contradiction) -> str:
    """Say which value is stuck, the two causes, and on whose behalf it is needed."""
    i = bases[found.value]
    node, constraint = graph.nodes[i], constraints.of[i]
    assert constraint is not None and constraint.no_save is not None and constraint.no_recompute is not None
    lines = [
        f"`{node.name}` ({node.target}) is needed by backward but may be neither saved nor recomputed:",
        f"  - not saved: {constraint.no_save.value}",
        f"  - not recomputed: {constraint.no_recompute.value}",
    ]
    if found.chain:
        lines.append("it is needed to recompute " + ", ".join(f"`{graph.nodes[bases[v]].name}`" for v in found.chain))
    asked, source = explain_policy(node), source_line(node.stack_trace or "")
    if asked:
        lines.append(asked)
    if source:
        lines.append(f"at {source}")
    lines.append(
        "Let the policy save this op (or what is computed from it), or take the op out of the checkpointed region."
    )
    return "\n".join(lines)
