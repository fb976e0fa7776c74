"""For which sizes a plan holds: where a budget in bytes ends, and what a plan costs at other sizes.

Comes in: a prepared graph with symbols and a request. Goes out: a chosen plan with guards, and rows for reports.

Imports: torch_private, shared, ops, graph, sizes, rewrites, prices, memory, search, budgets, plans
"""

from __future__ import annotations

from .limits import byte_limits
from .ranges import choose_for_range, take_for_granted
from .validity import with_ranges

__all__ = [
    "byte_limits",
    "choose_for_range",
    "take_for_granted",
    "with_ranges",
]
