"""Ports: where a value leaves its region.

What a region returns belongs to the outside, which keeps it if it needs it, while the region's own backward recomputes
it like all else inside. One value thus needs two decisions. So each value that leaves a region gets a port, a
stand-in without cost that the outside reads. It can be saved like any value of the outside, and cannot be recomputed.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..graph import PORT_TAG, is_tagged_backward, policy_of, region_of, region_of_formula, repair_tags, tensor_of, untag
from ..shared import RECOMPUTES


def open_ports(joint: fx.GraphModule) -> None:
    """Put a port behind every value that leaves a region in which it is not saved."""
    graph = joint.graph
    repair_tags(graph.nodes)
    for node in list(graph.nodes):
        if region_of(node) is None or policy_of(node) not in RECOMPUTES or tensor_of(node) is None:
            continue
        outside = [user for user in node.users if user.op != "output" and not _is_inside(user, node)]
        # A formula of the outside reads only what an op of the outside has read in forward. Where none has, the
        # formula is one of the region's own that has lost its tag.
        if any(not _is_backward(user) for user in outside):
            _add_port(graph, node, outside)


def _is_backward(node: fx.Node) -> bool:
    return is_tagged_backward(node) or bool(node.meta.get("autograd_backward"))


def _is_inside(user: fx.Node, node: fx.Node) -> bool:
    """True if a reader belongs to the same call of an outermost region as the value."""
    own, other = region_of(node), region_of_formula(user)
    return own is not None and other is not None and own.number == other.number


def _add_port(graph: fx.Graph, node: fx.Node, outside: list[fx.Node]) -> None:
    with graph.inserting_after(node):
        port = graph.create_node("call_function", torch.ops.aten.alias.default, (node,), name=f"{node.name}_out")
    port.meta = dict(node.meta)
    untag(port)
    port.meta[PORT_TAG] = True
    for user in outside:
        user.replace_input_with(node, port)
