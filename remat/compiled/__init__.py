"""Compilation: options, machine constants, agreement between ranks, the backend and the partition function.

Comes in: Dynamo graphs and what users ask for. Goes out: compiled code, split by `passes.pipeline.run`. Who wants to
see the plans is handed in as a watcher.

Imports: passes, eager, regions
"""

from __future__ import annotations

from .asked import check_call
from .backend import compile_graph
from .budgeted import PlannedRegion
from .capture import Captured, Split, capture
from .options import Options, no_frontier
from .partitioner import Partitioner, paused_collector

__all__ = [
    "Captured",
    "Options",
    "Partitioner",
    "PlannedRegion",
    "Split",
    "capture",
    "check_call",
    "compile_graph",
    "no_frontier",
    "paused_collector",
]
