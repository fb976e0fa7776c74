"""Dropout where ops run one by one, taken apart so that its mask can be kept without its result.

Torch's kernel returns a mask and the result, and drawing the mask takes ten times as long as the rest. As one op both
are kept or both are drawn again, although a mask is a quarter of its result's bytes, and the result is two products
away from it. On a CPU the kernel itself draws a mask, multiplies by it and scales: in single and double precision the
same ops one after the other give the same bits and leave the generator where it was. In half precision the kernel
rounds less often.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from ..graph import tensor_of
from ..ops import bernoulli_like_op

_aten = torch.ops.aten

_DTYPES = frozenset({torch.float32, torch.float64})


def take_dropout_apart(joint: fx.GraphModule) -> None:
    """Replace each dropout that is known to do so by what its kernel does."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=_aten.native_dropout.default):
        if _is_known(node):
            _replace(graph, node)
    joint.recompile()


def _is_known(node: fx.Node) -> bool:
    """Does the kernel draw a mask, and round after each step?"""
    source, rate, training = node.args
    value = tensor_of(source) if isinstance(source, fx.Node) else None
    return (
        value is not None
        and value.device.type == "cpu"
        and value.dtype in _DTYPES
        and value.layout is torch.strided
        and isinstance(rate, float)
        and 0.0 < rate < 1.0
        and training is True
        and all(user.target is operator.getitem for user in node.users)
    )


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    source: Any = node.args[0]
    rate: Any = node.args[1]
    with graph.inserting_before(node):
        mask = _add(graph, node, "mask", bernoulli_like_op(), source, 1.0 - rate)
        masked = _add(graph, node, "masked", _aten.mul.Tensor, source, mask)
        scaled = _add(graph, node, "scaled", _aten.mul.Scalar, masked, 1.0 / (1.0 - rate))
    for user in list(node.users):
        user.replace_all_uses_with(mask if user.args[1] == 1 else scaled)
        graph.erase_node(user)
    graph.erase_node(node)


def _add(graph: fx.Graph, dropout: fx.Node, what: str, op: Any, *args: Any) -> fx.Node:
    """An op that does a part of what a dropout does, and stands in the same place of the program."""
    node = graph.create_node("call_function", op, args, name=f"{dropout.name}_{what}")
    node.meta = {key: value for key, value in dropout.meta.items() if key != "tensor_meta"}
    node.meta["val"] = op(*[a.meta["val"] if isinstance(a, fx.Node) else a for a in args])
    return node
