"""The report as one page: no network, no library, light and dark, and usable with ten thousand decisions.

All that comes from the user's program reaches the page as JSON data, which the script writes as text, never as markup;
the picture is escaped where it is drawn. The page's policy allows no other script than its own, by its digest, and no
connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from ...passes.plans import general_text, size_lines
from ..data import GraphReport, ReportData, printable
from .svg import svg

KINDS = ("saved", "recomputed", "other")
"""What memory is there for, in the order in which the timeline stacks it."""


def page(report: ReportData) -> str:
    """A whole page."""
    script, style = _asset("page.js"), _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = printable(f"remat: {report.function or 'report'}")
    frontier = "" if report.pareto is None else f"<section><h2>Time for memory</h2>{report.pareto.to_svg()}</section>"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main id='report'>"
        f"<noscript>This page needs scripts for its table and timeline; the picture below does not.</noscript></main>\n"
        f"{frontier}\n<section><details id='picture'><summary>Picture of forward and backward</summary>"
        f'<div class="scroll">{svg(report)}</div></details></section>\n'
        f'<script type="application/json" id="data">{_embedded(_data(report))}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def notebook_cell(report: ReportData) -> str:
    """The page in a frame of its own, which nothing in a notebook can reach and which reaches nothing."""
    source = escape(page(report), quote=True)
    return f'<iframe srcdoc="{source}" sandbox="allow-scripts" style="width:100%;height:720px;border:0"></iframe>'


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that may stand inside a script element: no `<` ends it, and nothing in it is markup."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(report: ReportData) -> dict[str, Any]:
    return {
        "function": report.function,
        "versions": report.versions,
        "breaks": list(report.graph_breaks),
        "graphs": [_graph(graph) for graph in report.graphs],
    }


def _graph(graph: GraphReport) -> dict[str, Any]:
    plan, timeline = graph.plan, graph.timeline
    return {
        "nodes": [
            [row.name, row.op, row.arguments, row.value, row.num_bytes, row.region, row.module, row.label, row.source]
            for row in graph.nodes
        ],
        "decisions": [
            [
                graph.position[d.value],
                graph.state_of(d.value),
                d.reason.value,
                d.num_bytes,
                d.num_recomputes,
                d.save_seconds,
                d.recompute_seconds,
                d.policy,
                graph.row[d.value].no_save,
                graph.row[d.value].no_recompute,
                int(graph.row[d.value].is_view),
                general_text(d),
            ]
            for d in plan.decisions
        ],
        "forward": [graph.position[name] for name in graph.forward],
        "backward": [graph.position[name] for name in plan.order],
        "live": list(timeline.live_bytes),
        "memory": [
            [graph.position[m.node], m.num_bytes, m.first, m.last, KINDS.index(graph.kind_of(m))]
            for m in timeline.memory
        ],
        "peak": {**asdict(plan.peak), "moment": timeline.peak_moment},
        "saved_bytes": plan.saved_bytes,
        "recomputed_bytes": plan.recomputed_bytes,
        "recompute_seconds": plan.recompute_seconds,
        "budget_bytes": plan.budget_bytes,
        "whole_bytes": plan.peak_without_recompute_bytes,
        "budget_note": plan.budget_text(),
        "num_nodes": plan.num_nodes,
        "sizes": [list(line) for line in (*plan.share_lines(), *size_lines(plan))],
    }
