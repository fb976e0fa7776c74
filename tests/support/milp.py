"""The fastest schedule within a budget, exactly: a mixed-integer programme for small graphs.

The formulation is Checkmate's (Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", 2020), for the model that the planners have: forward runs once, in its order; backward's own nodes
run once, in theirs. Stage 0 is forward, and each node of backward is a stage. Per stage t and value v

    run[t, v]    v is computed in t; in forward, all that its outputs depend on is
    have[t, v]   v is in memory when t begins; have[1, v] means that forward hands it over

and within a stage values are computed in graph order, so a value is dead after the last one in the stage that reads it,
unless the stage's own node reads it or the next stage has it. Views are free and share their base's memory, so they
are part of it here, and what has no memory and takes no time is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.fx as fx
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from remat.passes.graph.joint_graph import Role
from remat.passes.memory.backward_order import roots
from remat.passes.memory.schedule import Schedule, Scheduler, schedule_backward
from remat.passes.memory.simulate import Simulation, simulate
from remat.passes.memory.storage import Storages
from remat.passes.search.bench import extra_ticks
from remat.passes.search.problem import FlowProblem

BYTES_PER_UNIT = 1024
"""Memory is stated in these, as fractions: a solver tells large whole numbers apart badly."""


@dataclass(frozen=True)
class Optimum:
    """What the solver found."""

    is_feasible: bool
    lower_bound_ticks: float
    """No schedule within the budget adds less to the step."""
    schedule: Schedule | None
    """The best one; None if there is none, or if the solver ran out of time before it found one."""
    is_proven: bool


class Model:
    """The sizes, prices and reads of a graph, by value and stage."""

    def __init__(self, problem: FlowProblem, storages: Storages) -> None:
        self.problem, self.graph = problem, problem.graph
        self.roots = roots(self.graph)
        assert all(self.graph.roles[i] is Role.BACKWARD for i in self.roots), "a gradient is a forward value"
        sizes = [sum(storages.own_bytes[i]) for i in problem.bases]
        costs = problem.costs
        self.values = [v for v, i in enumerate(problem.bases) if sizes[v] or costs.run_ticks[i]]
        kept = set(self.values)
        self.num_bytes = sizes
        self.inputs = {v: [u for u in problem.inputs[v] if u in kept] for v in self.values}
        assert all(set(problem.inputs[v]) <= kept for v in self.values), "a value that is left out has inputs"
        self.in_forward = {v for v in self.values if self.graph.roles[problem.bases[v]] is Role.FORWARD}
        self.reads = [self._reads(i) & kept for i in self.roots]
        self.outputs = self._forward_outputs()
        assert not any(v in self._useful_from(0) for v in self.outputs), "backward reads an output of forward"
        self.before, self.during = self._backward_bytes(storages)
        ranks = Scheduler(self.graph, problem.constraints).ranks
        in_order = sorted(self.values, key=lambda v: ranks[problem.bases[v]])
        self._place_in_forward = {v: place for place, v in enumerate(in_order)}

    def place(self, t: int, v: int) -> int:
        """When a value is computed in a stage, if it is: forward has an order of its own."""
        return v if t else self._place_in_forward[v]

    @property
    def num_stages(self) -> int:
        return len(self.roots) + 1

    def useful(self) -> list[set[int]]:
        """Per stage, the values that it or a later stage may read or compute with."""
        return [self._useful_from(max(0, t - 1)) for t in range(self.num_stages + 1)]

    def _reads(self, i: int) -> set[int]:
        return {self.problem.value_of[j] for j in self.graph.inputs[i] if j in self.problem.value_of}

    def _forward_outputs(self) -> list[int]:
        nodes = [self.graph.resolve(o) for o in self.graph.forward_outputs if isinstance(o, fx.Node)]
        return [self.problem.value_of[i] for i in nodes if i in self.problem.value_of]

    def _useful_from(self, root: int) -> set[int]:
        found: set[int] = set()
        stack = [v for reads in self.reads[root:] for v in reads]
        while stack:
            v = stack.pop()
            if v not in found:
                found.add(v)
                stack.extend(self.inputs[v])
        return found

    def _backward_bytes(self, storages: Storages) -> tuple[list[int], list[int]]:
        """Per node of backward, the bytes of backward's own values just before it and while it runs."""
        kept = [self.problem.bases[v] for v in sorted(self.problem.needed)]
        schedule = schedule_backward(self.graph, self.problem.constraints, kept)
        simulation = simulate(self.graph, storages, schedule)
        own = [m for m in simulation.memory if self.graph.roles[m.node] is Role.BACKWARD]
        moment = {i: k for k, i in enumerate(simulation.order)}
        at = [moment[i] for i in self.roots]
        before = [sum(m.num_bytes for m in own if m.first < k <= m.last) for k in at]
        return before, [sum(m.num_bytes for m in own if m.first <= k <= m.last) for k in at]


class _Rows:
    """Variables and constraints, collected one by one."""

    def __init__(self) -> None:
        self.prices: list[float] = []
        self.is_whole: list[bool] = []
        self.least: list[float] = []
        self.most: list[float] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.limits: list[float] = []

    def variable(self, price: float = 0.0, *, whole: bool = True, least: float = 0.0, most: float = 1.0) -> int:
        self.prices.append(price)
        self.is_whole.append(whole)
        self.least.append(least)
        self.most.append(most)
        return len(self.prices) - 1

    def at_most(self, limit: float, terms: Mapping[int, float]) -> None:
        """Add: the terms' sum is at most the limit."""
        row = len(self.limits)
        for column, factor in terms.items():
            for store, item in zip(self.entries, (row, column, factor), strict=True):
                store.append(item)
        self.limits.append(limit)

    def solve(self, seconds: float) -> Any:
        rows, columns, factors = self.entries
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.limits), len(self.prices)))
        return milp(
            np.array(self.prices),
            integrality=np.array(self.is_whole, dtype=int),
            bounds=Bounds(np.array(self.least), np.array(self.most)),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self.limits)),
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )


class Programme:
    """The mixed-integer programme of one graph and budget."""

    def __init__(self, model: Model, budget_bytes: int | None) -> None:
        self.model, self.rows, self.budget_bytes = model, _Rows(), budget_bytes
        self.peak = self.rows.variable(1.0, whole=False, most=np.inf) if budget_bytes is None else None
        """In search of the lowest peak: the peak, which is then all that is paid for."""
        self.useful = model.useful()
        self.run: dict[tuple[int, int], int] = {}
        self.have: dict[tuple[int, int], int] = {}
        self._add_variables()
        for t in range(model.num_stages):
            self._add_presence(t)
            self._add_memory(t)
        self._add_free_first_runs()

    def solve(self, seconds: float) -> Optimum:
        """Find the optimum, or as good a bound as the time allows."""
        result = self.rows.solve(seconds)
        if result.status == 2:
            return Optimum(False, float("inf"), None, True)
        bound = result.fun if result.status == 0 else result.mip_dual_bound
        schedule = None if result.x is None else self._schedule(result.x)
        return Optimum(True, bound if bound is not None else 0.0, schedule, result.status == 0)

    # ---------------------------------------------------------------------------------------------- choices

    def lowest_peak_bytes(self, seconds: float) -> int:
        """The lowest peak that any schedule reaches, or that the solver found in time."""
        assert self.peak is not None
        self.rows.prices = [float(column == self.peak) for column in range(len(self.rows.prices))]
        result = self.rows.solve(seconds)
        return round(result.fun * BYTES_PER_UNIT)

    def _add_variables(self) -> None:
        model, costs = self.model, self.model.problem.costs
        for t in range(model.num_stages):
            for v in model.values:
                base = model.problem.bases[v]
                constraint = model.problem.constraint(v)
                if t == 0:
                    is_run = v in model.in_forward
                    self.run[t, v] = self.rows.variable(least=float(is_run))
                elif v in self.useful[t] and constraint.no_recompute is None:
                    self.run[t, v] = self.rows.variable(costs.run_ticks[base] if v in model.in_forward else 0)
                if t > 0 and v in self.useful[t] and not (t == 1 and constraint.no_save is not None):
                    self.have[t, v] = self.rows.variable(costs.save_ticks[base] if t == 1 else 0)

    def _add_presence(self, t: int) -> None:
        """A value is there if it was when the stage began, or is computed in it."""
        for v in self.model.values:
            there = {x[t, v]: 1.0 for x in (self.run, self.have) if (t, v) in x}
            absent = dict.fromkeys(there, -1.0)
            if len(there) == 2:
                self.rows.at_most(1, there)
            if t > 0 and v in self.model.reads[t - 1]:
                self.rows.at_most(-1, absent)
            if (t + 1, v) in self.have:
                self.rows.at_most(0, {self.have[t + 1, v]: 1.0, **absent})
            for w in self._readers(t, v):
                self.rows.at_most(0, {self.run[t, w]: 1.0, **absent})

    def _readers(self, t: int, v: int) -> list[int]:
        found = [w for w in self.model.values if v in self.model.inputs[w] and (t, w) in self.run]
        return sorted(found, key=lambda w: self.model.place(t, w))

    def _add_free_first_runs(self) -> None:
        """What only backward needs is paid for from its second run in backward on."""
        for v in self.model.values:
            price = self.model.problem.costs.run_ticks[self.model.problem.bases[v]]
            if v not in self.model.in_forward and price:
                runs = [self.run[t, v] for t in range(1, self.model.num_stages) if (t, v) in self.run]
                further = self.rows.variable(price, whole=False, most=len(runs))
                self.rows.at_most(1, {**dict.fromkeys(runs, 1.0), further: -1.0})

    # ---------------------------------------------------------------------------------------------- memory

    def _add_memory(self, t: int) -> None:
        """Bound what is alive while each value of the stage is computed, and while its own node runs."""
        model = self.model
        needed = {v: self._needed_from(t, v) for v in model.values}
        given = model.before[t - 1] if t else 0
        for k in model.values:
            if (t, k) in self.run:
                self._bound(given, (self._alive(t, v, k, needed[v]) for v in model.values))
        if t:
            reads = model.reads[t - 1]
            held = sum(model.num_bytes[v] for v in (*reads, *model.outputs))
            kept = ((self.have.get((t + 1, v)), v) for v in model.values if v not in reads)
            self._bound(model.during[t - 1] + held, ((column, v, 0) for column, v in kept))

    def _bound(self, constant: int, alive: Any) -> None:
        terms: dict[int, float] = defaultdict(float)
        for column, v, surely in alive:
            constant += surely * self.model.num_bytes[v]
            if column is not None and self.model.num_bytes[v]:
                terms[column] += self.model.num_bytes[v] / BYTES_PER_UNIT
        if self.peak is not None:
            terms[self.peak] = -1.0
        self.rows.at_most(((self.budget_bytes or 0) - constant) / BYTES_PER_UNIT, terms)

    def _alive(self, t: int, v: int, k: int, needed: list[tuple[int, int | None]]) -> tuple[int | None, int, int]:
        """Is v alive while k is computed: a variable, or surely (1) or surely not (0)."""
        now = self.model.place(t, k)
        if v in self.model.outputs:
            return None, v, int(t > 0 or self.model.place(t, v) <= now)
        if self.model.place(t, v) > now:
            return self.have.get((t, v)), v, 0
        if v == k:
            return self.run[t, v], v, 0
        if t > 0 and v in self.model.reads[t - 1]:
            return None, v, 1
        return next((column for place, column in needed if place >= now), needed[-1][1]), v, 0

    def _needed_from(self, t: int, v: int) -> list[tuple[int, int | None]]:
        """For the place of each reader w of v, and for the end of the stage: is v still needed when w is computed?"""
        column = self.have.get((t + 1, v))
        chain: list[tuple[int, int | None]] = [(len(self.model.problem.bases), column)]
        for w in reversed(self._readers(t, v)):
            needed = self.rows.variable(whole=False)
            self.rows.at_most(0, {self.run[t, w]: 1.0, needed: -1.0})
            if column is not None:
                self.rows.at_most(0, {column: 1.0, needed: -1.0})
            chain.append((self.model.place(t, w), needed))
            column = needed
        return chain[::-1]

    # ---------------------------------------------------------------------------------------------- schedule

    def _schedule(self, x: Any) -> Schedule:
        """Write down the order that the solver chose."""
        model = self.model
        bases, value_of = model.problem.bases, model.problem.value_of
        members: dict[int, list[int]] = defaultdict(list)
        for i, v in value_of.items():
            members[v].append(i)
        saved = [bases[v] for v in model.values if (1, v) in self.have and x[self.have[1, v]] > 0.5]
        writer = Scheduler(model.graph, model.problem.constraints).writer(saved)
        for t, root in enumerate(model.roots, start=1):
            gone = [v for v in model.values if not ((t, v) in self.have and x[self.have[t, v]] > 0.5)]
            writer.drop(i for v in gone for i in members[v])
            for v in model.values:
                if (t, v) in self.run and x[self.run[t, v]] > 0.5:
                    writer.run(bases[v])
            writer.run(root)
        return writer.finish()


def optimum(problem: FlowProblem, storages: Storages, budget_bytes: int, seconds: float = 60.0) -> Optimum:
    """The fastest schedule whose peak is within the budget."""
    return Programme(Model(problem, storages), budget_bytes).solve(seconds)


def lowest_peak_bytes(problem: FlowProblem, storages: Storages, seconds: float = 60.0) -> int:
    """The lowest peak that any schedule reaches."""
    return Programme(Model(problem, storages), None).lowest_peak_bytes(seconds)


def check(problem: FlowProblem, storages: Storages, budget_bytes: int, found: Optimum) -> Simulation:
    """Run the optimum through the planners' own instruments: they must agree with the solver."""
    assert found.schedule is not None
    simulation = simulate(problem.graph, storages, found.schedule)
    assert simulation.peak_bytes <= budget_bytes, (simulation.peak_bytes, budget_bytes)
    ticks = extra_ticks(problem, found.schedule)
    if found.is_proven:
        assert abs(ticks - found.lower_bound_ticks) <= 1 + 1e-3 * ticks, (ticks, found.lower_bound_ticks)
    return simulation
