"""Plan for a budget on the activation peak: planners propose, the simulator disposes.

Three planners offer schedules: nothing recomputed that is dear (the plain cut), the plain cut at rising prices per kept
byte, and the chain of blocks. A local search improves on the best of them. Each offer is simulated; the fastest whose
peak fits is taken, so a budget never gives a plan that is slower than the plain cut where that fits.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..graph.joint_graph import Role
from ..memory.schedule import Schedule, Scheduler
from ..memory.simulate import Simulation, Simulator
from ..memory.storage import Storages
from .chain import Chain, ChainProgramme, Script, write
from .improve import Improver, has_few_tries
from .ladder import NUM_CUTS, Rung, ladder
from .moves import by_peak
from .narrow import End, narrow
from .problem import FlowProblem
from .squeeze import SQUEEZED_TO, Squeezer

ROUNDS_TO_MINIMUM = 4
"""How often the grid of the chain planner is refined in search of the lowest peak."""

LEVELS_TRIED = 5
"""How many of the lowest levels of memory are tried in each round, and how many of the others: what the planner
believes to be the lowest peak need not be the lowest one."""

AS_HIGH = 0.99
"""From what part of the peak on a stage of backward has the peak, too."""

STAGES_TRIED = 3
"""For how many stages of backward the cut is made as if the peak were there."""

LONGEST_PLAN = 3
"""How many times the graph's nodes backward may run in all, if the graph is large: with more repetitions than that,
planning and compiling take longer than anybody waits for."""

PILED_UP = 1.25
"""By what factor peaks rise again where cuts keep so little that what is recomputed piles up in backward; those at
higher prices are no better."""

CLOSE = 0.99
"""What part of a budget is enough if a graph is large: the rest is not worth the time it takes to look for it."""

FEW_CUTS = 8
"""How many cuts are made for a block, or for a stage of backward, if a graph is large."""

NEAR, NEAR_MISSES = 1.15, 2
"""By what factor plans may exceed a budget to be squeezed into it, and how many are: equal layers change sides of a cut
together, and a cut that needs 1 % too much may be a fifth faster than the next one that fits."""

NEAR_IF_SMALL = 1.5
"""The same for graphs of few values, each of which is a large part of a budget."""

FEW_MOVES = 8
"""How many values a squeeze into a budget looks at before it forgets one of them."""

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


class Planner:
    """Makes and judges schedules for one graph; a scheduler that was made for it at other sizes serves as well."""

    def __init__(self, problem: FlowProblem, storages: Storages, scheduler: Scheduler | None = None) -> None:
        self.problem, self.storages = problem, storages
        self.scheduler = Scheduler(problem.graph, problem.constraints) if scheduler is None else scheduler
        self.simulator = Simulator(problem.graph, storages)
        self._programmes: dict[int, ChainProgramme] = {}
        self._ladders: dict[int, tuple[Rung, ...]] = {}
        self._keepers: dict[frozenset[int], Offer] = {}
        self._written: dict[Script, Schedule | None] = {}
        self._followers: dict[Script, Offer] = {}
        self.rivals: list[Offer] = []
        """What was compared to find the fastest schedule within a budget."""

    @cached_property
    def fastest(self) -> Offer:
        """The plain cut: the cheapest plan if memory costs nothing."""
        problem = self.problem
        saved = problem.saved(problem.cheapest)
        return self._offer(self.scheduler.backward(saved), "cut")

    @cached_property
    def without_recompute(self) -> Offer:
        """Keep whatever backward reads: the peak that fractions are fractions of."""
        problem = self.problem
        kept = [v for v in problem.needed if problem.constraint(v).no_save is None]
        saved = problem.saved(problem.cut(0.0, kept))
        return self._offer(self.scheduler.backward(saved), "keep all")

    @cached_property
    def chain(self) -> Chain:
        """The graph as a chain of blocks."""
        return Chain(self.problem, self.scheduler, self.simulator, self._num_cuts)

    @property
    def _num_cuts(self) -> int:
        return FEW_CUTS if self.is_large else NUM_CUTS

    @cached_property
    def improver(self) -> Improver[Offer]:
        """A local search around offers."""
        return Improver(self.problem, self.scheduler, self._found)

    @cached_property
    def squeezer(self) -> Squeezer[Offer]:
        """Lowers the peaks of offers."""
        return Squeezer(self.problem, self.scheduler, self._found)

    @cached_property
    def dearer_cuts(self) -> tuple[Offer, ...]:
        """The plain cut at rising prices per byte."""
        rungs = self.ladder_beyond(-1)[1:]
        return tuple(self._falling(rungs, 0) if self.is_large else (self._keeping(rung.saved) for rung in rungs))

    @cached_property
    def is_large(self) -> bool:
        """True if a step takes so long to simulate that only a few can be looked at."""
        return has_few_tries(self.fastest.simulation)

    @cached_property
    def last_stages(self) -> tuple[int, ...]:
        """Per value, the last stage of backward that needs it or anything computed from it."""
        problem = self.problem
        last = [-1] * len(problem.bases)
        for stage, root in enumerate(self.scheduler.roots):
            for i in problem.graph.inputs[root]:
                if i in problem.value_of:
                    last[problem.value_of[i]] = stage
        for v in range(len(last) - 1, -1, -1):
            for u in problem.inputs[v]:
                last[u] = max(last[u], last[v])
        return tuple(last)

    def ladder_beyond(self, stage: int) -> tuple[Rung, ...]:
        """Cuts at rising prices for bytes that are still kept after a stage of backward.

        If the peak is there, what is used up by then takes no memory that anything else could have: whether it is kept
        or computed again just before, it is there.
        """
        if stage not in self._ladders:
            self._ladders[stage] = ladder(self.problem, unpriced=self._used_up_by(stage), num_cuts=self._num_cuts)
        return self._ladders[stage]

    def _used_up_by(self, stage: int) -> list[int]:
        """The values that nothing after a stage of backward needs; none at the end of forward, which is stage -1."""
        return [v for v, last in enumerate(self.last_stages) if last <= stage] if stage >= 0 else []

    def within_if_any(self, budget_bytes: int) -> Offer | None:
        """The same, without a search where it is plain that nothing fits."""
        # Where sizes are symbols, what is compared says at which other sizes a plan is the best one.
        is_hopeless = budget_bytes < self.simulator.least_bytes() and not self.storages.sizes.symbols
        return None if is_hopeless else self.within(budget_bytes)

    def least_ticks(self, budget_bytes: int) -> int:
        """No plan within a budget adds less to the step, however often it recomputes.

        All that it keeps for what comes after a stage of backward is alive during that stage, beside what the stage
        itself takes; and of choices that keep no more than the rest, the cuts at all prices are known to be the
        cheapest (a Lagrangian bound). It is looked at for the end of forward and for stages at which there was a peak.
        """
        if self.fastest.peak_bytes <= budget_bytes:
            return self.fastest.extra_ticks
        rooms = {stage: budget_bytes - self._bytes_beside(stage) for stage in (-1, *self._ladders)}
        bounds = (rung.least_ticks(room) for stage, room in rooms.items() for rung in self.ladder_beyond(stage))
        return max(0, int(max(bounds)))

    def _bytes_beside(self, stage: int) -> int:
        """A bound below what is alive during a stage of backward and is not kept for later ones."""
        used_up = {self.problem.bases[v] for v in self._used_up_by(stage)}
        return self.simulator.bytes_beside(self.scheduler.roots[stage], used_up) if stage >= 0 else 0

    def within(self, budget_bytes: int) -> Offer | None:
        """The fastest schedule found whose peak fits; None if none does."""
        if self.fastest.peak_bytes <= budget_bytes:
            return self.fastest
        offers = self._searched(budget_bytes)
        if budget_bytes < min(o.peak_bytes for o in offers):
            low = self.low_enough(budget_bytes)
            offers += [] if low is None else [low, *self.improver.within([low], budget_bytes)]
        self.rivals += [self.fastest, *offers]
        fitting = [o for o in offers if o.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda o: (o.extra_ticks, o.peak_bytes), default=None)

    def _searched(self, budget_bytes: int) -> list[Offer]:
        """What the planners find for a budget, whether it fits or not."""
        offers = list(self._offers(budget_bytes))
        if not self.is_large:
            offers += self._cuts_at_the_peak(offers, budget_bytes)
            offers += self._squeezed(offers, budget_bytes)
            return offers + self.improver.within(offers, budget_bytes)
        if any(o.planner == "cut" and o.peak_bytes <= HEADROOM * budget_bytes for o in offers):
            offers += self._cuts_at_the_peak(offers, budget_bytes)
        is_close = any(CLOSE * budget_bytes <= o.peak_bytes <= budget_bytes for o in offers)
        return offers + ([] if is_close else self.improver.within(offers, budget_bytes))

    def _offers(self, budget_bytes: int) -> Iterator[Offer]:
        yield self.without_recompute
        cuts = [rung for rung in self.ladder_beyond(-1) if rung.priced_bytes <= budget_bytes]
        yield from self._falling(cuts, budget_bytes) if self.is_large else (self._keeping(cut.saved) for cut in cuts)
        yield from self._chain_offers(budget_bytes)

    def _cuts_at_the_peak(self, offers: Sequence[Offer], budget_bytes: int) -> Iterator[Offer]:
        """Cut for the stage at which the best plan so far has its peak, and for the one to which that moves it."""
        tried: set[int] = set()
        best = min(offers, key=lambda o: _by_excess(o, budget_bytes))
        while len(tried) < STAGES_TRIED and (stage := self._peak_stage(best)) not in tried:
            tried.add(stage)
            found = list(self._mixed(self.ladder_beyond(stage), budget_bytes))
            yield from found
            best = min(found, key=lambda o: _by_excess(o, budget_bytes))

    def _mixed(self, rungs: Sequence[Rung], budget_bytes: int) -> Iterator[Offer]:
        """Find the cuts between which a budget lies; keep more at the end of forward, less at its beginning.

        Equal layers change sides of a cut all at the same price. What is kept of late ones is free again first.
        """
        first = yield from (self._falling if self.is_large else self._halving)(rungs, budget_bytes)
        if first:
            yield from self._between(rungs[first - 1].saved, rungs[first].saved, budget_bytes)

    def _halving(self, rungs: Sequence[Rung], budget_bytes: int) -> Generator[Offer, None, int]:
        """Find the first cut that fits, supposing that all later ones do."""
        low, high = 0, len(rungs) - 1
        while low < high:
            middle = (low + high) // 2
            offer = self._keeping(rungs[middle].saved)
            yield offer
            low, high = (low, middle) if offer.peak_bytes <= budget_bytes else (middle + 1, high)
        yield self._keeping(rungs[low].saved)
        return low

    def _falling(self, rungs: Sequence[Rung], budget_bytes: int) -> Generator[Offer, None, int]:
        """Find the first cut that fits, or the last one before what is recomputed piles up."""
        lowest = math.inf
        for k, rung in enumerate(rungs):
            if rung.priced_bytes > budget_bytes > 0 and k + 1 < len(rungs):
                continue
            offer = self._keeping(rung.saved)
            yield offer
            if offer.peak_bytes <= budget_bytes or offer.peak_bytes > PILED_UP * lowest:
                return k
            lowest = min(lowest, offer.peak_bytes)
        return len(rungs) - 1

    def _squeezed(self, offers: Sequence[Offer], budget_bytes: int) -> list[Offer]:
        """Squeeze the best of those that hardly exceed a budget and are faster than all that fit."""
        if self.storages.sizes.symbols:
            return []  # there are many budgets to plan for
        limit = (NEAR_IF_SMALL if self.improver.is_small else NEAR) * budget_bytes
        fastest = min((o.extra_ticks for o in offers if o.peak_bytes <= budget_bytes), default=math.inf)
        near = {
            (o.peak_bytes, o.extra_ticks): o
            for o in offers
            if budget_bytes < o.peak_bytes <= limit and o.extra_ticks < fastest
        }
        forward_ticks = self.improver.forward_ticks
        ranked = sorted(near, key=lambda found: found[0] / budget_bytes + found[1] / forward_ticks)
        return [self.squeezer.squeeze(near[found], budget_bytes, FEW_MOVES) for found in ranked[:NEAR_MISSES]]

    def _between(self, more: Sequence[int], less: Sequence[int], budget_bytes: int) -> Iterator[Offer]:
        places = sorted({*more, *less})

        def mixture(k: int) -> Offer:
            first = places[k] if k < len(places) else math.inf
            return self._keeping([*(v for v in less if v < first), *(v for v in more if v >= first)])

        fitting, exceeding = mixture(len(places)), mixture(0)
        if fitting.peak_bytes <= budget_bytes < exceeding.peak_bytes:
            ends = End(len(places), fitting.peak_bytes), End(0, exceeding.peak_bytes)
            yield from narrow(mixture, *ends, budget_bytes, self._close_bytes(budget_bytes))

    def _close_bytes(self, budget_bytes: int) -> int | None:
        """A peak that is near enough to a budget; None if nothing but the nearest one is."""
        return int(CLOSE * budget_bytes) if self.is_large else None

    def _peak_stage(self, offer: Offer) -> int:
        """The stage of backward at which a schedule has its peak; of several in a row, the last has used up most."""
        simulation = offer.simulation
        own, highest = set(self.scheduler.roots), [0]
        for moment in range(simulation.num_forward, len(simulation.order)):
            highest[-1] = max(highest[-1], simulation.live_bytes[moment])
            if simulation.order[moment] in own:
                highest.append(0)
        peak = max(highest)
        stage = highest.index(peak)
        while stage + 1 < len(highest) and highest[stage + 1] >= AS_HIGH * peak:
            stage += 1
        return min(stage, len(own) - 1)  # nothing is alive where all sizes are 0, as high as anywhere

    def _chain_offers(self, budget_bytes: int) -> Iterator[Offer]:
        """Look for the most memory that the chain planner may believe in so that its plan really fits."""
        return self._levels_within(self._programme(int(HEADROOM * budget_bytes)), budget_bytes)

    def _levels_within(self, programme: ChainProgramme, budget_bytes: int) -> Iterator[Offer]:
        levels = programme.feasible_levels
        if not levels:
            return
        most = self._following(programme.script(levels[-1]))
        if most is None:
            return
        yield most
        if most.peak_bytes > budget_bytes:
            ends = End(levels[0] - 1, (levels[0] - 1) * programme.step_bytes), End(levels[-1], most.peak_bytes)
            close_bytes = self._close_bytes(budget_bytes)
            yield from narrow(lambda k: self._following(programme.script(k)), *ends, budget_bytes, close_bytes)

    def low_enough(self, budget_bytes: int) -> Offer | None:
        """A schedule near the lowest that fits, looked for no longer than needed; None if there is none."""
        if self.low.peak_bytes <= budget_bytes:
            return self.low
        if self.may_squeeze:
            squeezed = self.squeezer.squeeze(self.low, budget_bytes)
            if squeezed.peak_bytes <= budget_bytes:
                return squeezed
        return self.lowest if self.lowest.peak_bytes <= budget_bytes else None

    @cached_property
    def low(self) -> Offer:
        """The lowest schedule that the planners and a search around them find."""
        best = min((self.fastest, self.without_recompute, *self.dearer_cuts), key=by_peak)
        for _ in range(ROUNDS_TO_MINIMUM):
            programme = self._programme(best.peak_bytes)
            lower = min((best, *self._followed(programme)), key=by_peak)
            is_close = lower.peak_bytes >= (self._close_bytes(best.peak_bytes) or best.peak_bytes)
            best = lower
            if is_close:
                break
        return self.improver.lower([best, self.fastest, *self.dearer_cuts])

    def _followed(self, programme: ChainProgramme) -> Iterator[Offer]:
        """Follow the chain planner with little memory, as long as it does not repeat too much."""
        levels = programme.feasible_levels
        tried = self._least_repeating(programme)[:LEVELS_TRIED] if self.is_large else _spread(levels)
        for level in reversed(tried):
            offer = self._following(programme.script(level))
            if offer is None:
                break
            yield offer

    def _least_repeating(self, programme: ChainProgramme) -> range:
        """The levels at which the chain planner does not repeat too much, supposing that it repeats less with more."""
        levels = programme.feasible_levels
        low, high = 0, len(levels)
        while low < high:
            middle = (low + high) // 2
            is_long = self._write(programme.script(levels[middle])) is None
            low, high = (middle + 1, high) if is_long else (low, middle)
        return levels[low:]

    @cached_property
    def lowest(self) -> Offer:
        """The schedule with the lowest peak found: a search within a peak may end far below it, if it tries much."""
        lowest = self.low
        if has_few_tries(lowest.simulation):
            return lowest
        for _ in range(ROUNDS_TO_MINIMUM):
            lower = min((lowest, *self.improver.within([lowest], lowest.peak_bytes)), key=by_peak)
            if lower.peak_bytes == lowest.peak_bytes:
                break
            lowest = lower
        if self.improver.is_small:
            lowest = self._sought_below(lowest)
        if not self.may_squeeze:
            return lowest
        low_cut = min(self.dearer_cuts, key=by_peak, default=lowest)
        return min((self.squeezer.squeeze_out(start) for start in (lowest, low_cut)), key=by_peak)

    def _sought_below(self, lowest: Offer) -> Offer:
        """Look for schedules within less, as one does within a budget, as long as there are any."""
        parts = list(SQUEEZED_TO)
        while parts:
            lower = min((lowest, *self._searched(int(parts[0] * lowest.peak_bytes))), key=by_peak)
            if lower is lowest:
                parts.pop(0)
            lowest = lower
        return lowest

    @property
    def may_squeeze(self) -> bool:
        """True if there is time for many tries; where sizes are symbols, there are many plans to be made."""
        return not has_few_tries(self.low.simulation) and not self.storages.sizes.symbols

    def _programme(self, memory_bytes: int) -> ChainProgramme:
        if memory_bytes not in self._programmes:
            self._programmes[memory_bytes] = ChainProgramme(self.chain, memory_bytes)
        return self._programmes[memory_bytes]

    def programme_above(self, memory_bytes: int) -> ChainProgramme:
        """Of the programmes that were made, the smallest one for at least so much memory; the largest if none is."""
        large = [known for known in self._programmes if known >= memory_bytes]
        return self._programme(min(large, default=max(self._programmes, default=memory_bytes)))

    def _keeping(self, values: Iterable[int]) -> Offer:
        """Keep some values, and recompute what else is needed once, when it is needed."""
        kept = frozenset(values)
        if kept not in self._keepers:
            problem = self.problem
            saved = [problem.bases[v] for v in sorted(kept)]
            self._keepers[kept] = self._offer(self.scheduler.backward(saved), "cut")
        return self._keepers[kept]

    def _following(self, script: Script) -> Offer | None:
        """Do as the chain planner says; None if that repeats too much."""
        schedule = self._write(script)
        if schedule is None:
            return None
        if script not in self._followers:
            self._followers[script] = self._offer(schedule, "chain")
        return self._followers[script]

    def _write(self, script: Script) -> Schedule | None:
        if script not in self._written:
            most_runs = None if self.improver.is_small else LONGEST_PLAN * len(self.problem.graph.nodes)
            self._written[script] = write(self.chain, script, most_runs)
        return self._written[script]

    def take_over(self, planner: Planner) -> None:
        """Use the chain of another planner for the same graph, and what was written for it."""
        self.__dict__["chain"], self._written = planner.chain, dict(planner._written)

    def _offer(self, schedule: Schedule, planner: str) -> Offer:
        return Offer(schedule, self._simulated(schedule), extra_ticks(self.problem, schedule), planner)

    def _found(self, schedule: Schedule) -> Offer:
        return self._offer(schedule, "search")

    def _simulated(self, schedule: Schedule) -> Simulation:
        return self.simulator.run(schedule)


def _spread(levels: range) -> list[int]:
    """The lowest levels, and some from all over the rest."""
    return sorted({*levels[:LEVELS_TRIED], *levels[:: max(1, len(levels) // LEVELS_TRIED)]})


def _by_excess(offer: Offer, budget_bytes: int) -> tuple[int, int]:
    return max(0, offer.peak_bytes - budget_bytes), offer.extra_ticks


def extra_ticks(problem: FlowProblem, schedule: Schedule) -> int:
    """What a schedule adds to the step: writing and reading what is kept, and running nodes again."""
    graph, costs = problem.graph, problem.costs
    kept = dict.fromkeys(problem.bases[problem.value_of[i]] for i in schedule.received if i in problem.value_of)
    # What is not forward's runs for the first time in backward: that is no extra work.
    first_runs = [i for i in set(schedule.events) if graph.roles[i] is not Role.FORWARD]
    run_ticks = [sum(map(costs.run_ticks.__getitem__, nodes)) for nodes in (schedule.events, first_runs)]
    return sum(costs.save_ticks[i] for i in kept) + run_ticks[0] - run_ticks[1]
