"""What the nodes of two finished graphs stand for, checked node by node against the joint graph they were made from.

A plan changes where values are computed, and rewrites change how they wait; neither may change a value. So each node of
the finished graphs has to stand for a node of the joint graph: it calls the same op, with the same arguments, on what
stands for the same values, and reads memory at a time at which the joint graph's node would have found the same in it.
What rewrites add (copies to and from other memory, masks as bytes, loops that change nothing) is known to hand on what
it is given. Then what forward returns and backward returns has to stand for the joint graph's outputs.

This is translation validation (Pnueli, Siegel, Singerman 1998): neither the planner nor a rewrite has to be trusted.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from ..graph import (
    JointGraph,
    backward_inputs,
    base_of,
    forward_inputs,
    is_port,
    plain_call,
    tensor_of,
    written_arguments,
)
from ..ops import facts_of, is_copy_alike, is_to_disk
from ..shared import VerificationError
from ..torch_private import is_sym_node, run_and_save_rng_state, run_with_rng_state
from .halves import NODE_TAG, Halves

_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, slots=True)
class State:
    """The generator's state before a random op of forward drew."""

    of: fx.Node


@dataclass(frozen=True, slots=True)
class Number:
    """A mask as numbers: 1 where it is true, 0 elsewhere."""

    of: object


@dataclass(slots=True)
class _Reading:
    """What is known of one finished graph, as far as it has been read."""

    joint: _Joint
    stands_for: dict[fx.Node, object] = field(default_factory=dict)
    place: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The node whose memory a result is in."""
    writes: Counter[fx.Node] = field(default_factory=Counter)
    """How many of the joint graph's writes some memory has seen."""


class _Joint:
    """The joint graph, with what each of its nodes finds in memory that is written to."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.value = [self._value(i) for i in range(len(graph.nodes))]
        self.writers = {i: written_arguments(graph, i) for i, op in enumerate(graph.facts) if op and op.is_mutating}
        written = frozenset[int]().union(*self.writers.values())
        self.versions = self._versions(written) if written else {}

    def _value(self, i: int) -> int:
        """The node that computes what a node stands for: a port stands for what it is put behind."""
        i = self.graph.same_as[i]
        while is_port(self.graph.nodes[i]):
            i = self.graph.inputs[i][0]
        return i

    def _versions(self, written: frozenset[int]) -> dict[tuple[int, int], int]:
        """Per node and value it reads whose memory is written to anywhere: how many writes that has seen by then."""
        seen, versions = Counter[int](), {}
        for i in range(len(self.graph.nodes)):
            for j in self.graph.inputs[i]:
                base = base_of(self.graph, j)
                if base in written:
                    versions[i, self.value[j]] = seen[base]
            seen.update(self.writers.get(i, ()))
        return versions


def verify_meaning(graph: JointGraph, halves: Halves) -> None:
    """Every node stands for one of the joint graph, and the two halves hand on and return what they are to."""
    joint = _Joint(graph)
    forward, backward = _Reading(joint), _Reading(joint)
    for node, i in _paired(halves.forward, forward_inputs(graph), "forward"):
        _begin(forward, node, i)
    returned: Any = _read(forward, halves.forward)
    _check_results(forward, returned[: halves.num_fwd_outputs], graph.forward_outputs, "forward")
    handed = _in_backward_order(returned[halves.num_fwd_outputs :])
    tangents = backward_inputs(graph)
    placeholders = list(halves.backward.graph.find_nodes(op="placeholder"))
    if len(placeholders) != len(handed) + len(tangents):
        raise VerificationError(
            f"forward returns {len(handed)} values for backward, which has {len(placeholders)} inputs"
        )
    for node, source in zip(placeholders, handed, strict=False):
        _begin(backward, node, forward.stands_for[source], forward.writes[forward.place[source]])
    for node, i in zip(placeholders[len(handed) :], tangents, strict=True):
        _begin(backward, node, i)
    _check_results(backward, _read(backward, halves.backward), graph.backward_outputs, "backward")


def _paired(module: fx.GraphModule, positions: Sequence[int], half: str) -> list[tuple[fx.Node, int]]:
    nodes = list(module.graph.find_nodes(op="placeholder"))
    if len(nodes) != len(positions):
        raise VerificationError(f"{half} has {len(nodes)} inputs, where the joint graph has {len(positions)}")
    return list(zip(nodes, positions, strict=True))


def _in_backward_order(handed: Sequence[Any]) -> list[Any]:
    """What forward hands over, in the order of backward's inputs: numbers come first there."""
    numbers = [n for n in handed if is_sym_node(n) or isinstance(n.meta.get("val"), (int, float))]
    others = set(numbers)
    return [*numbers, *(n for n in handed if n not in others)]


def _begin(reading: _Reading, node: fx.Node, stands_for: object, num_writes: int = 0) -> None:
    """Note what an input of a half stands for."""
    reading.stands_for[node], reading.place[node] = stands_for, node
    reading.writes[node] = num_writes


def _read(reading: _Reading, module: fx.GraphModule) -> Any:
    """Find out what each node stands for, in order; return what the graph returns."""
    for node in module.graph.nodes:
        if node.op == "output":
            return node.args[0]
        if node.op != "placeholder":
            _note(reading, node)
    raise VerificationError("a half without an output")


def _check_results(reading: _Reading, found: Sequence[Any], wanted: Sequence[Any], half: str) -> None:
    if len(found) != len(wanted):
        raise VerificationError(f"{half} returns {len(found)} values instead of {len(wanted)}")
    for k, (value, expected) in enumerate(zip(found, wanted, strict=True)):
        if not _is_same(reading, value, expected):
            raise VerificationError(f"{half} returns `{value}` as its result {k}, which is to be `{expected}`")


# -------------------------------------------------------------------------------------------------- one node


def _note(reading: _Reading, node: fx.Node) -> None:
    """Find out what a node stands for and in whose memory it is."""
    joint = reading.joint
    i = node.meta.get(NODE_TAG)
    if isinstance(i, int) and _computes(reading, node, i):
        reading.stands_for[node] = joint.value[i]
        reading.place[node] = _place(reading, node)
        if i in joint.writers:
            _write(reading, node)
        return
    handed_on = _handed_on(reading, node)
    if handed_on is None:
        raise VerificationError(f"`{node.format_node()}` computes nothing that the joint graph computes")
    reading.stands_for[node], reading.place[node] = handed_on, node
    for source in node.all_input_nodes[:1]:
        reading.writes[node] = reading.writes[reading.place[source]]


def _place(reading: _Reading, node: fx.Node) -> fx.Node:
    sources = node.all_input_nodes
    if node.op != "call_function" or not sources:
        return node
    facts = facts_of(node.target)
    if facts.is_view or facts.is_mutating:
        return reading.place[sources[0]]
    if node.target is operator.getitem and facts_of(sources[0].target).is_view:
        return reading.place[sources[0]]
    return node


def _write(reading: _Reading, node: fx.Node) -> None:
    """Count a write of the joint graph's to whatever it writes to."""
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if argument.alias_info is not None and argument.alias_info.is_write:
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, fx.Node):
                    reading.writes[reading.place[item]] += 1


def _computes(reading: _Reading, node: fx.Node, i: int) -> bool:
    """Does a node call what a node of the joint graph calls, on what stands for the same?"""
    wanted = reading.joint.graph.nodes[i]
    if node.op != wanted.op:
        return False
    if node.op == "get_attr":
        return bool(node.target == wanted.target)
    target, args, kwargs = _call(reading, node)
    same = target is wanted.target and _is_same(reading, args, wanted.args) and _is_same(reading, kwargs, wanted.kwargs)
    return same and _finds_the_same(reading, node, i)


def _call(reading: _Reading, node: fx.Node) -> tuple[Any, Any, Any]:
    """The op that a node calls, and its arguments, without what says how it is called."""
    if node.target is run_with_rng_state:
        state, op, *args = node.args
        drawn = reading.stands_for.get(state)  # type: ignore[arg-type]
        is_own = isinstance(drawn, State) and drawn.of.meta[NODE_TAG] == node.meta[NODE_TAG]
        return (op if is_own else None), tuple(args), node.kwargs
    if node.target is operator.getitem:
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is run_and_save_rng_state and node.args[1] == 1:
            op, *args = source.args
            return op, tuple(args), source.kwargs
    return plain_call(node)


def _is_same(reading: _Reading, found: Any, wanted: Any) -> bool:
    """Is an argument what the joint graph's is?"""
    if isinstance(wanted, fx.Node):
        joint = reading.joint
        return isinstance(found, fx.Node) and reading.stands_for.get(found) == joint.value[joint.graph.index[wanted]]
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(_is_same(reading, f, w) for f, w in zip(found, wanted, strict=True))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_is_same(reading, found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, slice):
        ends = (wanted.start, wanted.stop, wanted.step)
        return isinstance(found, slice) and _is_same(reading, (found.start, found.stop, found.step), ends)
    return found is wanted or (type(found) is type(wanted) and bool(found == wanted))


def _finds_the_same(reading: _Reading, node: fx.Node, i: int) -> bool:
    """Has the memory that a node reads seen as many writes as when the joint graph's node reads it?"""
    versions = reading.joint.versions
    if not versions:
        return True
    for source in node.all_input_nodes:
        value = reading.stands_for.get(source)
        expected = versions.get((i, value)) if isinstance(value, int) else None
        if expected is not None and reading.writes[reading.place[source]] != expected:
            return False
    return True


# -------------------------------------------------------------------------------------------------- what is handed on


def _handed_on(reading: _Reading, node: fx.Node) -> object:
    """What a node stands for that no node of the joint graph stands behind; None if that is not known."""
    if node.target is run_and_save_rng_state and isinstance(node.meta.get(NODE_TAG), int):
        return State(node)
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    target, args = node.target, node.args
    given = reading.stands_for.get(node.all_input_nodes[0])
    if target is operator.getitem:
        return given if isinstance(given, State) and args[1] == 0 else None
    if is_to_disk(target) or is_copy_alike(target) or (target is _aten.clone.default and not node.kwargs):
        return given
    if target is _aten._to_copy.default and node.kwargs.keys() <= {"device", "non_blocking", "pin_memory"}:
        return given
    if target is _aten.mul.Tensor and args[1] == 1 and type(args[1]) is int:
        return given
    return _as_number(reading, target, args, given)


def _as_number(reading: _Reading, target: Any, args: Sequence[Any], given: object) -> object:
    """Follow a mask that is turned into numbers and back."""
    if target is _convert and args[1] in (torch.float32, torch.uint8):
        if isinstance(given, Number):
            return given
        value = tensor_of(reading.joint.graph.nodes[given]) if isinstance(given, int) else None
        return Number(given) if value is not None and value.dtype is torch.bool else None
    if target is _aten.ne.Scalar and isinstance(given, Number) and args[1] == 0:
        return given.of
    return None
