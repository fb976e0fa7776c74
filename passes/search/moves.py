"""Schedules as sets of facts, in terms of which they are changed and looked for.

A candidate says which values forward hands over, after which of backward's nodes a value is forgotten, so that its next
reader recomputes it, and before which one it is computed although nobody reads it yet, say because what it is computed
from is larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..graph.joint_graph import Role
from ..memory.schedule import Schedule, Scheduler
from ..memory.simulate import Simulation
from .problem import FlowProblem


class Judged(Protocol):
    """A schedule with what it takes."""

    @property
    def schedule(self) -> Schedule:
        """The schedule."""

    @property
    def simulation(self) -> Simulation:
        """What is alive when."""

    @property
    def extra_ticks(self) -> int:
        """What it adds to the step."""

    @property
    def peak_bytes(self) -> int:
        """Its activation peak."""


J = TypeVar("J", bound=Judged)


class What(Enum):
    """What a fact says about a value."""

    SAVED = "handed over by forward"
    DROPPED = "forgotten after the stage"
    EARLY = "computed before the stage's own node, read later"


class Fact(NamedTuple):
    """Something about a value at a stage; a stage is one of backward's own nodes, by its place in their order."""

    what: What
    value: int
    stage: int = 0


Candidate = frozenset[Fact]


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a candidate."""

    added: Candidate = frozenset()
    removed: Candidate = frozenset()
    is_keep: bool = False
    """Recomputes less."""

    def apply(self, candidate: Candidate) -> Candidate:
        """The changed candidate."""
        return (candidate - self.removed) | self.added


@dataclass(frozen=True, slots=True)
class Touch:
    """A moment at which a value is computed or read."""

    stage: int
    """-1 for forward."""
    is_run: bool


class Search(Generic[J]):
    """Reads, writes and judges the candidates of one graph, with a bound on the effort."""

    def __init__(self, problem: FlowProblem, scheduler: Scheduler, judge: Callable[[Schedule], J]) -> None:
        self.problem, self.scheduler, self.judge = problem, scheduler, judge
        self.roots = scheduler.roots
        self.members: list[list[int]] = [[] for _ in problem.bases]
        for i, v in problem.value_of.items():
            self.members[v].append(i)
        costs, roles = problem.costs, problem.graph.roles
        self.forward_ticks = max(1, sum(costs.run_ticks[i] for i, r in enumerate(roles) if r is Role.FORWARD))
        self.nodes_left = 0
        """How many nodes may still be simulated."""

    def write(self, candidate: Candidate) -> Schedule:
        """Turn a candidate into a schedule."""
        bases = self.problem.bases
        saved: list[int] = []
        forgotten: dict[int, list[int]] = {}
        early: dict[int, list[int]] = {}
        for what, v, stage in candidate:
            if what is What.SAVED:
                saved.append(bases[v])
            elif what is What.DROPPED:
                forgotten.setdefault(stage, []).extend(self.members[v])
            else:
                early.setdefault(stage, []).append(bases[v])
        writer = self.scheduler.writer(saved)
        for stage, root in enumerate(self.roots):
            for i in sorted(early.get(stage, ())):
                writer.run(i)
            writer.run(root)
            if stage in forgotten:
                writer.drop(forgotten[stage])
        return writer.finish()

    def read(self, schedule: Schedule) -> Candidate:
        """Say what a schedule does in terms of values and stages."""
        value_of = self.problem.value_of
        facts = {Fact(What.SAVED, value_of[i]) for i in schedule.received if i in value_of}
        for v, touches in self.touches(schedule).items():
            for touch, after in itertools.pairwise(touches):
                if touch.stage == after.stage:
                    continue
                if after.is_run:
                    facts.add(Fact(What.DROPPED, v, touch.stage))
                elif touch.is_run and touch.stage >= 0:
                    facts.add(Fact(What.EARLY, v, touch.stage))
        return frozenset(facts)

    def touches(self, schedule: Schedule) -> dict[int, list[Touch]]:
        """Per value, when it is computed and read, in order."""
        value_of, bases, inputs = self.problem.value_of, self.problem.bases, self.problem.graph.inputs
        found: dict[int, list[Touch]] = {value_of[i]: [Touch(-1, True)] for i in schedule.received if i in value_of}
        own = set(self.roots)
        stage = 0
        for i in schedule.events:
            for j in inputs[i]:
                if j in value_of:
                    found.setdefault(value_of[j], []).append(Touch(stage, False))
            if i in value_of and bases[value_of[i]] == i:
                found.setdefault(value_of[i], []).append(Touch(stage, True))
            stage += i in own
        return found

    def _may_save(self, v: int) -> bool:
        return self.problem.constraint(v).no_save is None

    def _may_drop(self, v: int) -> bool:
        return self.problem.constraint(v).no_recompute is None

    def _try(self, candidate: Candidate) -> J:
        offer = self.judge(self.write(candidate))
        self.nodes_left -= len(offer.simulation.order)
        return offer

    def aimed_moves(
        self, offer: J, touches: dict[int, list[Touch]], moment: int, least_bytes: float = 0.0
    ) -> list[Move]:
        """All ways to forget something that is alive at a moment and is not read there."""
        simulation, own = offer.simulation, set(self.roots)
        events = simulation.order[simulation.num_forward : moment]
        stage = -1 if moment < simulation.num_forward else sum(i in own for i in events)
        moves = []
        for memory in simulation.alive_at(moment):
            v = self.problem.value_of.get(memory.node)
            if v is None or not self._may_drop(v) or memory.num_bytes < least_bytes:
                continue
            stages = [touch.stage for touch in touches.get(v, ())]
            if stage in stages and stage < stages[-1]:  # computed for something in this stage, and read later
                moves.append(Move(added=frozenset({Fact(What.DROPPED, v, stage)})))
            before = max((earlier for earlier in stages if earlier < max(stage, 0)), default=None)
            if before is None:
                continue
            if before < 0:
                moves.append(Move(removed=frozenset({Fact(What.SAVED, v)})))
            else:
                moves.append(Move(added=frozenset({Fact(What.DROPPED, v, before)})))
                deep = (Fact(What.DROPPED, u, before) for u in self._ancestors(v))
                moves.append(Move(added=frozenset(fact for fact in deep if self._may_drop(fact.value))))
        return moves

    def _ancestors(self, v: int) -> set[int]:
        """A value and all that it is computed from."""
        found: set[int] = set()
        stack = [v]
        while stack:
            u = stack.pop()
            if u not in found:
                found.add(u)
                stack.extend(self.problem.inputs[u])
        return found


def by_peak(offer: Judged) -> tuple[int, int]:
    """The lowest peak first; of equal ones, the fastest."""
    return offer.peak_bytes, offer.extra_ticks


def excess_bytes(simulation: Simulation, budget_bytes: int) -> int:
    """By how much the moments of a step exceed a budget, added up."""
    return sum(live - budget_bytes for live in simulation.live_bytes if live > budget_bytes)
