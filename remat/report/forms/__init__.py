"""A report in every form: text, DOT, SVG, a page; and why a value is kept.

Imports: passes, eager, regions, compiled, report.data
"""

from __future__ import annotations

from .chart import Mark, Series, chart
from .diff import compare, load_plans
from .dot import dot
from .html import notebook_cell, page
from .svg import svg
from .text import dump, summary
from .why import Why, why

__all__ = [
    "Mark",
    "Series",
    "Why",
    "chart",
    "compare",
    "dot",
    "dump",
    "load_plans",
    "notebook_cell",
    "page",
    "summary",
    "svg",
    "why",
]
