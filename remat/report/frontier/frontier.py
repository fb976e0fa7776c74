"""The frontier of time and activation peak: how fast a training step can be for the memory it may take.

The function is traced and planned for a ladder of budgets, from the peak without recomputation down to the lowest one
that any plan reaches. Points that another one beats in both time and peak are dropped. Each point has its plan, which
can be stored and applied.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch.fx as fx

from ...compiled import Captured, Options, Partitioner, Split, capture, check_call
from ...passes.budgets import Budget, Found, Picked, RegionShare, choose_within_shares, meet_regions
from ...passes.memory import Shares, verify_schedule
from ...passes.pipeline import Observer, run
from ...passes.plans import Chosen, Plan, Prepared, write_plan
from ...passes.prices import TICKS_PER_SECOND
from ...passes.search import Bench, Offer, Planner
from ...passes.shared import OptionError, RematError, duration, form_of, parsed_file, size, size_unit, time_unit
from ..forms import Mark, Series, chart

FORMAT = 1
"""Version of the JSON form."""

DIGITS = 4
"""How exactly extra times are printed: those of neighbours may differ by less than a hundredth."""

FRONTIER_FORMS = (".svg", ".html", ".json", ".txt")
"""The suffixes of files that a frontier can be saved as."""

NUM_BUDGETS = 16
"""How many budgets are asked for between the highest and the lowest peak, unless told."""

ANY_BUDGET = Budget(text="pareto", fraction=1.0)
"""The frontier is one of budgets: what a policy prefers is a price on it."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One plan on the frontier."""

    peak_bytes: int
    """Its predicted activation peak."""
    extra_seconds: float
    """What it adds to a step of the fastest plan, as far as the cost model knows."""
    plan: Plan


@dataclass(frozen=True, slots=True)
class Frontier:
    """The plans of one joint graph that no other found plan beats in both peak and time, fastest first."""

    points: tuple[Point, ...]
    peak_without_recompute_bytes: int
    """The predicted peak if everything that backward reads were kept."""
    num_nodes: int
    """Nodes of the joint graph."""

    @property
    def lowest_peak_bytes(self) -> int:
        """The lowest activation peak that a plan reaches."""
        return self.points[-1].peak_bytes

    def within(self, budget_bytes: int) -> Point | None:
        """The fastest point whose peak fits; None if none does."""
        return next((point for point in self.points if point.peak_bytes <= budget_bytes), None)

    def __str__(self) -> str:
        whole = self.peak_without_recompute_bytes
        lines = [
            f"joint graph of {self.num_nodes} nodes; peak without recompute {size(whole)}",
            f"  {'peak':>13}  {'of that':>7}  {'extra time':>11}  {'saved':>13}  planner",
        ]
        for point in self.points:
            lines.append(
                f"  {size(point.peak_bytes):>13}  {point.peak_bytes / max(whole, 1):>7.1%}  "
                f"{duration(point.extra_seconds, DIGITS):>11}  {size(point.plan.saved_bytes):>13}  {point.plan.planner}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Pareto:
    """The frontier of every joint graph of a function."""

    graphs: tuple[Frontier, ...]
    """One frontier per joint graph, in the order in which they were traced."""
    graph_break: str
    """Why there are several graphs, each break with its line; empty if the function is one graph."""

    @property
    def largest(self) -> Frontier:
        """The frontier of the graph with the highest peak without recompute."""
        return max(self.graphs, key=lambda graph: graph.peak_without_recompute_bytes)

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of the largest graph."""
        return self.largest.points

    def __str__(self) -> str:
        parts = [str(graph) for graph in self.graphs]
        if len(parts) > 1:
            reason = f": {self.graph_break}" if self.graph_break else ""
            parts.insert(0, f"{len(self.graphs)} joint graphs{reason}")
        return "\n\n".join(parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the frontier in the form that the file's suffix names: .svg, .html, .json (with all plans) or .txt."""
        writers: tuple[Callable[[], str], ...] = (self.to_svg, self.to_html, self.to_json, lambda: f"{self}\n")
        write = dict(zip(FRONTIER_FORMS, writers, strict=True))[form_of(path, FRONTIER_FORMS)]
        Path(path).write_text(write(), encoding="utf-8")

    def to_json(self) -> str:
        """All figures and plans as JSON text."""
        graphs = [
            {
                "num_nodes": graph.num_nodes,
                "peak_without_recompute_bytes": graph.peak_without_recompute_bytes,
                "points": [
                    {
                        "peak_bytes": point.peak_bytes,
                        "extra_seconds": point.extra_seconds,
                        "plan": json.loads(point.plan.to_json()),
                    }
                    for point in graph.points
                ],
            }
            for graph in self.graphs
        ]
        return json.dumps({"format": FORMAT, "graph_break": self.graph_break, "graphs": graphs}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Pareto:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no frontier: {error}") from error
        if not isinstance(data, dict) or "graph_break" not in data:
            raise ValueError("this is no frontier: expected a JSON object that `Pareto.save` wrote")
        if data.get("format") != FORMAT:
            raise ValueError(
                f"this frontier has format {data.get('format')!r}; this version of remat reads format {FORMAT}"
            )
        try:
            graphs = tuple(_frontier(graph) for graph in data["graphs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this frontier is damaged: {error}") from error
        if not graphs or not all(graph.points for graph in graphs):
            raise ValueError("this frontier is damaged: a graph has no points")
        return Pareto(graphs, str(data["graph_break"]))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Pareto:
        """Read a frontier that `save` wrote as JSON."""
        return parsed_file(path, Pareto.from_json)

    def to_svg(self) -> str:
        """A chart of extra time over activation peak, a line per graph."""
        points = [point for graph in self.graphs for point in graph.points]
        of_bytes, unit_bytes = size_unit(max(point.peak_bytes for point in points))
        of_seconds, unit_seconds = time_unit(max(point.extra_seconds for point in points))
        series = [
            Series(
                name=f"graph {number}, {graph.num_nodes} nodes" if len(self.graphs) > 1 else "",
                marks=tuple(
                    _mark(point, graph.peak_without_recompute_bytes, unit_bytes, unit_seconds) for point in graph.points
                ),
            )
            for number, graph in enumerate(self.graphs)
        ]
        executor = self.points[0].plan.peak.executor
        return chart(
            series,
            title=f"Time for memory, predicted for {executor}",
            x_label=f"activation peak, {of_bytes}",
            y_label=f"time added to the fastest step, {of_seconds}",
        )

    def to_html(self) -> str:
        """A page with the chart and the table."""
        return (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>remat: time for memory</title>\n'
            "<style>:root { color-scheme: light dark; font-family: system-ui, sans-serif; } body { max-width: 60rem; "
            f"margin: 2rem auto; padding: 0 1rem; }}</style>\n{self.to_svg()}<pre>{escape(str(self))}</pre>\n</html>\n"
        )


def _frontier(data: dict[str, Any]) -> Frontier:
    points = tuple(
        Point(int(point["peak_bytes"]), float(point["extra_seconds"]), Plan.from_json(json.dumps(point["plan"])))
        for point in data["points"]
    )
    return Frontier(points, int(data["peak_without_recompute_bytes"]), int(data["num_nodes"]))


def _mark(point: Point, whole_bytes: int, unit_bytes: float, unit_seconds: float) -> Mark:
    title = (
        f"{size(point.peak_bytes)} ({point.peak_bytes / max(whole_bytes, 1):.0%} of the peak without "
        f"recompute), {duration(point.extra_seconds, DIGITS)}, planner: {point.plan.planner}"
    )
    return Mark(point.peak_bytes / unit_bytes, point.extra_seconds / unit_seconds, title)


def pareto(
    function: Callable[..., Any],
    *args: Any,
    inner: str = "inductor",
    cost_model: Any = "roofline",
    num_budgets: int = NUM_BUDGETS,
    progress: bool | None = None,
    **kwargs: Any,
) -> Pareto:
    """Find how much time a training step takes for how much memory, and the plan for each.

    `function` is a module or a function that is called with `args` and `kwargs`; it is traced, not run, unless a graph
    break makes it several graphs (then it runs forward once, and there is a frontier per graph). `inner` and
    `cost_model` are the options of `torch.compile(backend="remat")`; a point's plan is applied by
    `options={"inner": inner, "plan": point.plan}`. Progress goes to stderr if that is a terminal, or as `progress`
    says.
    """
    check_call(pareto, function, kwargs)
    if isinstance(num_budgets, bool) or not isinstance(num_budgets, int) or num_budgets < 1:
        raise OptionError(f"num_budgets={num_budgets!r}: expected a whole number from 1")
    options = Options.parse({"inner": inner, "cost_model": cost_model})
    request = replace(Partitioner(options).request, budget=ANY_BUDGET)
    with Progress(sys.stderr.isatty() if progress is None else progress, "pareto") as say:
        explorer = _Explorer(num_budgets, request.key, say)

        def visit(joint: fx.GraphModule, num_fwd_outputs: int) -> Split:
            halves = run(joint, request, explorer, num_fwd_outputs=num_fwd_outputs)
            return halves.forward, halves.backward

        say("tracing")
        captured = capture(function, args, kwargs, visit, fuses=options.fuses)
    if not explorer.found:
        raise RematError(_nothing_to_plan(function, captured))
    return Pareto(tuple(explorer.found), "; ".join(captured.graph_breaks))


class _Explorer(Observer):
    """Finds the frontier of each joint graph that is planned."""

    def __init__(self, num_budgets: int, key: str, say: Say) -> None:
        self.num_budgets, self.key, self.say = num_budgets, key, say
        self.found: list[Frontier] = []

    def see(self, prepared: Prepared, chosen: Chosen) -> None:  # noqa: ARG002 (every plan is asked for here)
        """Plan one graph for ever smaller budgets."""
        self.found.append(_frontier_of(prepared, self.num_budgets, self.key, self.say))


def _frontier_of(prepared: Prepared, num_budgets: int, key: str, say: Say) -> Frontier:
    problem, storages = prepared.problem, prepared.storages
    planner = Planner(Bench(problem, storages))
    whole = planner.without_recompute.peak_bytes
    shares = Shares.find(problem.graph)
    asks = _under_regions(planner, shares) if shares.budgets else _under_none(planner)
    found = undominated(_offers(asks, f"{len(problem.graph.nodes)} nodes", num_budgets, say))
    points = []
    for offer in found:
        verify_schedule(problem.graph, problem.constraints, offer.schedule)
        picked = Picked(offer, offer.peak_bytes, whole, asks.shares_of(offer))
        chosen = write_plan(problem, storages, picked, key)
        extra_ticks = offer.extra_ticks - found[0].extra_ticks
        points.append(Point(offer.peak_bytes, extra_ticks / TICKS_PER_SECOND, chosen.plan))
    return Frontier(tuple(points), whole, len(problem.graph.nodes))


@dataclass(frozen=True, slots=True)
class _Asks:
    """What a frontier asks of the planners."""

    extremes: Callable[[], Sequence[Offer]]
    """The fastest plan first, the one with the lowest peak last."""
    within: Callable[[int], Offer | None]
    shares_of: Callable[[Offer], tuple[RegionShare, ...]]


def _under_none(planner: Planner) -> _Asks:
    """Plan for the graph's peak alone."""
    return _Asks(
        extremes=lambda: (planner.fastest, planner.without_recompute, planner.lowest),
        within=planner.within,
        shares_of=lambda _: (),
    )


def _under_regions(planner: Planner, shares: Shares) -> _Asks:
    """Plan for the graph's peak with the budgets of its regions kept at the same time."""
    met = meet_regions(planner, shares, take_minimum=False)
    found_by_offer: dict[int, Found] = {}

    def choose(budget_bytes: int | None) -> Offer:
        budget = None
        if budget_bytes is not None:
            budget = Budget(text="pareto", num_bytes=budget_bytes, take_minimum=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a budget is out of reach is what the frontier is asked for
            found = choose_within_shares(met, budget)
        found_by_offer[id(found.offer)] = found
        return found.offer

    return _Asks(
        extremes=lambda: (choose(None), choose(1)),
        within=choose,
        shares_of=lambda offer: found_by_offer[id(offer)].shares,
    )


def _offers(asks: _Asks, graph: str, num_budgets: int, say: Say) -> Iterator[Offer]:
    """Ask for ever smaller budgets; one that the last plan keeps within anyway would give that plan again."""
    say(f"{graph}: looking for the lowest peak")
    fastest, *_, lowest = extremes = asks.extremes()
    yield from extremes
    reached = fastest.peak_bytes
    budgets = ladder(reached, lowest.peak_bytes, num_budgets)
    for number, budget_bytes in enumerate(budgets, start=1):
        if reached <= budget_bytes:
            continue
        say(f"{graph}: budget {number} of {len(budgets)}, {size(budget_bytes)}")
        offer = asks.within(budget_bytes)
        if offer is not None:
            reached = offer.peak_bytes
            yield offer


def ladder(highest: int, lowest: int, num_budgets: int) -> list[int]:
    """Budgets from just below the highest peak down to the lowest, in even steps, each once."""
    steps = ((highest - lowest) * step // num_budgets for step in range(1, num_budgets + 1))
    return list(dict.fromkeys(highest - step for step in steps if step))


def undominated(offers: Iterable[Offer]) -> Sequence[Offer]:
    """Drop what another offer beats or equals in both peak and time; the rest, fastest first."""
    kept: list[Offer] = []
    for offer in sorted(offers, key=lambda o: (o.extra_ticks, o.peak_bytes)):
        if not kept or offer.peak_bytes < kept[-1].peak_bytes:
            kept.append(offer)
    return kept


def _nothing_to_plan(function: Callable[..., Any], captured: Captured) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    if not captured.num_graphs:
        return f"pareto({name}): this function calls no tensor operation that can be traced; there is nothing to plan."
    return (
        f"pareto({name}): no result of this function needs a gradient, so there is no backward pass to plan for. "
        "Give it parameters or inputs with requires_grad=True, and call pareto outside of torch.no_grad()."
    )


class Progress:
    """A line on stderr that overwrites itself in a terminal; plain lines elsewhere."""

    def __init__(self, shown: bool, what: str) -> None:
        self.shown, self.what = shown, what

    def __enter__(self) -> Say:
        return self._say

    def __exit__(self, *_: object) -> None:
        if self.shown and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        if not self.shown:
            return
        start, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
        print(f"{start}remat.{self.what}: {text}", end=end, file=sys.stderr, flush=True)
