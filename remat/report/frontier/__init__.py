"""The frontier of time against peak: plans for ever smaller budgets.

Imports: passes, eager, regions, compiled, report.data, report.forms
"""

from __future__ import annotations

from . import frontier
from .frontier import FRONTIER_FORMS, Pareto, Progress, pareto

__all__ = [
    "FRONTIER_FORMS",
    "Pareto",
    "Progress",
    "frontier",
    "pareto",
]
