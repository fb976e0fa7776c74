"""Replay of random numbers: a recomputed random op draws what it drew in forward.

Forward runs the op through `run_and_save_rng_state`, which returns the generator's state beside the result; backward
runs each copy through `run_with_rng_state`, which sets that state, draws, and puts the generator back. So recomputation
neither sees nor moves the generator that the rest of the program draws from.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from ..graph import PARTITIONER_TAG
from ..torch_private import FakeTensor, run_and_save_rng_state, run_with_rng_state, without_modes
from .halves import NODE_TAG


def save_state(
    graph: fx.Graph, node: fx.Node, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.Node, fx.Node]:
    """Add the forward run of the random op at a joint graph's position; return the nodes of its state and result."""
    state_value = _state_like(node)
    op: Any = node.target
    both = graph.call_function(run_and_save_rng_state, (op, *args), kwargs)
    both.meta = {**node.meta, "val": (state_value, node.meta.get("val")), NODE_TAG: position}
    both.meta.pop("tensor_meta", None)
    state = graph.create_node("call_function", operator.getitem, (both, 0), name=f"{node.name}_rng_state")
    state.meta = {"val": state_value, PARTITIONER_TAG: "is_forward"}
    result = graph.create_node("call_function", operator.getitem, (both, 1), name=node.name)
    result.meta = dict(node.meta)
    return state, result


def replay(graph: fx.Graph, node: fx.Node, state: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Add a backward run of a random op to `graph` that draws what forward drew."""
    op: Any = node.target
    copy = graph.create_node("call_function", run_with_rng_state, (state, op, *args), kwargs, name=node.name)
    copy.meta = dict(node.meta)
    return copy


def _state_like(node: fx.Node) -> torch.Tensor:
    """A fake tensor of the size of the generator's state on the node's device."""
    example = _first_fake(node.meta.get("val"))
    with without_modes():
        if example.device.type == "cpu":
            state = torch.get_rng_state()
        else:
            state = torch.get_device_module(example.device.type).get_rng_state()
    with example.fake_mode:
        return torch.empty(state.shape, dtype=state.dtype, device=state.device)


def _first_fake(value: Any) -> FakeTensor:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, FakeTensor):
            return item
    raise AssertionError("a random op without a fake tensor as its value")
