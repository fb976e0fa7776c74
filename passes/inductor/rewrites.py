"""What is changed in finished graphs so that inductor's kernels do with memory what the plan says.

A compiler may compute a result twice. What a kernel of its own reads through a view is copied for it, and who reads the
same result later computes it again from what it was made of, which has to live until then. Such results are to be
written to memory once.

It may make one op of a product and what is added to it, and run that where the sum was. If the other summand is there
only much later (the gradients of a weight that is used twice), what the product reads would have to live until then:
such products and sums stay apart.

And it may not compute a result twice that a plan counts on: on a CPU the result of an exponential that several loops
read is written to memory, and stays there until the last of them. Such a loop is repeated at each moment that reads it.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..memory import COPY_TAG, MOMENT_TAG
from ..ops import INLINED_KINDS, facts_of
from ..torch_private import REALIZE_TAG
from ..write import Halves
from .readers import is_inlined, is_loop, readers_of

_ADD, _TIMES, _PRODUCT = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.mm.default


def write_once(halves: Halves) -> Halves:
    """Have results written to memory that a kernel reads through a view and a loop reads, too."""
    for node in (*halves.forward.graph.nodes, *halves.backward.graph.nodes):
        if not is_inlined(node):
            continue
        readers = list(readers_of(node))
        feeds_kernel = any(is_view and reader.op == "call_function" and not loop for reader, is_view, loop in readers)
        if feeds_kernel and any(loop for _, _, loop in readers):
            node.meta[REALIZE_TAG] = True
    return halves


def keep_products_early(halves: Halves) -> Halves:
    """Have products of backward run when the plan runs them, although something is added to them much later."""
    graph = halves.backward.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _ADD or MOMENT_TAG not in node.meta:
            continue
        summands = [arg for arg in node.args if isinstance(arg, fx.Node) and MOMENT_TAG in arg.meta]
        last = max((arg.meta[MOMENT_TAG].slot for arg in summands), default=0)
        for product in summands:
            if product.target is _PRODUCT and product.meta[MOMENT_TAG].slot < last:
                _hide(graph, product, node)
    return halves


def _hide(graph: fx.Graph, product: fx.Node, reader: fx.Node) -> None:
    """Put a loop that changes nothing between a product and the sum that reads it: compilers look for the pair."""
    with graph.inserting_before(reader):
        same = graph.create_node("call_function", _TIMES, (product, 1), name=f"{product.name}_apart")
    same.meta = {**product.meta, MOMENT_TAG: reader.meta[MOMENT_TAG]}
    reader.replace_input_with(product, same)


def repeat_exponentials(halves: Halves) -> Halves:
    """Have loops with an exponential computed at each moment of backward that reads them, and not kept in between."""
    graph = halves.backward.graph
    repeated: set[fx.Node] = set()
    for node in graph.nodes:
        if _can_repeat(node) and (
            facts_of(node.target).is_exponential or not repeated.isdisjoint(node.all_input_nodes)
        ):
            repeated.add(node)
    for node in reversed(list(graph.nodes)):
        if node in repeated:
            _repeat_at_each_slot(graph, node)
    return halves


def _can_repeat(node: fx.Node) -> bool:
    """True for a loop or a view that may be computed again and that nobody wants in memory."""
    if not is_loop(node) or node.meta.get(REALIZE_TAG) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    facts = facts_of(node.target)
    return facts.kind in INLINED_KINDS and facts.is_pure


def _repeat_at_each_slot(graph: fx.Graph, node: fx.Node) -> None:
    users = list(node.users)
    if not all(MOMENT_TAG in user.meta and is_loop(user) for user in users):
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
