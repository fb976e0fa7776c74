"""Split a joint graph by a plan: one forward graph, one backward graph, recomputation written out as explicit copies.

AOTAutograd's calling convention:

    forward returns    user outputs | saved tensors | saved tensors without version check | opaque objects | numbers
    backward receives  numbers | saved tensors (same order) | opaque objects | tangents | seeds | backward state

A saved value has the same name in both graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from ..graph import (
    PARTITIONER_TAG,
    Constraints,
    JointGraph,
    Role,
    backward_inputs,
    forward_inputs,
    is_backward_state,
    output_descriptors,
    write_over,
    written_arguments,
)
from ..memory import COPY_TAG, MOMENT_TAG, Schedule, moments_of
from ..torch_private import (
    REALIZE_TAG,
    FakeScriptObject,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    find_symbol_binding_fx_nodes,
    graph_module,
    is_sym_node,
    is_symbol_binding_fx_node,
    symbols_of,
)
from . import rng
from .halves import NODE_TAG, Halves

_UNCHECKED = "saved_tensor_with_no_vc_check"
"""`node.meta` key by which AOTAutograd marks tensors that eager would stash without a version check."""


def extract(
    graph: JointGraph,
    constraints: Constraints,
    schedule: Schedule,
    overwritten: Mapping[int, int] | None = None,
    realized: Collection[int] = (),
) -> Halves:
    """Write forward and backward as graphs of their own.

    `overwritten` says of which moments of the step nodes write their result over an input, and over which; `realized`
    of which moments of backward a compiler is to write the result to memory.
    """
    overwritten = overwritten or {}
    forward, env, states = _forward_half(graph, schedule, overwritten)
    handed = _hand_over(graph, constraints, schedule, forward, env, states)
    _add_output(forward, graph, env, handed)
    backward = _backward_half(graph, schedule, handed, overwritten, realized)
    return Halves(
        forward=graph_module(graph.module, forward),
        backward=graph_module(graph.module, backward),
        num_fwd_outputs=len(graph.forward_outputs),
    )


# -------------------------------------------------------------------------------------------------- forward


def _forward_half(
    graph: JointGraph, schedule: Schedule, overwritten: Mapping[int, int]
) -> tuple[fx.Graph, dict[int, fx.Node], dict[int, fx.Node]]:
    """Copy what forward runs; return it with the new node and the generator state of each old position."""
    forward = fx.Graph()
    env: dict[int, fx.Node] = {}
    states: dict[int, fx.Node] = {}

    def lookup(node: fx.Node) -> fx.Node:
        return env[graph.resolve(node)]

    for i in forward_inputs(graph):
        env[i] = _copied_into(forward, graph.nodes[i], lookup)
    for moment, i in enumerate(schedule.forward):
        node = graph.nodes[i]
        if i in schedule.replayed:
            states[i], env[i] = rng.save_state(forward, node, i, *_arguments(node, lookup))
        else:
            env[i] = _copied_into(forward, node, lookup)
        env[i].meta[NODE_TAG] = i
        if moment in overwritten:
            write_over(env[i], env[overwritten[moment]])
    return forward, env, states


def _add_output(forward: fx.Graph, graph: JointGraph, env: dict[int, fx.Node], handed: Sequence[_Handed]) -> None:
    own = [env[graph.resolve(o)] if isinstance(o, fx.Node) else o for o in graph.forward_outputs]
    values = [*own, *(h.node for h in _in_forward_order(handed))]
    output = forward.output(tuple(values))
    kinds = [
        (SavedForBackwardsNoVcCheckAOTOutput if h.kind is _Kind.UNCHECKED else SavedForBackwardsAOTOutput)(k)
        for k, h in enumerate(_in_forward_order(handed))
    ]
    output.meta["desc"] = [*output_descriptors(graph.module)[: len(own)], *kinds]
    output.meta["output_stack_traces"] = [v.meta.get("stack_trace") if isinstance(v, fx.Node) else None for v in values]


# -------------------------------------------------------------------------------------------------- hand-over


class _Kind(IntEnum):
    """The groups of AOTAutograd's calling convention, in the order in which forward returns them."""

    CHECKED = 0
    UNCHECKED = 1
    OPAQUE = 2
    NUMBER = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Handed:
    """One value that forward returns for backward."""

    node: fx.Node
    """In the forward graph."""
    kind: _Kind
    position: int | None
    """The joint node it stands for in backward; None for a generator state."""
    state_of: int | None = None
    """The random op whose generator state it is."""
    target_of: int | None = None
    """The input that backward writes to, where it reads a copy of its old contents."""


def _hand_over(
    graph: JointGraph,
    constraints: Constraints,
    schedule: Schedule,
    forward: fx.Graph,
    env: dict[int, fx.Node],
    states: dict[int, fx.Node],
) -> list[_Handed]:
    handed = []
    for i in schedule.received:
        node = graph.nodes[i]
        if node.op == "get_attr" or is_backward_state(node):
            continue
        kept = _copied(forward, env[i]) if i in schedule.copied else env[i]
        handed.append(_Handed(kept, _kind_of(node), i))
    handed += [_Handed(state, _Kind.CHECKED, None, state_of=i) for i, state in states.items()]
    targets = _write_targets(graph, schedule) & constraints.saved_by_copy
    handed += [_Handed(env[i], _kind_of(graph.nodes[i]), None, target_of=i) for i in sorted(targets)]
    return handed + _missing_symbols(graph, handed, env)


def _write_targets(graph: JointGraph, schedule: Schedule) -> set[int]:
    """The inputs that backward writes to in place."""
    writes = [i for i in schedule.events if (op := graph.facts[i]) is not None and op.is_mutating]
    return {j for i in writes for j in written_arguments(graph, i) if graph.roles[j] is Role.INPUT}


def _copied(forward: fx.Graph, node: fx.Node) -> fx.Node:
    """A copy of memory that forward overwrites later, taken where the value is defined."""
    with forward.inserting_after(_last_placeholder(forward) if node.op == "placeholder" else node):
        copy = forward.create_node("call_function", torch.ops.aten.clone.default, (node,), name=f"{node.name}_before")
    copy.meta = {k: v for k, v in node.meta.items() if k not in ("desc", "tensor_meta", NODE_TAG)}
    copy.meta["val"] = node.meta["val"].clone()
    copy.meta[PARTITIONER_TAG] = "is_forward"
    return copy


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    last: fx.Node | None = None
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        last = node
    assert last is not None
    return last


def _kind_of(node: fx.Node) -> _Kind:
    if is_sym_node(node) or isinstance(node.meta.get("val"), (int, float)):
        return _Kind.NUMBER
    if isinstance(node.meta.get("val"), FakeScriptObject):
        return _Kind.OPAQUE
    return _Kind.UNCHECKED if node.meta.get(_UNCHECKED, False) else _Kind.CHECKED


def _missing_symbols(graph: JointGraph, handed: Sequence[_Handed], env: dict[int, fx.Node]) -> list[_Handed]:
    """Sizes that nobody reads by name but that the tensors given to backward have: compilers look them up."""
    tangents = [n for i, n in enumerate(graph.nodes) if graph.roles[i] is Role.BACKWARD_INPUT]
    bound = {is_symbol_binding_fx_node(h.node) for h in handed if h.kind == _Kind.NUMBER}
    symbols = [s for n in (*(h.node for h in handed), *tangents) for s in symbols_of(n.meta.get("val"))]
    if not symbols:
        return []
    binders = find_symbol_binding_fx_nodes(graph.module.graph)
    missing = [s for s in dict.fromkeys(symbols) if s not in bound and s in binders]
    positions = [graph.resolve(binders[s]) for s in missing]
    return [_Handed(env[i], _Kind.NUMBER, i) for i in dict.fromkeys(positions) if i in env]


def _in_forward_order(handed: Sequence[_Handed]) -> list[_Handed]:
    return sorted(handed, key=_forward_rank)


def _in_backward_order(handed: Sequence[_Handed]) -> list[_Handed]:
    return sorted(handed, key=lambda h: (-1, *_forward_rank(h)) if h.kind == _Kind.NUMBER else (0, *_forward_rank(h)))


def _forward_rank(handed: _Handed) -> tuple[int, int]:
    """Groups in order; among numbers, symbols before what is derived from them."""
    derived = handed.kind == _Kind.NUMBER and not is_symbol_binding_fx_node(handed.node)
    return (handed.kind, int(derived))


# -------------------------------------------------------------------------------------------------- backward


def _backward_half(
    graph: JointGraph,
    schedule: Schedule,
    handed: Sequence[_Handed],
    overwritten: Mapping[int, int],
    realized: Collection[int],
) -> fx.Graph:
    backward = fx.Graph()
    env, states, targets = _backward_inputs(graph, handed, backward)

    def lookup(node: fx.Node) -> fx.Node:
        i = graph.resolve(node)
        if i not in env and node.op == "get_attr":
            env[i] = backward.node_copy(node)
            env[i].meta[NODE_TAG] = i
        return env[i]

    def lookup_to_write(node: fx.Node) -> fx.Node:
        return targets.get(graph.resolve(node)) or lookup(node)

    for number, (i, moment) in enumerate(zip(schedule.events, moments_of(graph, schedule), strict=True)):
        node, op = graph.nodes[i], graph.facts[i]
        if i in states:
            new = rng.replay(backward, node, states[i], *_arguments(node, lookup))
        else:
            new = _copied_into(backward, node, lookup_to_write if op is not None and op.is_mutating else lookup)
        new.meta[NODE_TAG] = i
        if graph.roles[i] is not Role.BACKWARD:
            new.meta[COPY_TAG] = node.name
            new.meta[PARTITIONER_TAG] = "is_backward"
        new.meta["autograd_backward"] = True
        new.meta[MOMENT_TAG] = moment
        if len(schedule.forward) + number in realized:
            new.meta[REALIZE_TAG] = True
        if len(schedule.forward) + number in overwritten:
            write_over(new, env[overwritten[len(schedule.forward) + number]])
        env[i] = new
    outputs = [lookup(o) if isinstance(o, fx.Node) else o for o in graph.backward_outputs]
    output = backward.output(tuple(outputs))
    output.meta["desc"] = output_descriptors(graph.module)[len(graph.forward_outputs) :]
    output.meta["output_stack_traces"] = [
        o.meta.get("stack_trace") if isinstance(o, fx.Node) else None for o in outputs
    ]
    return backward


def _backward_inputs(
    graph: JointGraph, handed: Sequence[_Handed], backward: fx.Graph
) -> tuple[dict[int, fx.Node], dict[int, fx.Node], dict[int, fx.Node]]:
    """Add the placeholders of backward; return the nodes of values, of generator states and of inputs to write to."""
    env: dict[int, fx.Node] = {}
    states: dict[int, fx.Node] = {}
    targets: dict[int, fx.Node] = {}
    for h in _in_backward_order(handed):
        placeholder = _placeholder(backward, h.node)
        if h.position is not None:
            env[h.position] = placeholder
        if h.state_of is not None:
            states[h.state_of] = placeholder
        if h.target_of is not None:
            targets[h.target_of] = placeholder
    for i in backward_inputs(graph):
        env[i] = _placeholder(backward, graph.nodes[i])
    return env, states, targets


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new: fx.Node = graph.placeholder(node.name)
    new.meta = dict(node.meta)
    return new


def _copied_into(graph: fx.Graph, node: fx.Node, lookup: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Copy a node as `fx.Graph.node_copy` does, in less than half the time: backward may have many times the nodes.

    A node that is made with its arguments has them searched for symbols first, and one whose `meta` is replaced is
    looked up and sorted in again.
    """
    args, kwargs = _arguments(node, lookup)
    new = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    if args:
        new.args = args
    if kwargs:
        new.kwargs = kwargs
    new.meta.update(node.meta)
    return new


def _arguments(node: fx.Node, lookup: Callable[[fx.Node], fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: Any = map_arg(node.args, lookup)
    kwargs: Any = map_arg(node.kwargs, lookup)
    return args, kwargs
