"""Refuse to plan for a budget with sizes of which nothing is known."""

from __future__ import annotations

from typing import Any

import torch

from ..graph import JointGraph
from ..shared import OptionError, source_line
from ..torch_private import expression_of
from .symbols import Sizes


def require_known(graph: JointGraph, sizes: Sizes, budget: str) -> None:
    """Raise an error if a budget would be planned for with a guess."""
    if not sizes.guessed:
        return
    rows = [f"  {symbol.name}: {_first_use(graph, symbol)}" for symbol in sizes.guessed]
    raise OptionError(
        f"memory_budget={budget}: the sizes of some values are known only once the data is there, and nothing bounds "
        "them:\n" + "\n".join(rows) + "\nSay how large they get: torch._check(n <= limit) in the program, "
        'or options={"unbacked_hint": n} for all of them. Without a budget none of this is needed.'
    )


def _first_use(graph: JointGraph, symbol: Any) -> str:
    """The node whose result has a size first, with its line."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and any(_has(size, symbol) for size in tensor.shape):
                source = source_line(node.stack_trace or "")
                return f"`{node.name}` ({node.target})" + (f", {source}" if source else "")
    raise AssertionError(f"{symbol} is in no size of the graph")


def _has(size: int | torch.SymInt, symbol: Any) -> bool:
    return isinstance(size, torch.SymInt) and symbol in expression_of(size).free_symbols
