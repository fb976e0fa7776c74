"""Schedules as sets of facts, in terms of which they are changed and looked for.

A candidate says which values forward hands over, after which of backward's nodes a value is forgotten, so that its next
reader recomputes it, and before which one it is computed although nobody reads it yet, say because what it is computed
from is larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ..graph import Role
from ..memory import Schedule, Scheduler, Simulation
from .problem import FlowProblem


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


Touches = dict[int, list[Touch]]
"""Per value, when it is computed and read, in order."""


class Moves:
    """Reads and writes the candidates of one graph, and finds changes of them."""

    def __init__(self, problem: FlowProblem, scheduler: Scheduler) -> None:
        self.problem, self.scheduler = problem, scheduler
        self.roots = scheduler.roots
        self.members: list[list[int]] = [[] for _ in problem.bases]
        for i, v in problem.value_of.items():
            self.members[v].append(i)
        costs, roles = problem.costs, problem.graph.roles
        self.forward_ticks = max(1, sum(costs.run_ticks[i] for i, r in enumerate(roles) if r is Role.FORWARD))
        """What running forward takes: times are parts of that."""

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

    def touches(self, schedule: Schedule) -> Touches:
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

    def may_save(self, v: int) -> bool:
        """May forward hand a value over?"""
        return self.problem.constraint(v).no_save is None

    def may_drop(self, v: int) -> bool:
        """May a value be computed again?"""
        return self.problem.constraint(v).no_recompute is None

    def evenly_spaced(self, always: frozenset[int]) -> Iterator[frozenset[int]]:
        """Every second forward value, every third, and so on, beside what is always kept."""
        bases, roles = self.problem.bases, self.problem.graph.roles
        forward = [v for v, i in enumerate(bases) if roles[i] is Role.FORWARD and self.may_save(v)]
        for step in range(2, 1 + len(forward) // 2):
            yield always.union(forward[step - 1 :: step])

    def keep_only(self, kept: frozenset[int]) -> Candidate:
        """Keep a few values, and forget all others after each stage: little memory, much time."""
        forgotten = [v for v in range(len(self.members)) if v not in kept and self.may_drop(v)]
        dropped = (Fact(What.DROPPED, v, stage) for v in forgotten for stage in range(len(self.roots)))
        return frozenset((*(Fact(What.SAVED, v) for v in kept), *dropped))

    def of_value(self, candidate: Candidate, v: int, touches: Sequence[Touch]) -> list[Move]:
        """All that can be done about one value."""
        moves = []
        saved = frozenset({Fact(What.SAVED, v)})
        if saved <= candidate:
            if self.may_drop(v):
                moves.append(Move(removed=saved))
        elif self.may_save(v) and touches:
            moves.append(Move(added=saved, is_keep=True))
        if not self.may_drop(v):
            return moves
        for before, touch in itertools.pairwise(touches):
            if 0 <= before.stage < touch.stage:
                stages = range(before.stage, touch.stage)
                dropped = frozenset(Fact(What.DROPPED, v, stage) for stage in stages)
                is_keep = touch.is_run
                if is_keep:
                    moves.append(Move(removed=dropped, is_keep=True))
                else:
                    moves.append(Move(added=frozenset({Fact(What.DROPPED, v, before.stage)})))
        return moves

    def early(self, candidate: Candidate, v: int, touches: Touches) -> list[Move]:
        """Compute a value where something it is computed from is at hand, or do not do so any more."""
        done = sorted(fact.stage for fact in candidate if fact.what is What.EARLY and fact.value == v)
        moves = [Move(removed=frozenset({Fact(What.EARLY, v, stage)})) for stage in done]
        runs = [touch.stage for touch in touches[v] if touch.is_run and touch.stage > 0]
        hands = {touch.stage for u in self.problem.inputs[v] for touch in touches.get(u, ()) if touch.stage >= 0}
        for run in runs:
            moves += [Move(added=frozenset({Fact(What.EARLY, v, stage)})) for stage in sorted(hands) if stage < run]
        return moves

    def aimed_at(self, simulation: Simulation, touches: Touches, moment: int, least_bytes: float = 0.0) -> list[Move]:
        """All ways to forget something that is alive at a moment and is not read there."""
        own = set(self.roots)
        events = simulation.order[simulation.num_forward : moment]
        stage = -1 if moment < simulation.num_forward else sum(i in own for i in events)
        moves = []
        for memory in simulation.alive_at(moment):
            v = self.problem.value_of.get(memory.node)
            if v is None or not self.may_drop(v) or memory.num_bytes < least_bytes:
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
                moves.append(Move(added=frozenset(fact for fact in deep if self.may_drop(fact.value))))
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


def keep_plainly(kept: frozenset[int]) -> Candidate:
    """Keep a few values; recompute the others once."""
    return frozenset(Fact(What.SAVED, v) for v in kept)


def excess_bytes(simulation: Simulation, budget_bytes: int) -> int:
    """By how much the moments of a step exceed a budget, added up."""
    return sum(live - budget_bytes for live in simulation.live_bytes if live > budget_bytes)
