"""Plan for a budget on the activation peak: planners propose, the simulator disposes.

Three planners offer schedules: nothing recomputed that is dear (the plain cut), the plain cut at rising prices per kept
byte, and the chain of blocks. A local search improves on the best of them. Each offer is simulated; the fastest whose
peak fits is taken, so a budget never gives a plan that is slower than the plain cut where that fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .chain_planner import Chain, ChainProgramme
from .constraints import Reason
from .errors import InfeasibleBudget
from .flow import FlowProblem
from .improve import Improver
from .joint_graph import Role
from .ladder import ladder
from .schedule import Schedule, schedule_backward
from .simulate import Simulation, simulate
from .source import source_line
from .storage import Storages

ROUNDS_TO_MINIMUM = 4
"""How often the grid of the chain planner is refined in search of the lowest peak."""

LEVELS_TRIED = 5
"""How many of the lowest levels of memory are tried in each round, and how many of the others: what the planner
believes to be the lowest peak need not be the lowest one."""

FUSION_MARGIN = 0.07
"""What is left free of a budget where a compiler fuses: its peaks were measured up to 7 % above the simulated ones on
the models of the benchmark (UNet; most are within 4 %)."""

HEADROOM = 1.25
"""How much more than the budget the chain planner may believe to have: it counts some memory that is free already."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A schedule with what it takes."""

    schedule: Schedule
    simulation: Simulation
    extra_ticks: int
    """What keeping and recomputing add to the step, by the cost model."""
    planner: str

    @property
    def peak_bytes(self) -> int:
        """The simulated activation peak."""
        return self.simulation.peak_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on the activation peak, as the user stated it."""

    text: str
    """The user's words, for messages."""
    fraction: float | None = None
    """Of the peak without recomputation."""
    num_bytes: int | None = None
    take_minimum: bool = False
    """Where the bound cannot be met, warn and take the lowest plan instead of raising an error."""

    def resolve(self, planner: Planner) -> int:
        """The bound in bytes for one graph."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.fraction is not None
        return int(self.fraction * planner.without_recompute.peak_bytes)

    def when_infeasible(self, planner: Planner, budget_bytes: int) -> Offer:
        """Fall back on the lowest plan with a warning, or raise an error that says how low one can get."""
        lowest = planner.lowest
        if lowest.peak_bytes <= budget_bytes:
            return lowest
        message = explain_minimum(self.text, budget_bytes, planner.problem, lowest)
        if not self.take_minimum:
            raise InfeasibleBudget(message)
        warnings.warn(f'{message}\nTaking the lowest plan, as on_infeasible="minimum" asks.', stacklevel=2)
        return lowest


class Planner:
    """Makes and judges schedules for one graph."""

    def __init__(self, problem: FlowProblem, storages: Storages) -> None:
        self.problem, self.storages = problem, storages
        self.rivals: list[Offer] = []
        """What was compared to find the fastest schedule within a budget."""

    @cached_property
    def fastest(self) -> Offer:
        """The plain cut: the cheapest plan if memory costs nothing."""
        problem = self.problem
        saved = problem.saved(problem.cut())
        return self._offer(schedule_backward(problem.graph, problem.constraints, saved), "cut")

    @cached_property
    def without_recompute(self) -> Offer:
        """Keep whatever backward reads: the peak that fractions are fractions of."""
        problem = self.problem
        kept = [v for v in problem.needed if problem.constraint(v).no_save is None]
        saved = problem.saved(problem.cut(0.0, kept))
        return self._offer(schedule_backward(problem.graph, problem.constraints, saved), "keep all")

    @cached_property
    def chain(self) -> Chain:
        """The graph as a chain of blocks."""
        return Chain(self.problem, self.storages)

    @cached_property
    def improver(self) -> Improver[Offer]:
        """A local search around offers."""
        return Improver(self.problem, lambda schedule: self._offer(schedule, "search"))

    @cached_property
    def dearer_cuts(self) -> tuple[Offer, ...]:
        """The plain cut at rising prices per byte."""
        return tuple(self._offer(self._keeping(rung.saved), "cut") for rung in ladder(self.problem)[1:])

    def within_safely(self, budget_bytes: int) -> Offer | None:
        """The same with a margin for what the simulator cannot know of a compiler; without, if that is too little."""
        safe = self.within(int((1 - FUSION_MARGIN) * budget_bytes)) if any(self.storages.is_fused) else None
        return safe or self.within(budget_bytes)

    def within(self, budget_bytes: int) -> Offer | None:
        """The fastest schedule found whose peak fits; None if none does."""
        if self.fastest.peak_bytes <= budget_bytes:
            return self.fastest
        offers = list(self._offers(budget_bytes))
        offers += self.improver.within(offers, budget_bytes)
        if budget_bytes < min(o.peak_bytes for o in offers) and self.lowest.peak_bytes <= budget_bytes:
            offers += [self.lowest, *self.improver.within([self.lowest], budget_bytes)]
        self.rivals += [self.fastest, *offers]
        fitting = [o for o in offers if o.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda o: (o.extra_ticks, o.peak_bytes), default=None)

    def _offers(self, budget_bytes: int) -> Iterator[Offer]:
        yield self.without_recompute
        yield from self.dearer_cuts
        yield from self._chain_offers(budget_bytes)

    def _chain_offers(self, budget_bytes: int) -> Iterator[Offer]:
        """Look for the most memory that the chain planner may believe in so that its plan really fits."""
        programme = ChainProgramme(self.chain, int(HEADROOM * budget_bytes))
        levels = programme.feasible_levels
        low, high = 0, len(levels) - 1
        while low <= high:
            middle = high if low == 0 and high == len(levels) - 1 else (low + high) // 2
            offer = self._offer(programme.schedule(levels[middle]), "chain")
            yield offer
            if offer.peak_bytes <= budget_bytes:
                low = middle + 1
            else:
                high = middle - 1

    @cached_property
    def lowest(self) -> Offer:
        """The schedule with the lowest peak found."""
        best = min((self.fastest, self.without_recompute, *self.dearer_cuts), key=_by_peak)
        for _ in range(ROUNDS_TO_MINIMUM):
            programme = ChainProgramme(self.chain, best.peak_bytes)
            levels = _spread(programme.feasible_levels)
            offers = [self._offer(programme.schedule(level), "chain") for level in levels]
            lower = min((best, *offers), key=_by_peak)
            if lower is best:
                break
            best = lower
        return self.improver.lower([best, self.fastest, *self.dearer_cuts])

    def _keeping(self, values: Sequence[int]) -> Schedule:
        problem = self.problem
        return schedule_backward(problem.graph, problem.constraints, [problem.bases[v] for v in values])

    def _offer(self, schedule: Schedule, planner: str) -> Offer:
        simulation = simulate(self.problem.graph, self.storages, schedule)
        return Offer(schedule, simulation, extra_ticks(self.problem, schedule), planner)


def _spread(levels: range) -> list[int]:
    """The lowest levels, and some from all over the rest."""
    return sorted({*levels[:LEVELS_TRIED], *levels[:: max(1, len(levels) // LEVELS_TRIED)]})


def _by_peak(offer: Offer) -> tuple[int, int]:
    return offer.peak_bytes, offer.extra_ticks


def extra_ticks(problem: FlowProblem, schedule: Schedule) -> int:
    """What a schedule adds to the step: writing and reading what is kept, and running nodes again."""
    graph, costs = problem.graph, problem.costs
    kept = dict.fromkeys(problem.bases[problem.value_of[i]] for i in schedule.received if i in problem.value_of)
    total = sum(costs.save_ticks[i] for i in kept)
    seen: set[int] = set()
    for i in schedule.events:
        if graph.roles[i] is Role.FORWARD or i in seen:
            total += costs.run_ticks[i]
        seen.add(i)
    return total


LOWEST_PLAN_OPTION = 'on_infeasible="minimum"'
"""What a compiled program can ask for instead of an error; a region outside of one has no such option."""


def explain_minimum(text: str, budget_bytes: int, problem: FlowProblem, lowest: Offer) -> str:
    """Say how low the peak can get, which op sets it, what is alive there, and who insists on keeping it."""
    simulation, graph = lowest.simulation, problem.graph
    moment = simulation.peak_moment
    node = graph.nodes[simulation.order[moment]]
    source = source_line(node.stack_trace or "")
    alive = simulation.alive_at(moment)
    lines = [
        f"memory_budget={text}: that is {mib(budget_bytes)}, but the lowest activation peak found is "
        f"{mib(lowest.peak_bytes)} ({lowest.peak_bytes} bytes).",
        f"It is set by `{node.name}` ({node.target}) in {'forward' if moment < simulation.num_forward else 'backward'}"
        + (f", {source}" if source else "")
        + ", where these are alive:",
        *(f"  {mib(m.num_bytes):>10}  {graph.nodes[m.node].name}" for m in alive[:5]),
    ]
    insisted = kept_by_policy(problem, {m.node for m in alive})
    if insisted:
        lines.append("A policy insists on keeping " + ", ".join(f"`{graph.nodes[i].name}`" for i in insisted[:5]) + ".")
    lines.append(
        f"Give at least {lowest.peak_bytes} bytes, or set {LOWEST_PLAN_OPTION} to take the lowest plan; "
        "smaller batches lower it, too."
    )
    return "\n".join(lines)


def kept_by_policy(problem: FlowProblem, alive: set[int]) -> list[int]:
    """Those of the nodes alive whose values a policy insists on keeping."""
    values = (problem.value_of[i] for i in sorted(alive) if i in problem.value_of)
    return [problem.bases[v] for v in values if problem.constraint(v).no_recompute is Reason.POLICY_SAVE]


def mib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**20:.2f} MiB"
