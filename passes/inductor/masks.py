"""Masks that wait for backward as bytes.

A vectorised loop on a CPU holds a mask as the bits of a register. It takes many times as long to write them to memory
as booleans, and to read those back, as to make numbers of them first: a loop that also kept its mask took 22 ms, and
1 ms if that was kept as a number (`python benchmarks/mask_bytes.py`). Both take a byte per element, so that plans and
peaks are the same, and what is computed is, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ..graph import PARTITIONER_TAG
from ..ops import facts_of
from ..write import Halves
from .readers import is_inlined, readers_of

_CONVERT = torch.ops.prims.convert_element_type.default
_NUMBER = torch.float32
"""What a mask is turned into on its way: loops have their bits at hand as numbers of this width."""


def keep_as_bytes(halves: Halves) -> Halves:
    """Rewrite forward's saved masks and backward's inputs where both are read in loops only."""
    forward, backward, num_fwd_outputs = halves.forward, halves.backward, halves.num_fwd_outputs
    output = forward.graph.output_node()
    returned: Any = output.args[0]
    values = list(returned)
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    own = set(values[:num_fwd_outputs])
    for k in range(num_fwd_outputs, len(values)):
        mask = values[k]
        received = inputs.get(mask.name) if isinstance(mask, fx.Node) and mask not in own else None
        if received is not None and _stays_in_loops(mask, received):
            values[k] = _to_byte(forward.graph, mask)
            _from_byte(backward.graph, received, values[k].meta["val"])
    output.args = (tuple(values),)
    forward.recompile()
    backward.recompile()
    return halves


def _stays_in_loops(mask: fx.Node, received: fx.Node) -> bool:
    """True for a mask on a CPU that is memory for no other reason than that backward reads it."""
    value = mask.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.bool or value.device.type != "cpu":
        return False
    if not is_inlined(mask) or not received.users or _is_memory_anyway(mask):
        return False
    # A view that is returned needs the mask as it is; what is returned itself is the copy for backward.
    readers = ((reader.op == "output" and not is_view) or is_loop for reader, is_view, is_loop in readers_of(mask))
    return all(readers) and all(is_loop for _, _, is_loop in readers_of(received))


def _is_memory_anyway(mask: fx.Node) -> bool:
    """True for what a compiler does not compute in its readers' loops although it makes loops of it."""
    facts = facts_of(mask.target)
    return facts.is_scatter or facts.is_concatenation or mask.target is operator.getitem


def _to_byte(graph: fx.Graph, mask: fx.Node) -> fx.Node:
    with graph.inserting_after(mask):
        number = _made(graph, _CONVERT, (mask, _NUMBER), f"{mask.name}_number", "is_forward", mask)
    with graph.inserting_after(number):
        return _made(graph, _CONVERT, (number, torch.uint8), f"{mask.name}_byte", "is_forward", mask)


def _from_byte(graph: fx.Graph, received: fx.Node, value: torch.Tensor) -> None:
    """Make a mask of the bytes again, for all that reads it."""
    readers = list(received.users)
    received.meta = {**received.meta, "val": value}
    received.meta.pop("tensor_meta", None)
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.inserting_before(min(readers, key=order.__getitem__)):
        number = _made(graph, _CONVERT, (received, _NUMBER), f"{received.name}_number", "is_backward", received)
        mask = _made(graph, torch.ops.aten.ne.Scalar, (number, 0), f"{received.name}_mask", "is_backward", received)
    for reader in readers:
        reader.replace_input_with(received, mask)


def _made(graph: fx.Graph, target: Any, args: Sequence[Any], name: str, side: str, like: fx.Node) -> fx.Node:
    """A node that does something with what another one stands for."""
    node = graph.create_node("call_function", target, tuple(args), name=name)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("desc", "tensor_meta")}
    node.meta["val"] = target(args[0].meta["val"], *args[1:])
    node.meta[PARTITIONER_TAG] = side
    return node
