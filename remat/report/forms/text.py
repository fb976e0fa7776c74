"""The report as text: a summary that fits a terminal, and the graph line by line, each line with its decision.

Order is that of the graph and of the schedule, paths are shortened to their last parts, and no figure depends on when
or where the dump was written: dumps can be compared line by line.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...passes.plans import Decision, general_text, size_lines
from ..data import GraphReport, NodeRow, ReportData, duration, printable, short_source, size

NUM_LARGEST = 10
WIDTH = 100
"""Columns that the summary keeps within."""
CODE_WIDTH = 64
"""Where the decision of a line begins, if its code is not longer."""


def summary(report: ReportData) -> str:
    """A screen of text: totals, peak and largest values of every graph."""
    parts = ["\n".join(_graph_summary(report, number)) for number in range(len(report.graphs))]
    if report.graph_breaks:
        breaks = [f"  {_clipped(reason, WIDTH - 2)}" for reason in report.graph_breaks]
        parts.insert(0, "\n".join([f"graph breaks: {len(breaks)}", *breaks]))
    return "\n\n".join(parts)


def dump(report: ReportData) -> str:
    """The summary, then every graph line by line."""
    parts = [summary(report)]
    for number, graph in enumerate(report.graphs):
        parts.append("\n".join([f"graph {number}", *graph_lines(graph)]))
    return "\n\n".join(parts) + "\n"


def _graph_summary(report: ReportData, number: int) -> Iterator[str]:
    graph = report.graphs[number]
    plan = graph.plan
    title = f"{report.function}: " if report.function else ""
    which = f"graph {number}, " if len(report.graphs) > 1 else ""
    yield _clipped(f"{title}{which}{plan.num_nodes} nodes; backward needs {len(plan.decisions)} forward values", WIDTH)
    yield f"  saved       {len(plan.saved):6}  {size(plan.saved_bytes):>12}"
    yield (
        f"  recomputed  {len(plan.recomputed):6}  {size(plan.recomputed_bytes):>12}  "
        f"for {duration(plan.recompute_seconds)} (estimated)"
    )
    if plan.offloaded:
        yield f"  offloaded   {len(plan.offloaded):6}  {size(sum(d.num_bytes for d in plan.offloaded)):>12}"
    peak = plan.peak
    where = f"{'forward' if peak.in_forward else 'backward'} at {peak.node}"
    yield _clipped(f"  peak                {size(peak.num_bytes):>12}  {where}, predicted for {peak.executor}", WIDTH)
    if peak.source:
        yield f"  {'':32}  {_clipped(short_source(peak.source), WIDTH - 36)}"
    if plan.budget_bytes is not None:
        yield f"  budget              {size(plan.budget_bytes):>12}  {plan.budget_text()}"
    if plan.peak_without_recompute_bytes is not None:
        yield f"  keeping everything  {size(plan.peak_without_recompute_bytes):>12}"
    for title, text in (*plan.share_lines(), *size_lines(plan)):
        yield _clipped(f"  {title:18}  {text}", max(WIDTH, 36 + len(text)))
    yield from _largest(graph)


def _largest(graph: GraphReport) -> Iterator[str]:
    """The values that take most, whatever became of them; a view takes nothing."""
    decided = [d for d in graph.plan.decisions if not graph.row[d.value].is_view]
    largest = sorted(decided, key=lambda d: -d.num_bytes)[:NUM_LARGEST]
    if not largest:
        return
    yield "  largest values"
    width = min(24, max(len(_shown(d)) for d in largest))
    for d in largest:
        value = f"{_clipped(_shown(d), width):{width}}  {size(d.num_bytes):>11}"
        yield _clipped(f"    {value}  {_state(graph, d):11}  {d.reason.value}", WIDTH)


def _shown(decision: Decision) -> str:
    return f"{decision.value} ({decision.name})" if decision.name else decision.value


def _state(graph: GraphReport, decision: Decision) -> str:
    state = graph.state_of(decision.value)
    return f"{state} x{decision.num_recomputes}" if decision.num_recomputes else state


def graph_lines(graph: GraphReport) -> Iterator[str]:
    """A graph as it is run: inputs, forward and backward, each line with what was decided on it."""
    yield "inputs"
    for row in graph.nodes:
        if row.op in ("placeholder", "get_attr"):
            yield from _line(row, _input_notes(graph, row))
    yield "forward"
    for name in graph.forward:
        yield from _line(graph.row[name], _notes(graph, graph.row[name]))
    yield printable(f"  return {', '.join(graph.forward_results)}")
    yield "backward"
    runs: dict[str, int] = {}
    for name in graph.plan.order:
        runs[name] = runs.get(name, 0) + 1
        yield from _line(graph.row[name], _backward_notes(graph, graph.row[name], runs[name]))
    yield printable(f"  return {', '.join(graph.backward_results)}")


def _line(row: NodeRow, notes: list[str]) -> Iterator[str]:
    code = f"  {row.name} = {_op(row.op)}({row.arguments})  {row.value}"
    yield printable(f"{code:{CODE_WIDTH}}  # {'; '.join(notes)}" if notes else code)


def _op(op: str) -> str:
    """An op's name without what all of them have."""
    return op.removesuffix(".default")


def _input_notes(graph: GraphReport, row: NodeRow) -> list[str]:
    notes = [size(row.num_bytes)] if row.num_bytes else []
    return [*_decision_notes(graph, row)] or notes


def _notes(graph: GraphReport, row: NodeRow) -> list[str]:
    return [*_decision_notes(graph, row), *_origin(row)]


def _decision_notes(graph: GraphReport, row: NodeRow) -> Iterator[str]:
    decision = graph.decision.get(row.name)
    if decision is not None:
        yield f"{_state(graph, decision)}: {decision.reason.value}"
        general = general_text(decision)
        yield size(decision.num_bytes) + (f" = {general}" if decision.expression else f", {general}" if general else "")
    elif row.base and row.base != row.name and row.base in graph.decision:
        yield f"view of {row.base}"


def _backward_notes(graph: GraphReport, row: NodeRow, run: int) -> list[str]:
    if row.role == "BACKWARD":
        return list(_origin(row))
    total = graph.num_runs_in_backward[row.name]
    again = "only backward needs it" if row.role == "EITHER" else "recomputed"
    return [again if total == 1 else f"{again}, run {run} of {total}", size(row.num_bytes), *_origin(row)]


def _origin(row: NodeRow) -> Iterator[str]:
    """Where in the program a line comes from."""
    if row.label:
        yield f"name {row.label}"
    if row.region:
        yield f"region {row.region}"
    if row.policy:
        yield row.policy
    if row.module:
        yield f"module {row.module}"
    if row.source:
        yield short_source(row.source)


def _clipped(text: str, width: int) -> str:
    text = printable(text)
    return text if len(text) <= width else text[: width - 1] + "…"
