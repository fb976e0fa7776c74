"""Keep a compiler's fusion from undoing the order of backward.

A plan with a tight budget counts on a value being recomputed shortly before it is read and freed soon after. A compiler
that makes one kernel of two loops because they read the same memory moves one of them to the other's place: recomputed
copies of a value end up as one that lives long, and results that were never alive at the same time become so. Loops
that feed each other may be fused, except that a reduction stays where it is: put off until its small result is read, it
would keep what it reads alive until then. Other loops may be fused only if they run at the same moment of the plan.

A compiler that puts a kernel made of an early and a late loop where the early one was, and all that it waits for before
it, runs the main line of backward first and everything beside it (gradients of weights, say) in the end, with what that
reads alive until then. Kernels are to run as soon as they can, and no earlier than the last of their loops, nor than
the plan runs them.

It may also compute a result twice. What a kernel of its own reads through a view is copied for it, and who reads the
same result later computes it again from what it was made of, which has to live until then. Such results are to be
written to memory once.

It may make one op of a product and what is added to it, and run that where the sum was. If the other summand is there
only much later (the gradients of a weight that is used twice), what the product reads would have to live until then:
such products and sums stay apart.

And it may not compute a result twice that a plan counts on: on a CPU the result of an exponential that several loops
read is written to memory, and stays there until the last of them. Such a loop is repeated at each moment that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

import torch
import torch.fx as fx

from ..memory.moments import COPY_TAG, MOMENT_TAG, Moment
from ..shared.op_facts import FUSED_KINDS, INLINED_KINDS, facts_of
from ..torch_private import REALIZE_TAG

_REDUCTIONS = FUSED_KINDS - INLINED_KINDS

_ADD, _TIMES, _PRODUCT = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default


def may_fuse(first: Sequence[fx.Node], second: Sequence[fx.Node], *, feed_each_other: bool) -> bool:
    """May the loops made of two groups of backward's nodes become one?"""
    moments, others = _moments(first), _moments(second)
    if not moments or not others:
        return True
    slot, other = max(m.slot for m in moments), max(m.slot for m in others)
    if slot == other:
        return True
    if any(COPY_TAG in node.meta for node in (*first, *second)) and len({m.phase for m in (*moments, *others)}) > 1:
        return False
    if not feed_each_other or _reduces_before(max(slot, other), (*first, *second)):
        return False
    early = first if slot < other else second
    return not _is_read_before(max(slot, other), early)


def _reduces_before(slot: int, nodes: Iterable[fx.Node]) -> bool:
    """Is any of the nodes a reduction that the plan runs before a slot?"""
    return any(
        MOMENT_TAG in node.meta
        and node.meta[MOMENT_TAG].slot < slot
        and node.op == "call_function"
        and facts_of(node.target).kind in _REDUCTIONS
        for node in nodes
    )


def _is_read_before(slot: int, nodes: Sequence[fx.Node]) -> bool:
    """Does anything else read one of the nodes before a slot? Then all that is made one with it has to run by then."""
    own = set(nodes)
    readers = (reader for node in nodes for reader, _, _ in readers_of(node) if reader not in own)
    return any(moment.slot < slot for moment in _moments(readers))


def _moments(nodes: Iterable[fx.Node]) -> list[Moment]:
    return [node.meta[MOMENT_TAG] for node in nodes if MOMENT_TAG in node.meta]


def planned_order(
    places: Sequence[int], nodes: Sequence[Sequence[fx.Node]], waits_for: Sequence[set[int]]
) -> list[int]:
    """The order of kernels, given the place of each in the compiler's own order and the graph's nodes behind it.

    A compiler makes a loop when it meets who reads its result from memory, and not when it meets the loop's own nodes.
    The plan may have something run between the two.
    """
    slots = [max((moment.slot for moment in _moments(own)), default=None) for own in nodes]
    ranks: list[tuple[int, int]] = [(0, 0)] * len(places)
    latest = 0
    for place, k in sorted(zip(places, range(len(places)), strict=True)):
        slot = slots[k]
        latest = latest if slot is None else slot
        ranks[k] = (latest, place)
    return kernel_order(ranks, waits_for)


def kernel_order(ranks: Sequence[tuple[int, int]], waits_for: Sequence[set[int]]) -> list[int]:
    """Run what is ready, the lowest rank first: nothing is moved ahead because something late waits for it."""
    missing = [len(others) for others in waits_for]
    waiting: list[list[int]] = [[] for _ in ranks]
    for k, others in enumerate(waits_for):
        for other in others:
            waiting[other].append(k)
    ready = [(ranks[k], k) for k, number in enumerate(missing) if not number]
    heapify(ready)
    order = []
    while ready:
        _, done = heappop(ready)
        order.append(done)
        for k in waiting[done]:
            missing[k] -= 1
            if not missing[k]:
                heappush(ready, (ranks[k], k))
    assert len(order) == len(ranks), "kernels wait for each other"
    return order


def write_once(graph: fx.Graph) -> None:
    """Have results written to memory that a kernel reads through a view and a loop reads, too."""
    for node in graph.nodes:
        if not is_inlined(node):
            continue
        readers = list(readers_of(node))
        feeds_kernel = any(is_view and reader.op == "call_function" and not loop for reader, is_view, loop in readers)
        if feeds_kernel and any(loop for _, _, loop in readers):
            node.meta[REALIZE_TAG] = True


def keep_products_early(graph: fx.Graph) -> None:
    """Have products of backward run when the plan runs them, although something is added to them much later."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _ADD or MOMENT_TAG not in node.meta:
            continue
        summands = [arg for arg in node.args if isinstance(arg, fx.Node) and MOMENT_TAG in arg.meta]
        last = max((arg.meta[MOMENT_TAG].slot for arg in summands), default=0)
        for product in summands:
            if product.target is _PRODUCT and product.meta[MOMENT_TAG].slot < last:
                _hide(graph, product, node)


def _hide(graph: fx.Graph, product: fx.Node, reader: fx.Node) -> None:
    """Put a loop that changes nothing between a product and the sum that reads it: compilers look for the pair."""
    with graph.inserting_before(reader):
        same = graph.create_node("call_function", _TIMES, (product, 1), name=f"{product.name}_apart")
    same.meta = {**product.meta, MOMENT_TAG: reader.meta[MOMENT_TAG]}
    reader.replace_input_with(product, same)


def repeat_exponentials(graph: fx.Graph) -> None:
    """Have loops with an exponential computed at each moment of backward that reads them, and not kept in between."""
    repeated: set[fx.Node] = set()
    for node in graph.nodes:
        if _can_repeat(node) and (
            facts_of(node.target).is_exponential or not repeated.isdisjoint(node.all_input_nodes)
        ):
            repeated.add(node)
    for node in reversed(list(graph.nodes)):
        if node in repeated:
            _repeat_at_each_slot(graph, node)


def _can_repeat(node: fx.Node) -> bool:
    """True for a loop or a view that may be computed again and that nobody wants in memory."""
    if not _is_loop(node) or node.meta.get(REALIZE_TAG) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    facts = facts_of(node.target)
    return facts.kind in INLINED_KINDS and facts.is_pure


def _repeat_at_each_slot(graph: fx.Graph, node: fx.Node) -> None:
    users = list(node.users)
    if not all(MOMENT_TAG in user.meta and _is_loop(user) for user in users):
        return
    slots: dict[int, list[fx.Node]] = {}
    for user in users:
        slots.setdefault(user.meta[MOMENT_TAG].slot, []).append(user)
    for late in sorted(slots)[1:]:
        first = min(slots[late])
        with graph.inserting_before(first):
            copy = graph.node_copy(node, lambda source: source)
        copy.meta = {**node.meta, MOMENT_TAG: first.meta[MOMENT_TAG], COPY_TAG: node.name}
        for user in slots[late]:
            user.replace_input_with(node, copy)


def readers_of(node: fx.Node, is_view: bool = False) -> Iterator[tuple[fx.Node, bool, bool]]:
    """Who reads a node's result, whether through a view, and whether inside a loop."""
    for user in node.users:
        if user.op == "call_function" and facts_of(user.target).is_view:
            yield from readers_of(user, True)
        else:
            yield user, is_view, _is_loop(user)


def is_inlined(node: fx.Node) -> bool:
    """True for what readers compute in their own loops, if nobody insists on memory."""
    if not _is_loop(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    facts = facts_of(node.target)
    return facts.kind in INLINED_KINDS and not facts.is_view


def _is_loop(node: fx.Node) -> bool:
    return node.op == "call_function" and facts_of(node.target).kind in FUSED_KINDS
