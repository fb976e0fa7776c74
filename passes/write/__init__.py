"""From a plan to two graphs: extraction, replay of random ops, offload, and the checks on what is handed over.

Comes in: the joint graph and a schedule. Goes out: `Halves`. `verify` runs when all rewrites are done: each node of the
two graphs has to stand for a node of the joint graph.

Imports: torch_private, shared, ops, graph, sizes, rewrites, prices, memory, search, budgets, plans, ranges
"""

from __future__ import annotations

from .copies import keep_layouts
from .extract import extract
from .halves import Halves, Rewrite
from .offload import offload_values
from .ports import close_ports
from .verify import verify

__all__ = [
    "Halves",
    "Rewrite",
    "close_ports",
    "extract",
    "keep_layouts",
    "offload_values",
    "verify",
]
