"""All that is known of inductor: the order of its kernels, what it fuses, how it keeps masks, the memory that it takes.

Comes in: finished halves, and inductor's kernels before code is generated. Goes out: halves rewritten for it, an order
of kernels, and the peak of what it has made.

Imports: torch_private, shared, ops, graph, sizes, rewrites, prices, memory, search, budgets, plans, ranges, write
"""

from __future__ import annotations

from .describe import describe_kernels
from .kernels import Excess, Held, PeakExceeded, Promise, held_between
from .masks import keep_as_bytes
from .order import may_fuse, planned_order
from .rewrites import keep_products_early, repeat_exponentials, write_once

__all__ = [
    "Excess",
    "Held",
    "PeakExceeded",
    "Promise",
    "describe_kernels",
    "held_between",
    "keep_as_bytes",
    "keep_products_early",
    "may_fuse",
    "planned_order",
    "repeat_exponentials",
    "write_once",
]
