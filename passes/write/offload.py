"""Offloading: a value that a policy sends to host memory leaves forward as a copy there and comes back in backward.

On an accelerator the copy out goes to pinned memory without waiting, and the copy back is placed right before its
first reader. On the CPU there is no other memory to go to, and both are plain copies, as in the eager engine. Where the
region says that offloaded values go to a disk, the copy out is one whose memory is a file.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from ..graph import PARTITIONER_TAG, is_offloaded, region_of
from ..ops import to_disk_op
from .halves import NODE_TAG, Halves

_COPY = torch.ops.aten._to_copy.default
_CLONE = torch.ops.aten.clone.default


def offload_values(halves: Halves) -> Halves:
    """Rewrite forward's saved values and backward's inputs for what is to wait in host memory."""
    forward, backward, num_fwd_outputs = halves.forward, halves.backward, halves.num_fwd_outputs
    output = forward.graph.output_node()
    returned: Any = output.args[0]
    values = list(returned)
    inputs = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    saved = [k for k in range(num_fwd_outputs, len(values)) if is_offloaded(values[k])]
    for k in saved:
        received = inputs[values[k].name]
        is_on_disk = _disk_folder_of(values[k]) is not None
        values[k] = _copy_out(forward.graph, values[k])
        _copy_back(backward.graph, received, values[k].meta["val"], is_on_disk=is_on_disk)
    if saved:
        output.args = (tuple(values),)
        forward.recompile()
        backward.recompile()
    return halves


def _copy_out(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A copy in host memory, taken as soon as the value is there."""
    value = node.meta["val"]
    name, folder = f"{node.name}_offloaded", _disk_folder_of(node)
    with graph.inserting_after(node):
        if folder is not None:
            copy = _copy_on_disk(graph, node, folder, name)
        else:
            copy = _copy_of(graph, node, torch.device("cpu"), name, pinned=value.device.type != "cpu")
    copy.meta[PARTITIONER_TAG] = "is_forward"
    return copy


def _copy_back(graph: fx.Graph, received: fx.Node, host_value: Any, *, is_on_disk: bool) -> None:
    """Bring a value back before its first reader."""
    device = received.meta["val"].device
    readers = list(received.users)
    received.meta = {**received.meta, "val": host_value}
    received.meta.pop("tensor_meta", None)
    if not readers or (is_on_disk and device.type == "cpu"):
        return  # reading it is what brings it back
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.inserting_before(min(readers, key=order.__getitem__)):
        copy = _copy_of(graph, received, device, f"{received.name}_reloaded", pinned=False)
    copy.meta[PARTITIONER_TAG] = "is_backward"
    copy.meta["autograd_backward"] = True
    for reader in readers:
        reader.replace_input_with(received, copy)


def _disk_folder_of(node: fx.Node) -> str | None:
    """The folder of the region whose policy offloads a value; None for host memory."""
    region = region_of(node)
    if region is None and node.target is operator.getitem:
        region = region_of(node.all_input_nodes[0])
    return None if region is None else region.disk_folder


def _copy_on_disk(graph: fx.Graph, node: fx.Node, folder: str, name: str) -> fx.Node:
    copy = graph.create_node("call_function", to_disk_op(), (node, folder), name=name)
    copy.meta = _meta_of_copy(node, node.meta["val"].to("cpu"))
    return copy


def _meta_of_copy(node: fx.Node, value: Any) -> dict[str, Any]:
    kept = {key: kept for key, kept in node.meta.items() if key not in ("desc", "tensor_meta", NODE_TAG)}
    return {**kept, "val": value}


def _copy_of(graph: fx.Graph, node: fx.Node, device: torch.device, name: str, *, pinned: bool) -> fx.Node:
    value = node.meta["val"]
    if value.device == device:
        copy = graph.create_node("call_function", _CLONE, (node,), name=name)
        new_value = value.clone()
    else:
        options: dict[str, Any] = {"device": device, "non_blocking": True}
        if pinned:
            options["pin_memory"] = True
        copy = graph.create_node("call_function", _COPY, (node,), options, name=name)
        new_value = value.to(device)
    copy.meta = _meta_of_copy(node, new_value)
    return copy
