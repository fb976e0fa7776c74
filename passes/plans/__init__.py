"""The plan: all decisions of one joint graph with reasons and prices, as data that can be stored and applied again.

Comes in: a picked schedule, or a stored plan. Goes out: `Plan` and `Chosen`, which is a plan with its schedule.

Imports: torch_private, shared, ops, graph, sizes, rewrites, prices, memory, search, budgets
"""

from __future__ import annotations

from .contents import Action, Decision, SymbolRange, TimeExpressions
from .keeping import Runs
from .plan import Plan, plans_from_json
from .request import Prepared, Request
from .sizes import general_text, plans_at, size_lines
from .stored import apply_plan, schedule_from
from .write_plan import Chosen, choose_plan, write_plan

__all__ = [
    "Action",
    "Chosen",
    "Decision",
    "Plan",
    "Prepared",
    "Request",
    "Runs",
    "SymbolRange",
    "TimeExpressions",
    "apply_plan",
    "choose_plan",
    "general_text",
    "plans_at",
    "plans_from_json",
    "schedule_from",
    "size_lines",
    "write_plan",
]
