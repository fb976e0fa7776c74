"""The joint graph as the passes see it: who computes what, who needs it, and on which side it may run.

AOTAutograd hands over one FX graph that computes forward outputs and then gradients. Which half a node belongs to is
not written on it reliably: nodes of a custom autograd.Function's backward carry no tag, and `t(activation)` inside a
backward formula does not depend on a tangent. So roles are found by data flow first (does it depend on a tangent, do
forward outputs depend on it) and by tags where data flow leaves a choice.

Equal computations are recognised here too (value numbering): autograd formulas repeat what forward has computed, and a
planner that takes the copies for new values would neither save nor recompute them well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from ..ops import OpFacts, facts_of, facts_of_call
from ..torch_private import (
    AOTInput,
    AOTOutput,
    BackwardState,
    BackwardTokenAOTInput,
    OpOverload,
    PhiloxBackwardBaseOffsetAOTInput,
    PhiloxBackwardSeedAOTInput,
    PhiloxForwardBaseOffsetAOTInput,
    PhiloxForwardSeedAOTInput,
    TangentAOTInput,
    expression_of,
)
from .region_tag import POLICY_TAG, REGION_TAG, region_of

PARTITIONER_TAG = "partitioner_tag"
"""`node.meta` key under which AOTAutograd says which half traced a node."""


class Role(Enum):
    """On which side of the split a node may run."""

    INPUT = "a forward input"
    BACKWARD_INPUT = "a tangent, or a seed that is given to backward"
    CONSTANT = "an attribute of the module, there on both sides"
    FORWARD = "forward outputs depend on it"
    EITHER = "only backward needs it, but it depends on forward values alone"
    BACKWARD = "depends on a tangent, or must run in backward"
    DEAD = "nothing needs it"


FORWARD_SIDE = (Role.INPUT, Role.CONSTANT, Role.FORWARD, Role.EITHER)
"""Roles of what can be computed before a tangent is known."""


@dataclass(frozen=True, slots=True, eq=False)
class JointGraph:
    """A classified joint graph. Nodes are known by their position in the graph."""

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    facts: tuple[OpFacts | None, ...]
    """One per node; None for placeholders and attributes."""
    index: Mapping[fx.Node, int]
    inputs: tuple[tuple[int, ...], ...]
    """Per node, the nodes it reads, each once, duplicates replaced by the node that stands for them."""
    same_as: tuple[int, ...]
    """Per node, the first node that computes the same value (itself, if it is the first)."""
    roles: tuple[Role, ...]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    backward_order: tuple[int, ...]
    """The live BACKWARD nodes, in graph order."""
    needed: tuple[int, ...]
    """The forward-side values that backward reads directly, in graph order."""

    @property
    def has_backward(self) -> bool:
        """False for graphs that have nothing to split."""
        return bool(self.backward_order or self.needed)

    def resolve(self, node: fx.Node) -> int:
        """The position of the node that computes what `node` computes."""
        return self.same_as[self.index[node]]

    @staticmethod
    def classify(module: fx.GraphModule, num_fwd_outputs: int) -> JointGraph:
        """Find duplicates, roles and needs of a joint graph."""
        *nodes, output = module.graph.nodes
        outputs = leaves(output.args[0])
        if not 0 <= num_fwd_outputs <= len(outputs):
            raise ValueError(f"num_fwd_outputs={num_fwd_outputs}, but the joint graph has {len(outputs)} outputs")
        facts = tuple(facts_of_call(n.target, n.args, n.kwargs) if n.op == "call_function" else None for n in nodes)
        index = {node: i for i, node in enumerate(nodes)}
        same_as = _number_values(nodes, facts, index, [o for o in outputs if isinstance(o, fx.Node)])
        inputs = tuple(_distinct_inputs(node, index, same_as) for node in nodes)
        forward_outputs = tuple(_forward_output(o) for o in outputs[:num_fwd_outputs])
        backward_outputs = tuple(outputs[num_fwd_outputs:])

        def resolved(values: Sequence[Any]) -> list[int]:
            return [same_as[index[v]] for v in values if isinstance(v, fx.Node)]

        roles = _find_roles(nodes, facts, same_as, inputs, resolved(forward_outputs), resolved(backward_outputs))
        backward_order = tuple(i for i, role in enumerate(roles) if role is Role.BACKWARD)
        wanted = {j for i in backward_order for j in inputs[i]} | set(resolved(backward_outputs))
        needed = tuple(sorted(i for i in wanted if roles[i] in FORWARD_SIDE))
        return JointGraph(
            module=module,
            nodes=tuple(nodes),
            facts=facts,
            index=index,
            inputs=inputs,
            same_as=same_as,
            roles=roles,
            forward_outputs=forward_outputs,
            backward_outputs=backward_outputs,
            backward_order=backward_order,
            needed=needed,
        )


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor a node computes, or None for tuples, numbers and opaque objects."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_tagged_backward(node: fx.Node) -> bool:
    """True if tracing saw the node inside a backward formula."""
    return node.meta.get(PARTITIONER_TAG) in ("is_backward", "must_be_in_backward")


def _is_given(node: fx.Node, kinds: tuple[type, ...], names: tuple[str, ...]) -> bool:
    """Recognise a placeholder by AOTAutograd's descriptor, or by its name where there is none (subgraphs have none)."""
    descriptor = whole_descriptor(node.meta.get("desc"))
    if descriptor is not None:
        return isinstance(descriptor, kinds)
    return any(name in str(node.target) for name in names)


def whole_descriptor(descriptor: Any) -> Any:
    """The descriptor of a tensor subclass, given that of one of the plain tensors it consists of."""
    while isinstance(descriptor, (AOTInput, AOTOutput)) and hasattr(descriptor, "base"):
        descriptor = descriptor.base
    return descriptor


def is_tangent(node: fx.Node) -> bool:
    """True for the gradient of an output, or a token that orders effects, which backward is called with."""
    return _is_given(node, (TangentAOTInput, BackwardTokenAOTInput), ("tangents",))


def is_backward_seed(node: fx.Node) -> bool:
    """True for a random seed or offset that only backward receives."""
    kinds = (PhiloxBackwardSeedAOTInput, PhiloxBackwardBaseOffsetAOTInput)
    return _is_given(node, kinds, ("bwd_seed", "bwd_base_offset"))


def is_forward_seed(node: fx.Node) -> bool:
    """True for a random seed or offset that forward receives beside its inputs."""
    kinds = (PhiloxForwardSeedAOTInput, PhiloxForwardBaseOffsetAOTInput)
    return _is_given(node, kinds, ("fwd_seed", "fwd_base_offset"))


def is_backward_state(node: fx.Node) -> bool:
    """True for the placeholder through which compiled autograd hands hooks to backward."""
    return node.op == "placeholder" and isinstance(node.meta.get("val"), BackwardState)


def forward_inputs(graph: JointGraph) -> list[int]:
    """The placeholders of forward, in the order of AOTAutograd's calling convention."""
    given = [i for i, node in enumerate(graph.nodes) if node.op == "placeholder" and graph.roles[i] is Role.INPUT]
    return sorted(given, key=lambda i: is_forward_seed(graph.nodes[i]))


def backward_inputs(graph: JointGraph) -> list[int]:
    """The placeholders that backward has beside what forward hands over, in the order of the calling convention."""
    placeholders = [i for i, node in enumerate(graph.nodes) if node.op == "placeholder"]
    return [
        i for test in (is_tangent, is_backward_seed, is_backward_state) for i in placeholders if test(graph.nodes[i])
    ]


def leaves(value: Any) -> list[Any]:
    """What nested lists and tuples hold, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def output_descriptors(module: fx.GraphModule) -> list[Any]:
    """What AOTAutograd says of each output of a joint graph; Nones where it says nothing."""
    output = module.graph.output_node()
    descriptors = leaves(output.meta["desc"]) if "desc" in output.meta else []
    return descriptors or [None] * len(leaves(output.args[0]))


def _forward_output(value: Any) -> Any:
    """What forward returns for one output: a mutation that runs in backward returns the untouched input."""
    if (
        isinstance(value, fx.Node)
        and value.target is torch.ops.aten.copy_.default
        and value.meta.get(PARTITIONER_TAG) == "must_be_in_backward"
    ):
        return value.args[0]
    return value


# -------------------------------------------------------------------------------------------------- equal values


def _number_values(
    nodes: Sequence[fx.Node],
    facts: Sequence[OpFacts | None],
    index: Mapping[fx.Node, int],
    outputs: Sequence[fx.Node],
) -> tuple[int, ...]:
    """Map every node to the first one that computes the same value.

    What leaves the graph keeps its own storage, so that no two results alias that did not before.
    """
    escaping = _escaping(outputs)
    same_as = list(range(len(nodes)))
    first: dict[Any, int] = {}
    num_writes = 0
    for i, (node, op) in enumerate(zip(nodes, facts, strict=True)):
        if op is None:
            continue
        num_writes += op.is_mutating
        if node in escaping or not _is_mergeable(node, op):
            continue
        key = (
            node.target,
            num_writes,
            node.meta.get(REGION_TAG),
            node.meta.get(POLICY_TAG),
            region_of(node),
            _frozen(node.args, index, same_as),
            _frozen(node.kwargs, index, same_as) if node.kwargs else (),
        )
        same_as[i] = first.setdefault(key, i)
    return tuple(same_as)


def _is_mergeable(node: fx.Node, op: OpFacts) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and op.is_pure and not op.is_uninitialized


def _escaping(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes whose storage a caller of the graph gets hold of."""
    escaping: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in escaping:
            continue
        escaping.add(node)
        if node.op == "call_function" and (facts_of(node.target).is_view or node.target is operator.getitem):
            stack.extend(node.all_input_nodes)
    return escaping


def _frozen(arg: Any, index: Mapping[fx.Node, int], same_as: Sequence[int]) -> Any:
    """A hashable stand-in for an argument; equal stand-ins mean equal arguments, 1 and 1.0 and True kept apart."""
    if isinstance(arg, fx.Node):
        return same_as[index[arg]]
    if isinstance(arg, (list, tuple)):
        return tuple([_frozen(a, index, same_as) for a in arg])
    if isinstance(arg, dict):
        return tuple((k, _frozen(v, index, same_as)) for k, v in arg.items())
    if isinstance(arg, (bool, int, float, complex, slice)):
        return (type(arg), repr(arg))
    return ("constant", arg)


def _distinct_inputs(node: fx.Node, index: Mapping[fx.Node, int], same_as: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([same_as[index[a]] for a in node.all_input_nodes]))


# -------------------------------------------------------------------------------------------------- roles


def _find_roles(
    nodes: Sequence[fx.Node],
    facts: Sequence[OpFacts | None],
    same_as: Sequence[int],
    inputs: Sequence[tuple[int, ...]],
    forward_outputs: Sequence[int],
    backward_outputs: Sequence[int],
) -> tuple[Role, ...]:
    kept = [i for i, node in enumerate(nodes) if same_as[i] == i and _runs_for_its_effect(node, facts[i])]
    in_backward = _bound_to_backward(nodes, facts, inputs, _ancestors(forward_outputs, inputs, len(nodes)))
    backward = _ancestors([*backward_outputs, *(i for i in kept if in_backward[i])], inputs, len(nodes))
    # What runs once and was traced in forward runs there, also if only backward reads its result.
    once = [i for i, op in enumerate(facts) if backward[i] and op is not None and not op.is_pure]
    forward_roots = [*forward_outputs, *(i for i in (*kept, *once) if not in_backward[i])]
    forward = _ancestors(forward_roots, inputs, len(nodes))
    return tuple(
        _role(node, in_backward[i], forward[i], backward[i]) if same_as[i] == i else Role.DEAD
        for i, node in enumerate(nodes)
    )


def _role(node: fx.Node, in_backward: bool, forward_needs: bool, backward_needs: bool) -> Role:
    if node.op == "placeholder":
        return Role.BACKWARD_INPUT if (is_tangent(node) or is_backward_seed(node)) else Role.INPUT
    if node.op == "get_attr":
        return Role.CONSTANT
    if in_backward:
        return Role.BACKWARD if backward_needs or forward_needs else Role.DEAD
    if forward_needs:
        return Role.FORWARD
    return Role.EITHER if backward_needs else Role.DEAD


def _runs_for_its_effect(node: fx.Node, op: OpFacts | None) -> bool:
    """True for nodes that stay even if nobody reads their result."""
    if op is None:
        return False
    if isinstance(node.target, OpOverload) and op.is_pure:
        return False
    return node.is_impure()


def _bound_to_backward(
    nodes: Sequence[fx.Node],
    facts: Sequence[OpFacts | None],
    inputs: Sequence[tuple[int, ...]],
    forward_reads: Sequence[bool],
) -> list[bool]:
    """Which nodes cannot run before backward starts."""
    bound = [False] * len(nodes)
    for i, (node, op) in enumerate(zip(nodes, facts, strict=True)):
        if op is None:
            bound[i] = node.op == "placeholder" and (is_tangent(node) or is_backward_seed(node))
        elif node.meta.get(PARTITIONER_TAG) == "must_be_in_backward" or (
            is_tagged_backward(node) and not (op.is_pure and not op.has_body)
        ):
            bound[i] = True
        elif not op.is_pure and PARTITIONER_TAG not in node.meta and not forward_reads[i]:
            # A custom backward draws, writes or calls here; in forward it would do so too early.
            bound[i] = True
        else:
            bound[i] = any(bound[j] for j in inputs[i])
    return bound


def _ancestors(roots: Sequence[int], inputs: Sequence[tuple[int, ...]], num_nodes: int) -> list[bool]:
    """Mark the roots and everything they depend on."""
    reached = [False] * num_nodes
    stack = list(roots)
    while stack:
        i = stack.pop()
        if not reached[i]:
            reached[i] = True
            stack.extend(inputs[i])
    return reached


def subgraphs_of(graph: JointGraph, node: fx.Node) -> Iterator[fx.GraphModule]:
    """The graphs that a higher-order operator is called with."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            body = _attribute(graph.module, str(argument.target))
            if isinstance(body, fx.GraphModule):
                yield body


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


# -------------------------------------------------------------------------------------------------- text


def describe_graph(graph: JointGraph, describe: Callable[[object], str] | None = None) -> tuple[str, ...]:
    """A joint graph as text, a line per node: name, op, what it reads, what it returns.

    `describe` does what `describe_value` does, for one who has looked at the sizes already.
    """
    describe = describe_value if describe is None else describe
    return tuple([_describe_node(node, describe) for node in graph.nodes])


def _describe_node(node: fx.Node, describe: Callable[[object], str]) -> str:
    read = ", ".join([a.name for a in node.all_input_nodes])
    target = node.op if node.op == "placeholder" else str(node.target)
    return f"{node.name} = {target}({read}) {describe(node.meta.get('val'))}"


def describe_value(value: object) -> str:
    """What a node returns, `float32[4, 8]`."""
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe_value(v) for v in value) + ")"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return type(value).__name__
    return f"{str(dtype).removeprefix('torch.')}[{', '.join([size_text(s) for s in shape])}]"


def size_text(size: int | torch.SymInt) -> str:
    """A size as text; writing out a symbolic one is slow, and there are few distinct ones in a graph."""
    return _text_of(expression_of(size)) if isinstance(size, torch.SymInt) else str(size)


@lru_cache(maxsize=4096)
def _text_of(expression: object) -> str:
    return str(expression)
