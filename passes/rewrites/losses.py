"""Losses copied out of the memory that some kernels leave them in, where ops run one by one.

Torch's kernels for a few losses write the loss of each element to memory, sum that up, and return the sum in the same
memory: one number that keeps as much alive as the whole input takes, all through backward. A copy of it does not.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..graph import tensor_of
from ..ops import facts_of


def copy_losses_out(joint: fx.GraphModule) -> None:
    """Put a copy behind each sum that is in the memory of what it sums up."""
    graph = joint.graph
    large = [node for node in graph.nodes if node.op == "call_function" and holds_elements(node)]
    for node in large:
        with graph.inserting_after(node):
            copy = graph.create_node("call_function", torch.ops.aten.clone.default, (node,), name=f"{node.name}_alone")
        copy.meta = {key: value for key, value in node.meta.items() if key not in ("desc", "tensor_meta")}
        copy.meta["val"] = node.meta["val"].clone()
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    if large:
        joint.recompile()


def holds_elements(node: fx.Node) -> bool:
    """True for a loss in whose memory there is room for that of each element."""
    value = tensor_of(node)
    return facts_of(node.target).holds_elements and value is not None and value.dim() == 0
