"""What a report knows of one joint graph. Plain data: everything here can be stored and read back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from ...passes.plans import Action, Decision, Plan, Runs
from ...passes.shared import duration as duration
from ...passes.shared import size as size

FORWARD_ROLES = ("FORWARD", "EITHER")
"""Roles of nodes whose results may be kept or recomputed."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node of the joint graph."""

    name: str
    op: str
    arguments: str
    """The arguments as text, `add, [4, 8]`."""
    inputs: tuple[str, ...]
    """The nodes that it reads; equal computations are replaced by the first of them."""
    value: str
    """What it returns, `float32[4, 8]`."""
    role: str
    """On which side of the split it may run: a name of `passes.joint_graph.Role`."""
    base: str
    """The value that it is a view of, as far as planning is concerned; its own name for most, empty if free."""
    same_as: str
    """The node that computes the same; its own name for most."""
    is_view: bool
    """It shows memory that another node's result is in."""
    num_bytes: int
    save_seconds: float
    recompute_seconds: float
    no_save: str
    """Why it may not be saved; empty if it may."""
    no_recompute: str
    """Why it may not be recomputed; empty if it may."""
    prefers: str
    """What the policy would like, where a budget may overrule it."""
    source: str
    module: str
    region: str
    policy: str
    label: str
    """What `remat.name` called it."""


@dataclass(frozen=True, slots=True)
class Alive:
    """One stretch of memory in the simulated step."""

    node: str
    num_bytes: int
    first: int
    """The moment at which it is allocated: an index into forward's order followed by backward's."""
    last: int
    """The moment after which it is free."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is alive when, as the plan was simulated."""

    num_forward: int
    """How many of the moments are forward's."""
    live_bytes: tuple[int, ...]
    memory: tuple[Alive, ...]

    @property
    def peak_moment(self) -> int:
        """When the most is alive."""
        return self.live_bytes.index(max(self.live_bytes)) if self.live_bytes else 0

    def alive_at(self, moment: int) -> list[Alive]:
        """What is alive at a moment, largest first."""
        alive = [m for m in self.memory if m.first <= moment <= m.last]
        return sorted(alive, key=lambda m: (-m.num_bytes, m.first, m.node))


@dataclass(frozen=True)
class GraphReport:
    """One joint graph: its plan, its nodes and what is alive when."""

    plan: Plan
    nodes: tuple[NodeRow, ...]
    forward: tuple[str, ...]
    """What forward runs, by name, in order; what backward runs is the plan's order."""
    forward_results: tuple[str, ...]
    """What forward returns to its caller."""
    backward_results: tuple[str, ...]
    """The gradients and other values that backward returns."""
    timeline: Timeline

    @cached_property
    def row(self) -> dict[str, NodeRow]:
        """Nodes by name."""
        return {row.name: row for row in self.nodes}

    @cached_property
    def position(self) -> dict[str, int]:
        """Places of nodes in the graph, by name."""
        return {row.name: i for i, row in enumerate(self.nodes)}

    @cached_property
    def decision(self) -> dict[str, Decision]:
        """Decisions by the name of their value."""
        return {d.value: d for d in self.plan.decisions}

    @cached_property
    def num_runs_in_backward(self) -> Counter[str]:
        """How often backward runs each node."""
        return Counter(self.plan.order)

    @cached_property
    def runs(self) -> Runs:
        """The runs of backward and what they read, by places of nodes."""
        places, rows = self.position, self.nodes

        def base_of(place: int) -> int | None:
            return places[rows[place].base] if rows[place].base else None

        return Runs.of(
            [places[name] for name in self.plan.order],
            lambda place: [places[name] for name in rows[place].inputs],
            base_of,
            [places[name] for name in self.backward_results],
        )

    @property
    def moments(self) -> tuple[str, ...]:
        """What runs at each moment of the timeline."""
        return (*self.forward, *self.plan.order)

    def kind_of(self, memory: Alive) -> str:
        """What a stretch of memory is there for: `saved`, `recomputed` or `other`."""
        if memory.first < self.timeline.num_forward:
            return "saved" if memory.last >= self.timeline.num_forward else "other"
        return "recomputed" if self.row[memory.node].role in FORWARD_ROLES else "other"

    def state_of(self, name: str) -> str:
        """`saved`, `recomputed`, `offloaded`, or nothing for what backward does not get from forward."""
        decision = self.decision.get(name)
        return "" if decision is None else PAST[decision.action]


PAST = {Action.SAVE: "saved", Action.RECOMPUTE: "recomputed", Action.OFFLOAD: "offloaded"}
"""Actions as dumps print them."""


def short_source(source: str) -> str:
    """The last two parts of a source line's path, which say enough and do not depend on the machine."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])


def printable(text: str) -> str:
    """Text on one line: a name may hold line breaks and control characters, which would break a dump or a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Drawing(Protocol):
    """A frontier of time and peak, as far as reports need to know it."""

    def to_svg(self) -> str:
        """A picture of it."""

    def to_json(self) -> str:
        """All of it as JSON text."""


@dataclass(frozen=True)
class ReportData:
    """Every decision of every joint graph of a function."""

    graphs: tuple[GraphReport, ...]
    """In the order in which they were traced."""
    function: str = ""
    graph_breaks: tuple[str, ...] = ()
    """Why there are several graphs, each with its line; empty if the function is one graph."""
    versions: dict[str, str] = field(default_factory=dict)
    pareto: Drawing | None = None
    """The frontier of time and peak, if it was computed: it is drawn into the page."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each graph: what `options={"plan": ...}` takes."""
        return tuple(graph.plan for graph in self.graphs)
