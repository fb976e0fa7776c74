"""Explain, observe and show: every decision with its reason, its price and its source line.

    data        what a report knows of a graph, as plain data and as JSON
    forms       text, DOT, SVG and the page; why a value is kept
    frontier    time against peak
    observed    what a step really did, op by op and byte by byte

Imports: passes, eager, regions, compiled
"""

from __future__ import annotations

from .forms import compare, load_plans
from .frontier import FRONTIER_FORMS, frontier, pareto
from .observed import Observation, observe
from .planned import explain
from .publishing import Publisher
from .report import FORMS, Report

__all__ = [
    "FORMS",
    "FRONTIER_FORMS",
    "Observation",
    "Publisher",
    "Report",
    "compare",
    "explain",
    "frontier",
    "load_plans",
    "observe",
    "pareto",
]
