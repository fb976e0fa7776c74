"""What may be done with each forward value: may it be saved, may it be recomputed, and if not, why not.

Everything the contract forbids is a constraint here, so that the planners need to know prices only and cannot choose
something illegal.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ..ops import facts_of
from ..shared import OFFLOADS, PREFERENCES, RECOMPUTES, PolicyError, source_line
from ..torch_private import FakeScriptObject, InputMutationAOTOutput, OpOverload, is_sym_node
from .joint_graph import FORWARD_SIDE, JointGraph, Role, output_descriptors, subgraphs_of, tensor_of, whole_descriptor
from .region_tag import REGION_TAG, budgets_around, is_port, policy_of, region_of, region_of_formula


class Reason(Enum):
    """Why a value got its action; the text is what errors and dumps print."""

    ON_CUT = "on the cheapest cut"
    OFF_CUT = "cheaper to recompute than to keep"
    ON_FOR_BUDGET = "kept by the plan that was made for the budget"
    OFF_FOR_BUDGET = "recomputed to keep within the budget"
    BACKWARD_ONLY = "only backward needs it"
    VIEW = "a view of another value"
    NOT_A_TENSOR = "not a tensor; its parts are saved instead"
    POLICY_SAVE = "policy says save"
    POLICY_RECOMPUTE = "policy says recompute"
    AGAINST_SAVE = "the policy would rather save it, but the budget is short"
    AGAINST_RECOMPUTE = "the policy would rather recompute it, but that costs more than the budget asks for"
    POLICY_OFFLOAD = "policy says offload"
    REGION_OUTPUT = "leaves its region; the outside needs it"
    HOLDS_SEED = "holds the random seed that recomputation replays"
    COLLECTIVE = "collective op, runs once"
    PENDING_COLLECTIVE = "result of a collective that has not been waited for"
    EFFECTFUL = "effectful op, runs once"
    MUTATING = "writes to one of its arguments, runs once"
    READS_WRITTEN = "reads memory that the graph writes in place"
    MUTATED_INPUT = "an input that forward overwrites; backward gets a copy of the old data"
    DISCRETE = "chooses among elements, and a last-bit difference would choose others"
    DATA_DEPENDENT = "its size or number depends on data"
    NO_DEVICE = "draws random numbers, and the call does not say on which device"
    LAYOUT = "a view by absolute strides, which a copy of its base may not have"
    UNKNOWN_OPERATOR = "higher-order op that is not known to be free of effects"
    EXPLICIT_GENERATOR = "draws from an explicit generator, whose state is not replayed"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What may be done with one value; a reason where it may not."""

    no_save: Reason | None = None
    no_recompute: Reason | None = None
    is_free: bool = False
    """Backward has it anyway: nothing to decide."""
    prefers: Reason | None = None
    """What a policy would like, POLICY_SAVE or POLICY_RECOMPUTE, where a budget may overrule it."""


FREE = Constraint(is_free=True)
OPEN = Constraint()


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """One constraint per forward-side node."""

    of: tuple[Constraint | None, ...]
    """By node position; None for nodes that are not forward values."""
    saved_by_copy: frozenset[int]
    """Inputs that forward overwrites, and their views: to save one is to save a copy of the old data."""


def find_constraints(graph: JointGraph, *, preferences_bind: bool = True) -> Constraints:
    """Find what may be done with each value on the forward side.

    Without a budget a policy's preferences are as good as orders; with one, on the graph (`preferences_bind=False`) or
    on a region around the op, they are prices.
    """
    tainted = _aliases_of(graph, _mutated_inputs(graph))
    written = (_written_in_place(graph) - tainted) | _written_within_backward(graph)
    found: list[Constraint | None] = []
    for i, role in enumerate(graph.roles):
        binds = preferences_bind and not budgets_around(graph.nodes[i])
        found.append(_constraint(graph, i, tainted, written, found, binds) if role in FORWARD_SIDE else None)
    return Constraints(of=tuple(found), saved_by_copy=frozenset(tainted))


def _constraint(
    graph: JointGraph,
    i: int,
    tainted: set[int],
    written: set[int],
    found: Sequence[Constraint | None],
    preferences_bind: bool,
) -> Constraint:
    node = graph.nodes[i]
    if node.op == "get_attr" or is_sym_node(node):
        return FREE
    if node.op == "placeholder":
        return Constraint(no_recompute=Reason.MUTATED_INPUT) if i in tainted else FREE
    no_recompute = _cannot_recompute(graph, i, tainted, written, found)
    by_nature = Constraint(no_save=_cannot_save(graph, i), no_recompute=no_recompute)
    if not preferences_bind and policy_of(node) in PREFERENCES and not is_port(node):
        liked = Reason.POLICY_RECOMPUTE if policy_of(node) in RECOMPUTES else Reason.POLICY_SAVE
        return replace(by_nature, prefers=liked)
    return _under_policy(graph, i, by_nature, found, preferences_bind)


def _cannot_save(graph: JointGraph, i: int) -> Reason | None:
    node, op = graph.nodes[i], graph.facts[i]
    if tensor_of(node) is None and not isinstance(node.meta.get("val"), FakeScriptObject):
        return Reason.NOT_A_TENSOR
    if op is not None and op.is_collective and any(_is_wait(user) for user in node.users):
        return Reason.PENDING_COLLECTIVE
    return None


def _cannot_recompute(
    graph: JointGraph, i: int, tainted: set[int], written: set[int], found: Sequence[Constraint | None]
) -> Reason | None:
    node, op = graph.nodes[i], graph.facts[i]
    assert op is not None
    if node.target is operator.getitem:
        whole = found[graph.inputs[i][0]]
        return None if whole is None else whole.no_recompute
    checks = (
        (op.draws_seed, Reason.HOLDS_SEED),
        (op.is_collective, Reason.COLLECTIVE),
        (op.is_effectful or (op.has_body and _body_is_impure(graph, node)), Reason.EFFECTFUL),
        (op.is_unknown, Reason.UNKNOWN_OPERATOR),
        (op.is_mutating, Reason.MUTATING),
        (op.reads_data or "unbacked_bindings" in node.meta, Reason.DATA_DEPENDENT),
        (any(j in written for j in graph.inputs[i]), Reason.READS_WRITTEN),
        (op.is_random and _has_generator(node), Reason.EXPLICIT_GENERATOR),
        (op.is_random and not _has_device(node), Reason.NO_DEVICE),
        (base_is_viewed(graph, i) and _reads_layout(graph, i, tainted), Reason.LAYOUT),
        (op.is_discrete and _runs_twice(graph, i), Reason.DISCRETE),
    )
    return next((reason for holds, reason in checks if holds), None)


def _runs_twice(graph: JointGraph, i: int) -> bool:
    """True if recomputing would repeat what forward did, and nobody insists on that."""
    return graph.roles[i] is Role.FORWARD and policy_of(graph.nodes[i]) is not CheckpointPolicy.MUST_RECOMPUTE


def _reads_layout(graph: JointGraph, i: int, tainted: set[int]) -> bool:
    """True for a view by absolute strides of memory that backward would have only in another layout."""
    is_absolute = graph.nodes[i].target is torch.ops.aten.as_strided.default
    base = base_of(graph, i)
    return is_absolute and (base in tainted or graph.roles[base] is not Role.INPUT)


# -------------------------------------------------------------------------------------------------- policies


def _under_policy(
    graph: JointGraph, i: int, by_nature: Constraint, found: Sequence[Constraint | None], preferences_bind: bool
) -> Constraint:
    """Add what the region's policy asks for. PREFER_RECOMPUTE yields where an op cannot be run again."""
    node, policy = graph.nodes[i], policy_of(graph.nodes[i])
    if is_port(node):
        kept_anyway = (base := found[graph.inputs[i][0]]) is not None and base.no_save is None
        return by_nature if kept_anyway else replace(by_nature, no_recompute=Reason.REGION_OUTPUT)
    if policy is None:
        return _of_formula(graph, i, by_nature, found, preferences_bind)
    if policy is CheckpointPolicy.MUST_RECOMPUTE:
        if by_nature.no_recompute in _RUN_ONCE and region_of(node) is not None:
            raise _contradiction(node, by_nature.no_recompute)
        return replace(by_nature, no_save=by_nature.no_save or Reason.POLICY_RECOMPUTE)
    if policy is not CheckpointPolicy.PREFER_RECOMPUTE:
        return _kept(graph, i, by_nature, policy, found)
    if by_nature.no_recompute is not None:
        return by_nature
    if region_of(node) is None and _leaves_region(node):
        return replace(by_nature, no_recompute=Reason.REGION_OUTPUT)
    return replace(by_nature, no_save=by_nature.no_save or Reason.POLICY_RECOMPUTE)


def _of_formula(
    graph: JointGraph, i: int, by_nature: Constraint, found: Sequence[Constraint | None], preferences_bind: bool
) -> Constraint:
    """Keep what only a backward formula needs out of forward, if the formula's op is in a region."""
    if graph.roles[i] is not Role.EITHER or by_nature.no_recompute is not None:
        return by_nature
    in_region = preferences_bind and region_of_formula(graph.nodes[i]) is not None
    asked = in_region or _reads_recomputed(graph, i, found)
    return replace(by_nature, no_save=by_nature.no_save or Reason.POLICY_RECOMPUTE) if asked else by_nature


def _kept(
    graph: JointGraph,
    i: int,
    by_nature: Constraint,
    policy: CheckpointPolicy,
    found: Sequence[Constraint | None],
) -> Constraint:
    """Save what a policy wants saved; a view of a saved value or of an input is there without that."""
    if base_is_viewed(graph, i) and by_nature.no_recompute is None:
        base = found[base_of(graph, i)]
        if base is not None and (base.is_free or base.no_recompute in (Reason.POLICY_SAVE, Reason.POLICY_OFFLOAD)):
            return by_nature
    reason = Reason.POLICY_OFFLOAD if policy in OFFLOADS else Reason.POLICY_SAVE
    return replace(by_nature, no_recompute=by_nature.no_recompute or reason)


def _contradiction(node: fx.Node, reason: Reason) -> PolicyError:
    return PolicyError(
        f"the policy{_asked_by(node)} says MUST_RECOMPUTE for `{node.name}` ({node.target}), which it cannot be: "
        f"{reason.value}. Return PREFER_RECOMPUTE for this op, or take it out of the region."
    )


def _asked_by(node: fx.Node) -> str:
    """Which policy, in which region, on which line, as far as it is known."""
    region, source = region_of(node), source_line(node.stack_trace or "")
    parts = [
        f" {region.policy} of region {region.path}" if region is not None else "",
        f" at {source}" if source else "",
    ]
    return "".join(parts)


def explain_policy(node: fx.Node) -> str:
    """Say whose answer holds for a node; nothing where no region of ours is around."""
    region, policy = region_of(node), policy_of(node)
    if region is None or policy is None:
        return ""
    return f"in region {region.path}, where the policy {region.policy or 'of a bare region'} says {policy.name}"


_RUN_ONCE = (Reason.COLLECTIVE, Reason.EFFECTFUL)


def _reads_recomputed(graph: JointGraph, i: int, found: Sequence[Constraint | None]) -> bool:
    """True for a value of a backward formula whose inputs a policy recomputes: keeping it would undo the policy."""
    inputs = [found[j] for j in graph.inputs[i]]
    return any(c is not None and c.no_save is Reason.POLICY_RECOMPUTE for c in inputs)


def _leaves_region(node: fx.Node) -> bool:
    """True if a later checkpointed region of torch's starts from this value, which then belongs to the outside."""
    region = node.meta.get(REGION_TAG)
    later = [user for user in node.users if policy_of(user) in RECOMPUTES]
    return region is not None and any(user.meta.get(REGION_TAG, region) > region for user in later)


# -------------------------------------------------------------------------------------------------- effects


def _is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and facts_of(node.target).is_wait


def _has_generator(node: fx.Node) -> bool:
    return node.kwargs.get("generator") is not None


def _has_device(node: fx.Node) -> bool:
    """True if a call says on which device it draws, as replaying its generator needs to know."""
    return node.kwargs.get("device") is not None or any(tensor_of(a) is not None for a in node.all_input_nodes)


def _body_is_impure(graph: JointGraph, node: fx.Node) -> bool:
    """True if a graph that the operator runs has effects, draws random numbers or reads data."""
    calls = [call for body in subgraphs_of(graph, node) for call in _all_calls(body)]
    return any(not facts_of(call.target).is_pure for call in calls)


def _all_calls(body: fx.GraphModule) -> list[fx.Node]:
    modules = [m for m in body.modules() if isinstance(m, fx.GraphModule)]
    return [node for module in modules for node in module.graph.nodes if node.op == "call_function"]


# -------------------------------------------------------------------------------------------------- mutation


def _mutated_inputs(graph: JointGraph) -> set[int]:
    """Inputs that hold other data once forward is done."""
    outputs = [whole_descriptor(d) for d in output_descriptors(graph.module)[: len(graph.forward_outputs)]]
    overwritten = {d.mutated_input for d in outputs if isinstance(d, InputMutationAOTOutput)}
    mutated = {
        i
        for i, node in enumerate(graph.nodes)
        if node.op == "placeholder" and whole_descriptor(node.meta.get("desc")) in overwritten
    }
    for i in _in_place_ops(graph):
        mutated |= {j for j in written_arguments(graph, i) if graph.roles[j] is Role.INPUT}
    return mutated


def _in_place_ops(graph: JointGraph) -> list[int]:
    return [
        i
        for i, op in enumerate(graph.facts)
        if op is not None and op.is_mutating and graph.roles[i] not in (Role.BACKWARD, Role.DEAD)
    ]


def split_closing_writes(graph: JointGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Backward's nodes before its closing run of in-place writes, and that run."""
    order = graph.backward_order
    end = len(order)
    while end and _is_write(graph, order[end - 1]):
        end -= 1
    return order[:end], order[end:]


def _is_write(graph: JointGraph, i: int) -> bool:
    op = graph.facts[i]
    return op is not None and op.is_mutating


def _written_within_backward(graph: JointGraph) -> set[int]:
    """What backward overwrites before it is done, with all views: nothing may be recomputed from it."""
    body, _ = split_closing_writes(graph)
    bases = {j for i in body if _is_write(graph, i) for j in written_arguments(graph, i)}
    return _aliases_of(graph, bases)


def written_arguments(graph: JointGraph, i: int) -> set[int]:
    """The values whose memory an in-place op writes, views followed to their base."""
    node = graph.nodes[i]
    assert isinstance(node.target, OpOverload)
    written: set[int] = set()
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, fx.Node):
                written.add(base_of(graph, graph.resolve(item)))
    return written


def base_is_viewed(graph: JointGraph, i: int) -> bool:
    """True if the node's result shares its first input's storage: a view, or one part of a multi-output view."""
    op = graph.facts[i]
    if op is None or not graph.inputs[i]:
        return False
    if op.is_view:
        return True
    parent = graph.facts[graph.inputs[i][0]]
    return graph.nodes[i].target is operator.getitem and parent is not None and parent.is_view


def base_of(graph: JointGraph, i: int) -> int:
    """Follow views to the value whose storage they share."""
    while base_is_viewed(graph, i):
        i = graph.inputs[i][0]
    return i


def _aliases_of(graph: JointGraph, bases: set[int]) -> set[int]:
    """The bases and every view of them."""
    aliases = set(bases)
    if bases:
        for i in range(len(graph.nodes)):
            if base_is_viewed(graph, i) and graph.inputs[i][0] in aliases:
                aliases.add(i)
    return aliases


def _written_in_place(graph: JointGraph) -> set[int]:
    """Intermediates that an op of the graph overwrites, with all their views."""
    bases = {j for i in _in_place_ops(graph) for j in written_arguments(graph, i)}
    return _aliases_of(graph, {j for j in bases if graph.roles[j] is not Role.INPUT})


def is_offloaded(value: Any) -> bool:
    """True for a value that a policy sends to host memory if it is kept at all."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or tensor_of(value) is None:
        return False
    return policy_of(value) in OFFLOADS
