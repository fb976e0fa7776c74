"""Plan for a budget on the activation peak: planners propose, the simulator disposes.

Schedules are proposed by the plain cut at rising prices per kept byte (of bytes kept for backward, or beyond one of its
stages), by the chain of blocks, and by searches around the best of these. Each is judged at the bench; the fastest
whose peak fits is taken, so a budget never gives a plan that is slower than the plain cut where that fits.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property

from ..memory import Simulation
from .bench import Bench, Offer, by_excess, by_peak, by_time
from .chain import Chain, chain_offers, lowest_levels
from .improve import Improver
from .ladder import End, Ladders, Rung, narrow
from .moves import Moves
from .squeeze import Squeezer


class Planner:
    """Finds schedules of one graph: the fastest within a budget, and the one with the lowest peak."""

    def __init__(
        self, bench: Bench, *, seeds: Sequence[Offer] = (), ladders: Ladders | None = None, chain: Chain | None = None
    ) -> None:
        """`seeds` are offered beside what is proposed; what another planner for this graph has found may be given."""
        self.bench, self.problem, self.storages, self.tuning = bench, bench.problem, bench.storages, bench.tuning
        self.seeds = seeds
        self.ladders = Ladders(bench.problem, bench.scheduler, bench.tuning) if ladders is None else ladders
        self._chain = chain

    @property
    def fastest(self) -> Offer:
        """The plain cut: the cheapest plan if memory costs nothing."""
        return self.bench.fastest

    @property
    def without_recompute(self) -> Offer:
        """Keep whatever backward reads: the peak that fractions are fractions of."""
        return self.bench.without_recompute

    @cached_property
    def chain(self) -> Chain:
        """The graph as a chain of blocks."""
        return Chain(self.bench) if self._chain is None else self._chain

    @cached_property
    def moves(self) -> Moves:
        """Schedules as sets of facts."""
        return Moves(self.problem, self.bench.scheduler)

    @cached_property
    def improver(self) -> Improver:
        """A local search around offers."""
        return Improver(self.bench, self.moves)

    @cached_property
    def squeezer(self) -> Squeezer:
        """Lowers the peaks of offers."""
        return Squeezer(self.bench, self.moves)

    @cached_property
    def dearer_cuts(self) -> tuple[Offer, ...]:
        """The plain cut at rising prices per byte."""
        return tuple(cuts_within(self.bench, self.ladders.beyond(-1)[1:], 0))

    # ---------------------------------------------------------------------------------------------- within a budget

    def within_if_any(self, budget_bytes: int) -> Offer | None:
        """As `within`, but without a search where it is plain that nothing fits."""
        # Where sizes are symbols, the lowest schedule is looked for from what this search has tried.
        is_hopeless = budget_bytes < self.bench.simulator.least_bytes() and not self.storages.sizes.symbols
        return None if is_hopeless else self.within(budget_bytes)

    def within(self, budget_bytes: int) -> Offer | None:
        """The fastest schedule found whose peak fits; None if none does."""
        fitting = [offer for offer in self.compared(budget_bytes) if offer.peak_bytes <= budget_bytes]
        return min(fitting, key=by_time, default=None)

    def compared(self, budget_bytes: int) -> list[Offer]:
        """What is found for a budget, whether it fits or not; the plain cut alone where that fits."""
        if self.fastest.peak_bytes <= budget_bytes:
            return [self.fastest]
        offers = self._searched(budget_bytes)
        if budget_bytes < min(o.peak_bytes for o in offers):
            low = self._low_enough(budget_bytes)
            offers += [] if low is None else [low, *self.improver.within([low], budget_bytes)]
        return [self.fastest, *offers]

    def least_ticks(self, budget_bytes: int) -> int:
        """No plan within a budget adds less to the step, however often it recomputes.

        All that it keeps for what comes after a stage of backward is alive during that stage, beside what the stage
        itself takes; and of choices that keep no more than the rest, the cuts at all prices are known to be the
        cheapest (a Lagrangian bound). It is looked at for the end of forward and for stages at which there was a peak.
        """
        if self.fastest.peak_bytes <= budget_bytes:
            return self.fastest.extra_ticks
        rooms = {stage: budget_bytes - self._bytes_beside(stage) for stage in self.ladders.stages}
        bounds = (rung.least_ticks(room) for stage, room in rooms.items() for rung in self.ladders.beyond(stage))
        return max(0, int(max(bounds)))

    def _bytes_beside(self, stage: int) -> int:
        """A bound below what is alive during a stage of backward and is not kept for later ones."""
        used_up = {self.problem.bases[v] for v in self.ladders.used_up_by(stage)}
        return self.bench.simulator.bytes_beside(self.bench.scheduler.roots[stage], used_up) if stage >= 0 else 0

    def _searched(self, budget_bytes: int) -> list[Offer]:
        """What is proposed for a budget, whether it fits or not."""
        bench, headroom = self.bench, self.tuning.headroom * budget_bytes
        cuts = [rung for rung in self.ladders.beyond(-1) if rung.priced_bytes <= budget_bytes]
        offers = [*self.seeds, self.without_recompute, *cuts_within(bench, cuts, budget_bytes)]
        offers += chain_offers(bench, self.chain, budget_bytes)
        if not bench.is_large:
            offers += cuts_at_the_peak(bench, self.ladders, offers, budget_bytes)
            offers += self.squeezed(offers, budget_bytes)
            return offers + self.improver.within(offers, budget_bytes)
        if any(o.planner == "cut" and o.peak_bytes <= headroom for o in offers):
            offers += cuts_at_the_peak(bench, self.ladders, offers, budget_bytes)
        is_done = any(bench.is_close(o, budget_bytes) for o in offers)
        return offers + ([] if is_done else self.improver.within(offers, budget_bytes))

    def squeezed(self, offers: Sequence[Offer], budget_bytes: int) -> list[Offer]:
        """Squeeze the best of those that hardly exceed a budget and are faster than all that fit."""
        if self.storages.sizes.symbols:
            return []  # there are many budgets to plan for
        fastest = min((o.extra_ticks for o in offers if o.peak_bytes <= budget_bytes), default=math.inf)
        near = {
            (o.peak_bytes, o.extra_ticks): o
            for o in offers
            if budget_bytes < o.peak_bytes <= self.tuning.near * budget_bytes and o.extra_ticks < fastest
        }
        forward_ticks = self.moves.forward_ticks
        ranked = sorted(near, key=lambda found: found[0] / budget_bytes + found[1] / forward_ticks)
        chosen = [near[found] for found in ranked[: self.tuning.near_misses]]
        return [self.squeezer.squeeze(offer, budget_bytes, self.tuning.few_moves) for offer in chosen]

    # ---------------------------------------------------------------------------------------------- the lowest peak

    def _low_enough(self, budget_bytes: int) -> Offer | None:
        """A schedule near the lowest that fits, looked for no longer than needed; None if there is none."""
        if self.low.peak_bytes <= budget_bytes:
            return self.low
        if self._may_squeeze:
            squeezed = self.squeezer.squeeze(self.low, budget_bytes)
            if squeezed.peak_bytes <= budget_bytes:
                return squeezed
        return self.lowest if self.lowest.peak_bytes <= budget_bytes else None

    @cached_property
    def low(self) -> Offer:
        """The lowest schedule that the planners and a search around them find."""
        best = min((self.fastest, self.without_recompute, *self.dearer_cuts), key=by_peak)
        for _ in range(self.tuning.rounds_to_minimum):
            lower = min((best, *lowest_levels(self.bench, self.chain, best.peak_bytes)), key=by_peak)
            is_close = lower.peak_bytes >= (self.bench.close_bytes(best.peak_bytes) or best.peak_bytes)
            best = lower
            if is_close:
                break
        return self.improver.lower([best, self.fastest, *self.dearer_cuts])

    @cached_property
    def lowest(self) -> Offer:
        """The schedule with the lowest peak found: a search within a peak may end far below it, if it tries much."""
        lowest = self.low
        if lowest.is_long:
            return lowest
        for _ in range(self.tuning.rounds_to_minimum):
            lower = min((lowest, *self.improver.within([lowest], lowest.peak_bytes)), key=by_peak)
            if lower.peak_bytes == lowest.peak_bytes:
                break
            lowest = lower
        if self.bench.is_small:
            lowest = self._sought_below(lowest)
        if not self._may_squeeze:
            return lowest
        low_cut = min(self.dearer_cuts, key=by_peak, default=lowest)
        return min((self.squeezer.squeeze_out(start) for start in (lowest, low_cut)), key=by_peak)

    def _sought_below(self, lowest: Offer) -> Offer:
        """Look for schedules within less, as one does within a budget, as long as there are any."""
        parts = list(self.tuning.squeezed_to)
        while parts:
            lower = min((lowest, *self._searched(int(parts[0] * lowest.peak_bytes))), key=by_peak)
            if lower is lowest:
                parts.pop(0)
            lowest = lower
        return lowest

    @property
    def _may_squeeze(self) -> bool:
        """True if there is time for many tries; where sizes are symbols, there are many plans to be made."""
        return not self.low.is_long and not self.storages.sizes.symbols


# -------------------------------------------------------------------------------------------------- proposals of cuts


def cuts_within(bench: Bench, rungs: Sequence[Rung], budget_bytes: int) -> Iterator[Offer]:
    """All cuts of a ladder; of a large graph those up to the first that fits."""
    if bench.is_large:
        yield from _falling(bench, rungs, budget_bytes)
    else:
        yield from (bench.keeping(rung.saved) for rung in rungs)


def cuts_at_the_peak(bench: Bench, ladders: Ladders, offers: Sequence[Offer], budget_bytes: int) -> Iterator[Offer]:
    """Cut for the stage at which the best plan so far has its peak, and for the one to which that moves it."""
    tried: set[int] = set()
    best = _nearest(offers, budget_bytes)
    while len(tried) < bench.tuning.stages_tried and (stage := peak_stage(bench, best.simulation)) not in tried:
        tried.add(stage)
        found = list(_mixed(bench, ladders.beyond(stage), budget_bytes))
        yield from found
        best = _nearest(found, budget_bytes)


def _nearest(offers: Sequence[Offer], budget_bytes: int) -> Offer:
    return min(offers, key=lambda o: by_excess(o, budget_bytes)[:2])


def peak_stage(bench: Bench, simulation: Simulation) -> int:
    """The stage of backward at which a schedule has its peak; of several in a row, the last has used up most."""
    own, highest = set(bench.scheduler.roots), [0]
    for moment in range(simulation.num_forward, len(simulation.order)):
        highest[-1] = max(highest[-1], simulation.live_bytes[moment])
        if simulation.order[moment] in own:
            highest.append(0)
    peak = max(highest)
    stage = highest.index(peak)
    while stage + 1 < len(highest) and highest[stage + 1] >= bench.tuning.as_high * peak:
        stage += 1
    return min(stage, len(own) - 1)  # nothing is alive where all sizes are 0, as high as anywhere


def _mixed(bench: Bench, rungs: Sequence[Rung], budget_bytes: int) -> Iterator[Offer]:
    """Find the cuts between which a budget lies; keep more at the end of forward, less at its beginning.

    Equal layers change sides of a cut all at the same price. What is kept of late ones is free again first.
    """
    first = yield from (_falling if bench.is_large else _halving)(bench, rungs, budget_bytes)
    if first:
        yield from _between(bench, rungs[first - 1].saved, rungs[first].saved, budget_bytes)


def _halving(bench: Bench, rungs: Sequence[Rung], budget_bytes: int) -> Generator[Offer, None, int]:
    """Find the first cut that fits, supposing that all later ones do."""
    low, high = 0, len(rungs) - 1
    while low < high:
        middle = (low + high) // 2
        offer = bench.keeping(rungs[middle].saved)
        yield offer
        low, high = (low, middle) if offer.peak_bytes <= budget_bytes else (middle + 1, high)
    yield bench.keeping(rungs[low].saved)
    return low


def _falling(bench: Bench, rungs: Sequence[Rung], budget_bytes: int) -> Generator[Offer, None, int]:
    """Find the first cut that fits, or the last one before what is recomputed piles up."""
    lowest = math.inf
    for k, rung in enumerate(rungs):
        if rung.priced_bytes > budget_bytes > 0 and k + 1 < len(rungs):
            continue
        offer = bench.keeping(rung.saved)
        yield offer
        if offer.peak_bytes <= budget_bytes or offer.peak_bytes > bench.tuning.piled_up * lowest:
            return k
        lowest = min(lowest, offer.peak_bytes)
    return len(rungs) - 1


def _between(bench: Bench, more: Sequence[int], less: Sequence[int], budget_bytes: int) -> Iterator[Offer]:
    """Keep what the one cut keeps of late values, and what the other keeps of early ones."""
    places = sorted({*more, *less})

    def mixture(k: int) -> Offer:
        first = places[k] if k < len(places) else math.inf
        return bench.keeping([*(v for v in less if v < first), *(v for v in more if v >= first)])

    fitting, exceeding = mixture(len(places)), mixture(0)
    if fitting.peak_bytes <= budget_bytes < exceeding.peak_bytes:
        ends = End(len(places), fitting.peak_bytes), End(0, exceeding.peak_bytes)
        yield from narrow(mixture, *ends, budget_bytes, bench.close_bytes(budget_bytes), bench.tuning.guesses)
