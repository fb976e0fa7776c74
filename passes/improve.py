"""Improve schedules by local search: what is kept, what is recomputed when needed, and what is forgotten in between.

A candidate says which values forward hands over, and after which of backward's nodes a value is forgotten, so that its
next reader recomputes it. Every schedule that recomputes just in time can be said this way. Two searches:

fill     use the memory that a schedule leaves under its budget: keep what is recomputed, dearest per byte first;
anneal   simulated annealing (Kirkpatrick, Gelatt, Vecchi, 1983), for graphs that are small enough for many tries.

The effort is bounded by the number of nodes simulated, not by time, and the random numbers are seeded: equal graphs
give equal plans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from .flow import FlowProblem
from .joint_graph import Role
from .schedule import Schedule, ScheduleWriter, roots
from .simulate import Simulation

NODES_SIMULATED = 200_000
"""The effort for one budget. A node takes about two microseconds."""

FEWEST_TRIES = 200
"""With fewer tries than these left, annealing finds nothing."""

START_TEMPERATURE, END_TEMPERATURE = 3e-2, 3e-4
"""As parts of the forward's time. Not derived: tried on small graphs with known optima."""

EXCESS_PRICE = 4.0
"""What exceeding the budget costs in the search: exceeding it by 1 % is as bad as 4 % of the forward's time."""


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule in terms of values and stages; a stage is one of backward's own nodes, by its place in their order."""

    saved: frozenset[int]
    dropped: frozenset[tuple[int, int]]
    """(value, stage): forgotten after that stage."""


@dataclass(frozen=True, slots=True)
class Touch:
    """A moment at which a value is computed or read."""

    stage: int
    """-1 for forward."""
    is_run: bool


class Improver(Generic[J]):
    """Searches around schedules of one graph."""

    def __init__(self, problem: FlowProblem, judge: Callable[[Schedule], J]) -> None:
        self.problem, self.judge = problem, judge
        self.roots = roots(problem.graph)
        self.members: list[list[int]] = [[] for _ in problem.bases]
        for i, v in problem.value_of.items():
            self.members[v].append(i)
        costs, roles = problem.costs, problem.graph.roles
        self.forward_ticks = max(1, sum(costs.run_ticks[i] for i, r in enumerate(roles) if r is Role.FORWARD))
        self.nodes_left = 0

    def within(self, offers: Sequence[J], budget_bytes: int) -> list[J]:
        """Look for schedules that fit a budget and are faster than those offered."""
        self.nodes_left = NODES_SIMULATED
        ranked = sorted(offers, key=lambda o: self._energy(o, budget_bytes))
        found: list[J] = []
        start = self._fill(ranked[0], budget_bytes)
        if start is not None:
            found.append(start)
        found.extend(self._anneal([*found, *ranked[:3]], budget_bytes))
        return found

    def _energy(self, offer: J, budget_bytes: int) -> float:
        excess = max(0, offer.peak_bytes - budget_bytes) / max(1, budget_bytes)
        return offer.extra_ticks / self.forward_ticks + EXCESS_PRICE * excess

    def _try(self, candidate: Candidate) -> J:
        offer = self.judge(self.write(candidate))
        self.nodes_left -= len(offer.simulation.order)
        return offer

    # ---------------------------------------------------------------------------------------------- candidates

    def write(self, candidate: Candidate) -> Schedule:
        """Turn a candidate into a schedule."""
        problem = self.problem
        forgotten: dict[int, list[int]] = {}
        for v, stage in candidate.dropped:
            forgotten.setdefault(stage, []).extend(self.members[v])
        saved = [problem.bases[v] for v in candidate.saved]
        writer = ScheduleWriter(problem.graph, problem.constraints, saved)
        for stage, root in enumerate(self.roots):
            writer.run(root)
            if stage in forgotten:
                writer.drop(forgotten[stage])
        return writer.finish()

    def read(self, schedule: Schedule) -> Candidate:
        """Say what a schedule does in terms of values and stages."""
        value_of = self.problem.value_of
        saved = frozenset(value_of[i] for i in schedule.received if i in value_of)
        dropped = {
            (v, before.stage)
            for v, touches in self.touches(schedule).items()
            for before, touch in zip(touches, touches[1:], strict=False)
            if touch.is_run and before.stage < touch.stage
        }
        return Candidate(saved, frozenset(dropped))

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

    # ---------------------------------------------------------------------------------------------- fill

    def _fill(self, start: J, budget_bytes: int) -> J | None:
        """Keep what is recomputed, as much as fits; None if the schedule itself does not fit."""
        candidate = self.read(start.schedule)
        best = self._try(candidate)
        if best.peak_bytes > budget_bytes:
            return None
        pending = [self._keeps(candidate, best)]
        while pending and self.nodes_left > 0:
            moves = pending.pop()
            changed = candidate
            for move in moves:
                changed = _applied(changed, move)
            offer = self._try(changed)
            if offer.peak_bytes <= budget_bytes and offer.extra_ticks < best.extra_ticks:
                candidate, best = changed, offer
            elif len(moves) > 1:
                middle = len(moves) // 2
                pending += [moves[middle:], moves[:middle]]
        return best

    def _keeps(self, candidate: Candidate, offer: J) -> list[Move]:
        """All ways to recompute less, dearest per byte first."""
        costs, bases = self.problem.costs, self.problem.bases
        rows = []
        for v, touches in sorted(self.touches(offer.schedule).items()):
            per_byte = costs.run_ticks[bases[v]] / max(1, self.problem.num_bytes(v))
            rows += [(-per_byte, v, move) for move in self._moves(candidate, v, touches) if move.is_keep]
        return [move for _, _, move in sorted(rows, key=lambda row: row[:2])]

    def _moves(self, candidate: Candidate, v: int, touches: Sequence[Touch]) -> list[Move]:
        """All that can be done about one value."""
        moves = []
        if v in candidate.saved:
            if self._may_drop(v):
                moves.append(Move(v, save=False))
        elif self._may_save(v) and touches:
            moves.append(Move(v, save=True, is_keep=True))
        if not self._may_drop(v):
            return moves
        for before, touch in zip(touches, touches[1:], strict=False):
            if before.stage < touch.stage and before.stage >= 0:
                moves.append(Move(v, start=before.stage, end=touch.stage, is_keep=touch.is_run))
        return moves

    # ---------------------------------------------------------------------------------------------- anneal

    def _anneal(self, starts: Iterable[J], budget_bytes: int) -> list[J]:
        """Anneal from each start with an equal share of the effort that is left."""
        starts = list(starts)
        found = []
        for k, start in enumerate(starts):
            share = self.nodes_left // (len(starts) - k)
            if share < FEWEST_TRIES * len(start.simulation.order):
                break
            found.append(self._anneal_from(start, budget_bytes, self.nodes_left - share, random.Random(k)))
        return found

    def _anneal_from(self, start: J, budget_bytes: int, nodes_kept: int, rng: random.Random) -> J:
        candidate = self.read(start.schedule)
        offer = best = self._try(candidate)
        touches = self.touches(offer.schedule)
        total = self.nodes_left - nodes_kept
        while self.nodes_left > nodes_kept:
            move = self._random_move(candidate, touches, rng)
            if move is None:
                break
            changed = _applied(candidate, move)
            if rng.random() < 0.3:
                second = self._random_move(candidate, touches, rng)
                changed = changed if second is None else _applied(changed, second)
            tried = self._try(changed)
            progress = 1 - (self.nodes_left - nodes_kept) / total
            temperature = START_TEMPERATURE * (END_TEMPERATURE / START_TEMPERATURE) ** progress
            rise = self._energy(tried, budget_bytes) - self._energy(offer, budget_bytes)
            if rise <= 0 or rng.random() < math.exp(-rise / temperature):
                candidate, offer = changed, tried
                touches = self.touches(offer.schedule)
                if self._rank(offer, budget_bytes) < self._rank(best, budget_bytes):
                    best = offer
        return best

    def _rank(self, offer: J, budget_bytes: int) -> tuple[int, int, int]:
        return max(0, offer.peak_bytes - budget_bytes), offer.extra_ticks, offer.peak_bytes

    def _random_move(self, candidate: Candidate, touches: dict[int, list[Touch]], rng: random.Random) -> Move | None:
        values = sorted(touches)
        for _ in range(20):
            v = values[int(rng.random() * len(values))]
            moves = self._moves(candidate, v, touches[v])
            if moves:
                return moves[int(rng.random() * len(moves))]
        return None


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a candidate: save or do not save a value, or keep or forget it between two stages."""

    value: int
    save: bool | None = None
    start: int = 0
    end: int = 0
    is_keep: bool = False
    """Recomputes less."""


def _applied(candidate: Candidate, move: Move) -> Candidate:
    v = move.value
    if move.save is not None:
        return replace(candidate, saved=candidate.saved | {v} if move.save else candidate.saved - {v})
    if move.is_keep:
        return replace(candidate, dropped=candidate.dropped - {(v, s) for s in range(move.start, move.end)})
    return replace(candidate, dropped=candidate.dropped | {(v, move.start)})
