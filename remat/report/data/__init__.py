"""What a report knows of one joint graph: plain data that can be stored and read back.

Imports: passes, eager, regions, compiled
"""

from __future__ import annotations

from .collecting import collect, collected, is_collecting
from .groups import Arrow, Box, arrows_of, boxes_of
from .model import FORWARD_ROLES, PAST, GraphReport, NodeRow, ReportData, duration, printable, short_source, size
from .record import Reporter, report_graph
from .stored import from_json, to_json

__all__ = [
    "FORWARD_ROLES",
    "PAST",
    "Arrow",
    "Box",
    "GraphReport",
    "NodeRow",
    "ReportData",
    "Reporter",
    "arrows_of",
    "boxes_of",
    "collect",
    "collected",
    "duration",
    "from_json",
    "is_collecting",
    "printable",
    "report_graph",
    "short_source",
    "size",
    "to_json",
]
