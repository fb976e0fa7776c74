"""The order of backward: its own nodes, and each recomputation just before its first reader.

A value may be recomputed several times. A reader reads the latest copy, so an order of node positions says it all:
a forward-side position means "recompute it here", and the copy lives to its last reader before the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.fx as fx

from ..graph import FORWARD_SIDE, Constraint, Constraints, JointGraph, Role, preserves_rng_state
from .backward_order import roots


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What forward and backward run, in order, and what backward receives from forward."""

    forward: tuple[int, ...]
    """Node positions that forward runs, in order; inputs are not among them."""
    events: tuple[int, ...]
    """Node positions; a forward-side position means: recompute it here."""
    received: tuple[int, ...]
    """Forward-side values that backward reads without recomputing them, in graph order."""
    phases: tuple[int, ...]
    """Where in `events` values were forgotten: what runs on two sides of such a point must not be run together."""
    replayed: frozenset[int]
    """Random ops that backward repeats: forward keeps their generator's state."""
    copied: frozenset[int]
    """Values received as copies, because forward overwrites their memory."""


def schedule_backward(graph: JointGraph, constraints: Constraints, saved: Iterable[int]) -> Schedule:
    """Place every recomputation as late as its first reader allows, and keep its result to its last one."""
    return Scheduler(graph, constraints).backward(saved)


class Scheduler:
    """Makes schedules of one graph; what is the same in all of them is found once."""

    def __init__(self, graph: JointGraph, constraints: Constraints) -> None:
        self.graph, self.constraints = graph, constraints
        self.roots = roots(graph)
        # What may not run again comes from forward, planned or not; it is handed over only if somebody reads it.
        self.given = frozenset(
            i for i, c in enumerate(constraints.of) if c is not None and (c.is_free or _runs_once(c))
        )
        self.tangents = frozenset(i for i, role in enumerate(graph.roles) if role is Role.BACKWARD_INPUT)
        self.own_backward = frozenset(graph.backward_order)
        self.returned = frozenset(i for i in _backward_results(graph) if graph.roles[i] in FORWARD_SIDE)
        """Gradients that are forward values themselves."""
        self.random = frozenset(i for i in range(len(graph.nodes)) if _is_random(graph, i))
        self.ranks = _ranks(graph)
        self.shallow_first = _shallow_first(graph)
        self.own_forward = self._in_order(_own_forward(graph))
        """What forward runs whatever backward receives."""

    def backward(self, saved: Iterable[int]) -> Schedule:
        """Place every recomputation as late as its first reader allows, and keep its result to its last one."""
        writer = self.writer(saved)
        for root in self.roots:
            writer.run(root)
        return writer.finish()

    def writer(self, saved: Iterable[int]) -> ScheduleWriter:
        """Begin a schedule of which forward hands some values over."""
        return ScheduleWriter(self, saved)

    def forward(self, received: Iterable[int], replayed: Iterable[int]) -> tuple[int, ...]:
        """Forward's own nodes, plus what only backward needs but forward computes and saves."""
        graph = self.graph
        wanted: set[int] = set()
        stack = [*received, *replayed]
        while stack:
            i = stack.pop()
            if i not in wanted and graph.roles[i] in (Role.EITHER, Role.CONSTANT):
                wanted.add(i)
                stack.extend(graph.inputs[i])
        added = wanted.difference(self.own_forward)
        return self._in_order([*self.own_forward, *added]) if added else self.own_forward

    def _in_order(self, wanted: Iterable[int]) -> tuple[int, ...]:
        nodes = self.graph.nodes
        return tuple(sorted([i for i in wanted if nodes[i].op != "placeholder"], key=self.ranks.__getitem__))


class ScheduleWriter:
    """Writes backward's order node by node; what a node lacks is recomputed just before it, the longest part first."""

    def __init__(self, scheduler: Scheduler, saved: Iterable[int]) -> None:
        self.scheduler, self.graph = scheduler, scheduler.graph
        self.from_forward = {*saved, *scheduler.given}
        """Values of which the latest version is forward's."""
        self.available = self.from_forward | scheduler.tangents
        self.events: list[int] = []
        self.received: set[int] = set()
        self.phases: list[int] = []

    def run(self, root: int) -> None:
        """Make a value available, recomputing what it is computed from as needed."""
        stack = [root]
        inputs, available, shallow_first = self.graph.inputs, self.available, self.scheduler.shallow_first
        while stack:
            i = stack[-1]
            if i in available:
                stack.pop()
            elif available.issuperset(inputs[i]):
                stack.pop()
                self._write(i)
            else:
                stack += [j for j in shallow_first[i] if j not in available]
        # What is made ready for a reader that does not come after all need not be handed over.
        if root in self.from_forward and root in self.scheduler.returned:
            self.received.add(root)

    def run_again(self, i: int) -> None:
        """Run a node whether or not its result is there already."""
        self.available.discard(i)
        self.run(i)

    def _write(self, i: int) -> None:
        from_forward = self.from_forward
        for j in self.graph.inputs[i]:
            if j in from_forward:
                self.received.add(j)
        from_forward.discard(i)
        self.available.add(i)
        self.events.append(i)

    def drop(self, values: Iterable[int]) -> None:
        """Forget values: whoever wants one from here on recomputes it."""
        self.available.difference_update(values)
        if not self.phases or self.phases[-1] < len(self.events):
            self.phases.append(len(self.events))

    def finish(self) -> Schedule:
        """Complete the schedule: what must forward run and hand over for this?"""
        events = tuple(self.events)
        replayed = self.scheduler.random.intersection(events)
        received = tuple(sorted(self.received))
        return Schedule(
            forward=self.scheduler.forward(received, replayed),
            events=events,
            received=received,
            phases=tuple(self.phases),
            replayed=replayed,
            copied=frozenset(self.received & self.scheduler.constraints.saved_by_copy),
        )


def _runs_once(constraint: Constraint) -> bool:
    return constraint.no_recompute is not None and constraint.no_save is None


def _is_random(graph: JointGraph, i: int) -> bool:
    op = graph.facts[i]
    draws = graph.roles[i] in (Role.FORWARD, Role.EITHER) and op is not None and op.is_random
    return draws and preserves_rng_state(graph.nodes[i])


def _backward_results(graph: JointGraph) -> list[int]:
    return [graph.resolve(o) for o in graph.backward_outputs if isinstance(o, fx.Node)]


def _own_forward(graph: JointGraph) -> set[int]:
    """What computes forward's results, and the constants that it reads."""
    own = {i for i, role in enumerate(graph.roles) if role is Role.FORWARD}
    own.update([j for i in own for j in graph.inputs[i] if graph.roles[j] is Role.CONSTANT])
    own.update(graph.resolve(o) for o in graph.forward_outputs if isinstance(o, fx.Node))
    return own


def _ranks(graph: JointGraph) -> list[tuple[int, int]]:
    """Where each node stands in forward's order.

    What is computed for backward alone moves to where its inputs are at hand: traced last, it would hold them.
    """
    anchors: list[int] = []
    for i, op in enumerate(graph.facts):
        moves = graph.roles[i] is Role.EITHER and op is not None and op.is_pure
        computed = [anchors[j] for j in graph.inputs[i] if graph.nodes[j].op != "placeholder"] if moves else []
        anchors.append(max(computed, default=i))
    return [(anchor, i) for i, anchor in enumerate(anchors)]


def _shallow_first(graph: JointGraph) -> list[tuple[int, ...]]:
    """Per node its inputs, those that take the most steps to compute last, since what is last is recomputed first.

    The others are then computed shortly before they are read: a mask that needs nothing but a seed does not wait while
    all that it will mask is recomputed.
    """
    depths: list[int] = []
    found = []
    for inputs in graph.inputs:
        depths.append(1 + max((depths[j] for j in inputs), default=-1))
        found.append(tuple(sorted(inputs, key=depths.__getitem__, reverse=True)[::-1]))
    return found
