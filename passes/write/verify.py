"""Check plans and extracted graphs against the rules they were made under. Runs on every compile; linear in the graph.

The planner and the extractor are the likeliest places for a mistake that shows only as a slightly wrong gradient, so
neither is trusted: what they decided is checked against the constraints, and what they wrote against what they decided.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping

import torch.fx as fx

from ..graph import JointGraph, Role, hides_sharing, overwritten_by, preserves_rng_state
from ..memory import COPY_TAG
from ..ops import facts_of, facts_of_call
from ..shared import VerificationError
from .halves import Halves
from .meaning import verify_meaning


def verify(graph: JointGraph, halves: Halves) -> None:
    """Check two finished graphs: they compute what the joint graph does, once where that matters, in free memory."""
    verify_meaning(graph, halves)
    verify_runs(graph, halves)
    verify_memory(halves.forward.graph)
    verify_memory(halves.backward.graph)


def verify_runs(graph: JointGraph, halves: Halves) -> None:
    """Nothing that may run only once runs twice, or never; random ops that run again replay what they drew."""
    forward, backward = halves.forward.graph.nodes, halves.backward.graph.nodes
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
