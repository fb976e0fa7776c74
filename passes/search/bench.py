"""Schedules of one graph are made, simulated and remembered here; a judge says what a schedule takes.

What steers a search is the peak of the simulation that the judge returns. Most judges return the activation peak in
bytes. Another one restates several limits as one (the shares of regions), or looks at several sizes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from ..graph import Role
from ..memory import Schedule, Scheduler, Simulation, Simulator, Storages
from .problem import FlowProblem
from .tuning import Tuning, is_long, is_small, tuning_for

Judge = Callable[[Schedule], Simulation]


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A schedule with what it takes."""

    schedule: Schedule
    simulation: Simulation
    extra_ticks: int
    """What keeping and recomputing add to the step, by the cost model."""
    planner: str
    """Who proposed it."""

    @property
    def peak_bytes(self) -> int:
        """The simulated activation peak, as the judge sees it."""
        return self.simulation.peak_bytes

    @property
    def is_long(self) -> bool:
        """True if its step takes so long to simulate that a search can hardly look at others."""
        return is_long(len(self.simulation.order))


class Bench:
    """Makes and judges schedules of one graph at one size, and remembers them."""

    def __init__(
        self,
        problem: FlowProblem,
        storages: Storages,
        *,
        judge: Judge | None = None,
        scheduler: Scheduler | None = None,
        simulator: Simulator | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """Judge by the peak in bytes unless told otherwise.

        A scheduler serves that was made for other sizes of the graph, and a simulator that was made for other prices.
        """
        self.problem, self.storages = problem, storages
        self.scheduler = Scheduler(problem.graph, problem.constraints) if scheduler is None else scheduler
        self.simulator = Simulator(problem.graph, storages) if simulator is None else simulator
        self._judge, self._tuning = judge, tuning
        self._remembered: dict[Hashable, Offer] = {}

    def judged(self, judge: Judge, problem: FlowProblem | None = None) -> Bench:
        """The same graph with another judge, and maybe with other prices."""
        problem = self.problem if problem is None else problem
        given = self.scheduler, self.simulator, self._tuning
        return Bench(problem, self.storages, judge=judge, scheduler=given[0], simulator=given[1], tuning=given[2])

    def offer(self, schedule: Schedule, planner: str) -> Offer:
        """Judge a schedule."""
        simulation = self.simulator.run(schedule) if self._judge is None else self._judge(schedule)
        return Offer(schedule, simulation, extra_ticks(self.problem, schedule), planner)

    def in_bytes(self, offer: Offer) -> Offer:
        """An offer with its real bytes, whoever judges here."""
        simulation = offer.simulation if self._judge is None else self.simulator.run(offer.schedule)
        return Offer(offer.schedule, simulation, offer.extra_ticks, offer.planner)

    def remembered(self, recipe: Hashable, make: Callable[[], Schedule], planner: str) -> Offer:
        """Judge what is made by a recipe, once."""
        offer = self._remembered.get(recipe)
        if offer is None:
            offer = self._remembered[recipe] = self.offer(make(), planner)
        return offer

    def keeping(self, values: Iterable[int]) -> Offer:
        """Keep some values, and recompute what else is needed once, when it is needed."""
        kept = frozenset(values)
        saved = (self.problem.bases[v] for v in sorted(kept))
        return self.remembered(kept, lambda: self.scheduler.backward(saved), "cut")

    @cached_property
    def fastest(self) -> Offer:
        """The plain cut: the cheapest plan if memory costs nothing."""
        problem = self.problem
        return self.offer(self.scheduler.backward(problem.saved(problem.cheapest)), "cut")

    @cached_property
    def without_recompute(self) -> Offer:
        """Keep whatever backward reads: the peak that fractions are fractions of."""
        problem = self.problem
        kept = [v for v in problem.needed if problem.constraint(v).no_save is None]
        saved = problem.saved(problem.cut(0.0, kept))
        return self.offer(self.scheduler.backward(saved), "keep all")

    @cached_property
    def tuning(self) -> Tuning:
        """How to search a graph of this size, unless that was said."""
        if self._tuning is not None:
            return self._tuning
        num_nodes = len(self.fastest.simulation.order)
        return tuning_for(len(self.problem.bases), len(self.scheduler.roots), num_nodes)

    @cached_property
    def is_large(self) -> bool:
        """True if a step takes so long to simulate that only a few can be looked at."""
        return self.fastest.is_long

    @property
    def is_small(self) -> bool:
        """True if forgetting everything everywhere can be tried, and annealing pays."""
        return is_small(len(self.problem.bases), len(self.scheduler.roots))

    def is_close(self, offer: Offer, budget_bytes: int) -> bool:
        """True if a peak is near enough to a budget and within it."""
        close = self.tuning.close
        return close is not None and close * budget_bytes <= offer.peak_bytes <= budget_bytes

    def close_bytes(self, budget_bytes: int) -> int | None:
        """A peak that is near enough to a budget; None if nothing but the nearest one is."""
        close = self.tuning.close
        return None if close is None else int(close * budget_bytes)


def extra_ticks(problem: FlowProblem, schedule: Schedule) -> int:
    """What a schedule adds to the step: writing and reading what is kept, and running nodes again."""
    graph, costs = problem.graph, problem.costs
    kept = dict.fromkeys(problem.bases[problem.value_of[i]] for i in schedule.received if i in problem.value_of)
    # What is not forward's runs for the first time in backward: that is no extra work.
    first_runs = [i for i in set(schedule.events) if graph.roles[i] is not Role.FORWARD]
    run_ticks = [sum(map(costs.run_ticks.__getitem__, nodes)) for nodes in (schedule.events, first_runs)]
    return sum(costs.save_ticks[i] for i in kept) + run_ticks[0] - run_ticks[1]


def by_peak(offer: Offer) -> tuple[int, int]:
    """The lowest peak first; of equal ones, the fastest."""
    return offer.peak_bytes, offer.extra_ticks


def by_time(offer: Offer) -> tuple[int, int]:
    """The fastest first; of equal ones, the one with the lowest peak."""
    return offer.extra_ticks, offer.peak_bytes


def by_excess(offer: Offer, budget_bytes: int) -> tuple[int, int, int]:
    """What exceeds a budget least first; of equal ones, the fastest."""
    return max(0, offer.peak_bytes - budget_bytes), offer.extra_ticks, offer.peak_bytes
