"""What may be done with each forward value: may it be saved, may it be recomputed, and if not, why not.

Everything the contract forbids is a constraint here, so that the planners need to know prices only and cannot choose
something illegal.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from .joint_graph import POLICY_TAG, REGION_TAG, JointGraph, Role, output_descriptors, subgraphs_of, tensor_of
from .op_facts import facts_of
from .torch_private import FakeScriptObject, InputMutationAOTOutput, OpOverload, is_sym_node


class Reason(Enum):
    """Why a value got its action; the text is what errors and dumps print."""

    INPUT = "an input of the graph, there anyway"
    CONSTANT = "an attribute of the module, there anyway"
    SYMBOLIC = "a number, kept at no cost"
    ON_CUT = "on the cheapest cut"
    OFF_CUT = "cheaper to recompute than to keep"
    BACKWARD_ONLY = "only backward needs it"
    VIEW = "a view of another value"
    NOT_A_TENSOR = "not a tensor; its parts are saved instead"
    POLICY_SAVE = "policy says save"
    POLICY_RECOMPUTE = "policy says recompute"
    REGION_OUTPUT = "leaves its checkpointed region for another one"
    HOLDS_SEED = "holds the random seed that recomputation replays"
    COLLECTIVE = "collective op, runs once"
    PENDING_COLLECTIVE = "result of a collective that has not been waited for"
    EFFECTFUL = "effectful op, runs once"
    MUTATING = "writes to one of its arguments, runs once"
    READS_WRITTEN = "reads memory that the graph writes in place"
    MUTATED_INPUT = "an input that forward overwrites; backward gets a copy of the old data"
    DISCRETE = "chooses among elements, and a last-bit difference would choose others"
    DATA_DEPENDENT = "its size or number depends on data"
    EXPLICIT_GENERATOR = "draws from an explicit generator, whose state is not replayed"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What may be done with one value; a reason where it may not."""

    no_save: Reason | None = None
    no_recompute: Reason | None = None
    is_free: bool = False
    """Backward has it anyway: nothing to decide."""


FREE = Constraint(is_free=True)
OPEN = Constraint()


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """One constraint per forward-side node."""

    of: tuple[Constraint | None, ...]
    """By node position; None for nodes that are not forward values."""
    saved_by_copy: frozenset[int]
    """Inputs that forward overwrites, and their views: to save one is to save a copy of the old data."""


def find_constraints(graph: JointGraph) -> Constraints:
    """Find what may be done with each value on the forward side."""
    tainted = _aliases_of(graph, _mutated_inputs(graph))
    written = _written_in_place(graph) - tainted
    return Constraints(
        of=tuple(
            _constraint(graph, i, tainted, written) if role in _FORWARD_SIDE else None
            for i, role in enumerate(graph.roles)
        ),
        saved_by_copy=frozenset(tainted),
    )


_FORWARD_SIDE = (Role.INPUT, Role.CONSTANT, Role.FORWARD, Role.EITHER)


def _constraint(graph: JointGraph, i: int, tainted: set[int], written: set[int]) -> Constraint:
    node, op = graph.nodes[i], graph.facts[i]
    if node.op == "get_attr" or is_sym_node(node):
        return FREE
    if node.op == "placeholder":
        return Constraint(no_recompute=Reason.MUTATED_INPUT) if i in tainted else FREE
    assert op is not None
    return Constraint(
        no_save=_why_not_save(graph, i),
        no_recompute=_why_not_recompute(graph, i, written),
    )


def _why_not_save(graph: JointGraph, i: int) -> Reason | None:
    node, op = graph.nodes[i], graph.facts[i]
    if tensor_of(node) is None and not isinstance(node.meta.get("val"), FakeScriptObject):
        return Reason.NOT_A_TENSOR
    if op is not None and op.is_collective and any(_is_wait(user) for user in node.users):
        return Reason.PENDING_COLLECTIVE
    if wants_recompute(node) and not _leaves_region(node):
        return Reason.POLICY_RECOMPUTE
    return None


def _why_not_recompute(graph: JointGraph, i: int, written: set[int]) -> Reason | None:
    node, op = graph.nodes[i], graph.facts[i]
    assert op is not None
    asked = wants_recompute(node)
    checks = (
        (op.draws_seed, Reason.HOLDS_SEED),
        (op.is_collective, Reason.COLLECTIVE),
        (op.is_effectful or (op.has_body and _body_is_impure(graph, node)), Reason.EFFECTFUL),
        (op.is_mutating, Reason.MUTATING),
        (op.reads_data or "unbacked_bindings" in node.meta, Reason.DATA_DEPENDENT),
        (any(j in written for j in graph.inputs[i]), Reason.READS_WRITTEN),
        (op.is_random and _has_generator(node), Reason.EXPLICIT_GENERATOR),
        (op.is_discrete and not asked, Reason.DISCRETE),
        (_policy_of(node) is not None and not asked, Reason.POLICY_SAVE),
        (asked and _leaves_region(node), Reason.REGION_OUTPUT),
    )
    return next((reason for holds, reason in checks if holds), None)


# -------------------------------------------------------------------------------------------------- policies


def _policy_of(node: fx.Node) -> CheckpointPolicy | None:
    """The policy a node was traced under; the parts of a tuple go with the op that made it."""
    policy: CheckpointPolicy | None = node.meta.get(POLICY_TAG)
    if policy is None and node.target is operator.getitem:
        return _policy_of(node.all_input_nodes[0])
    return policy


def wants_recompute(node: fx.Node) -> bool:
    """True if the policy of the node's region asks for recomputation."""
    return _policy_of(node) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _leaves_region(node: fx.Node) -> bool:
    """True if a later checkpointed region starts from this value, which then belongs to the outside."""
    region = node.meta.get(REGION_TAG)
    return any(
        wants_recompute(user) and region is not None and (user.meta.get(REGION_TAG) or region) > region
        for user in node.users
    )


# -------------------------------------------------------------------------------------------------- effects


def _is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and "wait_tensor" in str(node.target)


def _has_generator(node: fx.Node) -> bool:
    return node.kwargs.get("generator") is not None


def _body_is_impure(graph: JointGraph, node: fx.Node) -> bool:
    """True if a graph that the operator runs has effects, draws random numbers or reads data."""
    bodies = [node for body in subgraphs_of(graph, node) for node in _all_calls(body)]
    return any(not facts_of(call.target).is_pure and not facts_of(call.target).has_body for call in bodies)


def _all_calls(body: fx.GraphModule) -> list[fx.Node]:
    modules = [m for m in body.modules() if isinstance(m, fx.GraphModule)]
    return [node for module in modules for node in module.graph.nodes if node.op == "call_function"]


# -------------------------------------------------------------------------------------------------- mutation


def _mutated_inputs(graph: JointGraph) -> set[int]:
    """Inputs that hold other data once forward is done."""
    by_descriptor = {
        node.meta["desc"]: i
        for i, node in enumerate(graph.nodes)
        if node.op == "placeholder" and node.meta.get("desc") is not None
    }
    descriptors = output_descriptors(graph.module)[: len(graph.forward_outputs)]
    mutated = {
        by_descriptor[d.mutated_input]
        for d in descriptors
        if isinstance(d, InputMutationAOTOutput) and d.mutated_input in by_descriptor
    }
    for i in _in_place_ops(graph):
        mutated |= {j for j in _written_arguments(graph, i) if graph.roles[j] is Role.INPUT}
    return mutated


def _in_place_ops(graph: JointGraph) -> list[int]:
    return [
        i
        for i, op in enumerate(graph.facts)
        if op is not None and op.is_mutating and graph.roles[i] not in (Role.BACKWARD, Role.DEAD)
    ]


def _written_arguments(graph: JointGraph, i: int) -> set[int]:
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
                written.add(_base_of(graph, graph.resolve(item)))
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


def _base_of(graph: JointGraph, i: int) -> int:
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
    bases = {j for i in _in_place_ops(graph) for j in _written_arguments(graph, i)}
    return _aliases_of(graph, {j for j in bases if graph.roles[j] is not Role.INPUT})
