"""What users promise: which schedule keeps within the budgets, and what is said if none does.

Comes in: the planning problem, a budget of the graph, budgets of regions. Goes out: `Picked`, or an error that says how
low one can get, which op sets that, and which policies keep it up.

Imports: torch_private, shared, ops, graph, sizes, rewrites, prices, memory, search
"""

from __future__ import annotations

from .budget import FUSION_MARGIN, LOWEST_PLAN_OPTION, Budget, RegionShare
from .pick import Picked, pick, pick_from
from .regions import Found, choose_within_shares, meet_regions
from .text import parse_budget

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
