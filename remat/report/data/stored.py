"""The report as JSON, and back. `schema.json` beside this file describes the form; FORMAT counts its changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...passes.plans import Plan
from .model import Alive, Drawing, GraphReport, NodeRow, ReportData, Timeline

FORMAT = 1
"""Version of the JSON form; a reader refuses what it does not know."""

KIND = "remat report"
SCHEMA = Path(__file__).with_name("schema.json")


def to_json(report: ReportData) -> str:
    """Everything as JSON text; nodes, decisions and stretches of memory take a line each, fit for diffs."""
    head = {
        "format": FORMAT,
        "kind": KIND,
        "versions": report.versions,
        "function": report.function,
        "graph_breaks": list(report.graph_breaks),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    graphs = ",\n".join(_graph_to_json(graph) for graph in report.graphs)
    lines.append(f'"graphs": [\n{graphs}\n]')
    if report.pareto is not None:
        lines.append(f'"pareto": {report.pareto.to_json().strip()}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _graph_to_json(graph: GraphReport) -> str:
    timeline = graph.timeline
    parts = {
        "plan": graph.plan.to_json().strip(),
        "nodes": _rows(json.dumps(asdict(row)) for row in graph.nodes),
        "forward": json.dumps(graph.forward),
        "forward_results": json.dumps(graph.forward_results),
        "backward_results": json.dumps(graph.backward_results),
        "timeline": "{"
        + f'\n"num_forward": {timeline.num_forward},\n"live_bytes": {json.dumps(timeline.live_bytes)},\n'
        + f'"memory": {_rows(json.dumps([m.node, m.num_bytes, m.first, m.last]) for m in timeline.memory)}\n}}',
    }
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "\n}"


def _rows(texts: Iterator[str]) -> str:
    return "[\n" + ",\n".join(texts) + "\n]"


def from_json(text: str, read_frontier: Callable[[str], Drawing]) -> dict[str, Any]:
    """Read what `to_json` wrote, as the fields of a report; graphs must name nodes that they have."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no report: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ValueError(f"this is no report: a report is a JSON object of kind {KIND!r}")
    if data.get("format") != FORMAT:
        raise ValueError(f"this report has format {data.get('format')!r}; this version of remat reads format {FORMAT}")
    try:
        graphs = tuple(_graph(graph) for graph in data["graphs"])
        breaks = tuple(str(reason) for reason in data["graph_breaks"])
        versions = {str(k): str(v) for k, v in data["versions"].items()}
        pareto = read_frontier(json.dumps(data["pareto"])) if "pareto" in data else None
        return {
            "graphs": graphs,
            "function": str(data["function"]),
            "graph_breaks": breaks,
            "versions": versions,
            "pareto": pareto,
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"this report is damaged: {error}") from error


def _graph(data: dict[str, Any]) -> GraphReport:
    timeline = data["timeline"]
    graph = GraphReport(
        plan=Plan.from_json(json.dumps(data["plan"])),
        nodes=tuple(_node(row) for row in data["nodes"]),
        forward=tuple(data["forward"]),
        forward_results=tuple(data["forward_results"]),
        backward_results=tuple(data["backward_results"]),
        timeline=Timeline(
            num_forward=int(timeline["num_forward"]),
            live_bytes=tuple(int(n) for n in timeline["live_bytes"]),
            memory=tuple(
                Alive(str(node), int(n), int(first), int(last)) for node, n, first, last in timeline["memory"]
            ),
        ),
    )
    used = (*graph.moments, *graph.forward_results, *graph.backward_results, *(m.node for m in graph.timeline.memory))
    unknown = next((name for name in used if name not in graph.row), None)
    if unknown is not None:
        raise ValueError(f"it speaks of `{unknown}`, which its graph has not")
    return graph


def _node(data: dict[str, Any]) -> NodeRow:
    names = {field.name for field in fields(NodeRow)}
    if set(data) != names:
        raise ValueError(f"a node has the fields {sorted(data)}, expected {sorted(names)}")
    return NodeRow(**{**data, "inputs": tuple(data["inputs"])})
