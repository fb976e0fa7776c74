"""What users promise: which schedule keeps within the budgets, and what is said if none does.

Comes in: the planning problem, a budget of the graph, budgets of regions. Goes out: `Picked`, or an error that says how
low one can get, which op sets that, and which policies keep it up.

Imports: torch_private, shared, ops, graph, sizes, rewrites, prices, memory, search
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .budget import FUSION_MARGIN, LOWEST_PLAN_OPTION, Budget, RegionShare
from .text import parse_budget

if TYPE_CHECKING:
    from .picking import Picked, pick, pick_from
    from .regions import Found, choose_within_shares, meet_regions

__all__ = [
    "FUSION_MARGIN",
    "LOWEST_PLAN_OPTION",
    "Budget",
    "Found",
    "Picked",
    "RegionShare",
    "choose_within_shares",
    "meet_regions",
    "parse_budget",
    "pick",
    "pick_from",
]


def __getattr__(name: str) -> Any:
    """Load what leads to the planners when it is first used: who only reads a budget needs none of them."""
    if name in ("Picked", "pick", "pick_from"):
        return getattr(import_module(f"{__name__}.picking"), name)
    if name in ("Found", "choose_within_shares", "meet_regions"):
        return getattr(import_module(f"{__name__}.regions"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
