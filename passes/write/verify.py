"""Check plans and extracted graphs against the rules they were made under. Runs on every compile; linear in the graph.

The planner and the extractor are the likeliest places for a mistake that shows only as a slightly wrong gradient, so
neither is trusted: what they decided is checked against the constraints, and what they wrote against what they decided.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx as fx

from ..graph.constraints import written_arguments
from ..graph.joint_graph import JointGraph, Role, backward_inputs, forward_inputs
from ..graph.overwrite import hides_sharing, overwritten_by
from ..graph.region_tag import preserves_rng_state
from ..memory.moments import COPY_TAG
from ..shared.errors import VerificationError
from ..shared.op_facts import facts_of, facts_of_call
from .extract import Extracted


def verify_extracted(graph: JointGraph, extracted: Extracted) -> None:
    """The two graphs fit together, writes reach real inputs, and nothing that may run only once runs twice."""
    forward, backward = list(extracted.forward.graph.nodes), list(extracted.backward.graph.nodes)
    _check_signatures(graph, extracted, forward, backward)
    _check_writes(graph, backward)
    for node in backward:
        if COPY_TAG in node.meta and node.op == "call_function":
            op = facts_of_call(node.target, node.args, node.kwargs)
            is_drawn_anew = op.is_random and preserves_rng_state(node)
            if is_drawn_anew or op.draws_seed or _runs_once(node):
                raise VerificationError(
                    f"backward repeats `{node.meta[COPY_TAG]}` ({node.target}), which may run only once"
                )
    live = [op for op, role in zip(graph.facts, graph.roles, strict=True) if op is not None and role is not Role.DEAD]
    expected = sum(op.runs_once for op in live)
    found = sum(_runs_once(n) for n in (*forward, *backward))
    if found != expected:
        raise VerificationError(
            f"the joint graph has {expected} ops that may run only once, the split graphs have {found}"
        )


def _runs_once(node: fx.Node) -> bool:
    """True for what would write, send or print a second time; memory of the graph's own is nobody else's business."""
    return node.op == "call_function" and facts_of(node.target).runs_once and overwritten_by(node) is None


def verify_memory(graph: fx.Graph) -> None:
    """Nothing is read after its memory was taken for another result, and only what the graph itself made is taken."""
    nodes: list[fx.Node] = list(graph.nodes)
    if all(overwritten_by(node) is None for node in nodes):
        return
    place: dict[fx.Node, object] = {}
    """Where a node's result is: the node, or the part of its result, that has allocated the memory."""
    version: Counter[object] = Counter()
    """How often the results in some memory have changed."""
    seen: dict[fx.Node, int] = {}
    """The version that a node's result is."""
    unsure: set[object] = set()
    """Memory that more may be in than is known."""
    for node in nodes:
        sources = node.all_input_nodes
        stale = [source for source in sources if seen[source] != version[place[source]]]
        if stale:
            raise VerificationError(f"`{node.name}` reads `{stale[0].name}`, whose memory holds another result by then")
        place[node] = _place_of(node, place)
        target = overwritten_by(node)
        if target is not None:
            place[node] = place[target]
            if place[node] in unsure or _allocator(place[node]).op != "call_function":
                raise VerificationError(f"`{node.name}` writes over `{target.name}`, which is not the graph's alone")
            version[place[node]] += 1
        if hides_sharing(node):
            unsure.update(place[other] for other in (node, *sources))
        seen[node] = version[place[node]]


def _place_of(node: fx.Node, place: Mapping[fx.Node, object]) -> object:
    """Where a node's result is, unless it was told."""
    if node.op != "call_function" or not node.all_input_nodes:
        return node
    first, facts = node.all_input_nodes[0], facts_of(node.target)
    if node.target is operator.getitem:  # of what was split into views, or of several results with memory of their own
        return place[first] if facts_of(first.target).is_view else (place[first], node.args[1])
    return place[first] if facts.is_view or facts.is_mutating else node


def _allocator(place: object) -> fx.Node:
    """The node that has allocated some memory, or was given it."""
    while isinstance(place, tuple):
        place = place[0]
    assert isinstance(place, fx.Node)
    return place


def _check_writes(graph: JointGraph, backward: Sequence[fx.Node]) -> None:
    """An input that backward writes to is the input itself, not a copy of it."""
    writes = [i for i in graph.backward_order if (op := graph.facts[i]) is not None and op.is_mutating]
    wanted = {j for i in writes for j in written_arguments(graph, i) if graph.roles[j] is Role.INPUT}
    given = {node.name for node in backward if node.op == "placeholder"}
    for j in sorted(wanted):
        if graph.nodes[j].name not in given:
            raise VerificationError(f"backward writes to `{graph.nodes[j].name}` but has only a copy of it")


def _check_signatures(
    graph: JointGraph, extracted: Extracted, forward: Sequence[fx.Node], backward: Sequence[fx.Node]
) -> None:
    returned: Any = forward[-1].args[0]
    handed: list[str] = [n.name for n in returned[len(graph.forward_outputs) :]]
    placeholders = [n.name for n in backward if n.op == "placeholder"]
    expected = len(handed) + len(backward_inputs(graph))
    if len(handed) != extracted.num_saved or len(placeholders) != expected:
        raise VerificationError(
            f"forward returns {len(handed)} values for backward, which has {len(placeholders)} inputs"
        )
    if sorted(handed) != sorted(placeholders[: len(handed)]):
        odd = sorted(set(handed) ^ set(placeholders[: len(handed)]))
        raise VerificationError(f"forward and backward disagree on what is handed over: {', '.join(odd)}")
    if sum(n.op == "placeholder" for n in forward) != len(forward_inputs(graph)):
        raise VerificationError("forward has other inputs than the joint graph")
    gradients: Any = backward[-1].args[0]
    if len(gradients) != len(graph.backward_outputs):
        raise VerificationError(f"backward returns {len(gradients)} gradients instead of {len(graph.backward_outputs)}")
