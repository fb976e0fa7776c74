"""Explain, observe and show: every decision with its reason, its price and its source line.

    data        what a report knows of a graph, as plain data and as JSON
    forms       text, DOT, SVG and the page; why a value is kept
    frontier    time against peak
    observed    what a step really did, op by op and byte by byte

Imports: passes, eager, regions, compiled
"""

from .observed.observation import Observation, observe
from .planned import explain
from .report import Report

__all__ = ["Observation", "Report", "explain", "observe"]
