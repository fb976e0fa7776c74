"""What changed between two plans, and what it costs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ...compiled import no_frontier
from ...passes.plans import Action, Decision, Plan, plans_from_json
from ...passes.shared import parsed_file
from ..data import PAST, duration, printable, short_source, size

NUM_SHOWN = 40
"""How many changes of a graph are printed."""


@dataclass(frozen=True, slots=True)
class Change:
    """One value that is treated differently; an action is empty where that plan does not have the value."""

    value: str
    before: str
    after: str
    num_bytes: int
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class GraphDiff:
    """Two plans for the same place in a program."""

    number: int
    is_same_graph: bool
    """Both plans were made for the same joint graph."""
    changes: tuple[Change, ...]
    saved_bytes: tuple[int, int]
    peak_bytes: tuple[int, int]
    recompute_seconds: tuple[float, float]
    is_same_order: bool
    """Backward runs the same nodes in the same order."""

    @property
    def is_different(self) -> bool:
        """True if a step would do something else."""
        return bool(self.changes) or not self.is_same_order or not self.is_same_graph


@dataclass(frozen=True, slots=True)
class Diff:
    """All graphs of two reports."""

    graphs: tuple[GraphDiff, ...]
    num_graphs: tuple[int, int]

    @property
    def is_different(self) -> bool:
        """True if a step would do something else."""
        return self.num_graphs[0] != self.num_graphs[1] or any(graph.is_different for graph in self.graphs)

    def __str__(self) -> str:
        lines = []
        if self.num_graphs[0] != self.num_graphs[1]:
            lines.append(f"{self.num_graphs[0]} graphs before, {self.num_graphs[1]} after; comparing what both have")
        for graph in self.graphs:
            lines += _lines(graph, len(self.graphs) > 1)
        return "\n".join(printable(line) for line in lines)

    def to_json(self) -> str:
        """All changes as JSON text."""
        graphs = [{**asdict(graph), "is_different": graph.is_different} for graph in self.graphs]
        return json.dumps(
            {"is_different": self.is_different, "num_graphs": self.num_graphs, "graphs": graphs}, indent=1
        )


def load_plans(path: str | os.PathLike[str]) -> tuple[Plan, ...]:
    """The plans of a file that holds one plan or a report."""
    return parsed_file(path, lambda text: plans_from_json(no_frontier(text, path)))


def compare(before: Sequence[Plan], after: Sequence[Plan]) -> Diff:
    """Compare plans pair by pair, in their order."""
    pairs = zip(before, after, strict=False)
    graphs = tuple(_compare(number, a, b) for number, (a, b) in enumerate(pairs))
    return Diff(graphs, (len(before), len(after)))


def _compare(number: int, before: Plan, after: Plan) -> GraphDiff:
    old, new = ({d.value: d for d in plan.decisions} for plan in (before, after))
    changes = [_change(old.get(name), new.get(name)) for name in dict.fromkeys((*old, *new))]
    return GraphDiff(
        number=number,
        is_same_graph=before.graph == after.graph,
        changes=tuple(sorted((c for c in changes if c is not None), key=lambda c: -c.num_bytes)),
        saved_bytes=(before.saved_bytes, after.saved_bytes),
        peak_bytes=(before.peak.num_bytes, after.peak.num_bytes),
        recompute_seconds=(before.recompute_seconds, after.recompute_seconds),
        is_same_order=before.order == after.order,
    )


def _change(old: Decision | None, new: Decision | None) -> Change | None:
    states = [_state(d) for d in (old, new)]
    if states[0] == states[1]:
        return None
    shown = new or old
    assert shown is not None
    return Change(shown.value, states[0], states[1], shown.num_bytes, shown.reason.value, shown.source)


def _state(decision: Decision | None) -> str:
    if decision is None:
        return ""
    times = f" x{decision.num_recomputes}" if decision.num_recomputes > 1 else ""
    return PAST[decision.action] + (times if decision.action is Action.RECOMPUTE else "")


def _lines(graph: GraphDiff, has_number: bool) -> Iterator[str]:
    if has_number:
        yield f"graph {graph.number}"
    if not graph.is_same_graph:
        yield "the plans were made for different graphs; values are compared by name"
    if not graph.is_different:
        yield "no difference"
        return
    yield f"  saved      {_step(*(size(n) for n in graph.saved_bytes))}"
    yield f"  peak       {_step(*(size(n) for n in graph.peak_bytes))}  (predicted)"
    yield f"  recompute  {_step(*(duration(s) for s in graph.recompute_seconds))}  (estimated)"
    if not graph.changes:
        yield "  the same decisions; backward runs in another order"
    for change in graph.changes[:NUM_SHOWN]:
        states = f"{change.before or 'not needed'} -> {change.after or 'not needed'}"
        source = short_source(change.source)
        yield f"  {change.value:24} {size(change.num_bytes):>11}  {states}: {change.reason}  {source}"
    if len(graph.changes) > NUM_SHOWN:
        yield f"  … and {len(graph.changes) - NUM_SHOWN} smaller ones"


def _step(before: str, after: str) -> str:
    return f"{before:>11} -> {after:>11}"
