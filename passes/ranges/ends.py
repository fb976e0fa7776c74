"""Plan for the end of a range of sizes, and for its other ends at the same time.

Where several sizes change, a range ends in several directions, and a plan has to fit at all of its ends. One search
does: schedules are made with the prices and sizes of the first end, and each is judged by the most memory that it takes
at any of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from ..memory import Scheduler, Simulator, Storages
from ..search import Bench, FlowProblem, Offer, Planner, by_time, chain_offers, follow, offers_within, tell
from ..sizes import Sizes


class EndPlanner:
    """Has schedules made for one end of a range, and judged at all of its ends."""

    def __init__(self, planner: Planner, others: tuple[Sizes, ...]) -> None:
        self.planner, self.others = planner, others
        """The ends beside the one that schedules are made for."""

    @staticmethod
    def at(problem: FlowProblem, storages: Storages, others: Sequence[Sizes], scheduler: Scheduler) -> EndPlanner:
        """Plan for one end, and for those of some others at which anything is larger."""
        counting = _that_count(storages.sizes, others)
        bench = Bench(problem, storages, scheduler=scheduler)
        return EndPlanner(Planner(_judged_at(bench, counting)), counting)

    def reachable(self, budget_bytes: int) -> tuple[bool, ...]:
        """Per end, the first one's own first: does any of the schedules fit there that take the least memory?

        Looking at a few of them takes a fraction of what it takes to find out for certain that nothing fits.
        """
        found = [False] * (1 + len(self.others))
        for offer in self._low_offers(budget_bytes):
            fits = [peak <= budget_bytes for peak in _peaks(offer)]
            found = [a or b for a, b in zip(found, fits, strict=True)]
            if all(found):
                break
        return tuple(found)

    def _low_offers(self, budget_bytes: int) -> Iterator[Offer]:
        bench, chain, tuning = self.planner.bench, self.planner.chain, self.planner.tuning
        yield bench.keeping(self.planner.ladders.beyond(-1)[-1].saved)
        programme = chain.programme(int(tuning.headroom * budget_bytes))
        scripts = (tell(chain, programme, level) for level in programme.feasible_levels[: tuning.levels_tried])
        followed = (follow(bench, chain, script) for script in scripts)
        yield from (offer for offer in followed if offer is not None)

    def only(self, is_wanted: Sequence[bool]) -> EndPlanner:
        """The same with fewer ends; the first one stays."""
        if all(is_wanted):
            return self
        others = tuple(end for end, wanted in zip(self.others, is_wanted[1:], strict=True) if wanted)
        counting = _that_count(self.planner.storages.sizes, others)
        bench = _judged_at(self.planner.bench, counting)
        return EndPlanner(Planner(bench, ladders=self.planner.ladders, chain=self.planner.chain), counting)

    def within(self, budget_bytes: int) -> list[Offer]:
        """Look for schedules that fit at all ends; the fastest first."""
        return _fitting(self.planner.compared(budget_bytes), budget_bytes)

    def refine(self, planner: Planner, lowest: Offer, budget_bytes: int) -> list[Offer]:
        """Look for faster schedules than the lowest one of a planner at other sizes, which is known to fit.

        Of the planners, only that of the chain gets as low. What it believed of memory at the other sizes steers well
        enough where the local search can make many tries; where it cannot, the chain is looked at anew.
        """
        own, bench = self.planner, self.planner.bench
        offers = [bench.offer(lowest.schedule, lowest.planner)]
        if offers[0].is_long:
            offers += chain_offers(bench, own.chain, budget_bytes)
        else:
            programme = planner.chain.programme_above(int(own.tuning.headroom * lowest.peak_bytes))
            offers += offers_within(bench, planner.chain, programme, budget_bytes)
        offers += own.improver.within(offers, budget_bytes)
        return _fitting([own.fastest, *offers], budget_bytes)


def _fitting(offers: Sequence[Offer], budget_bytes: int) -> list[Offer]:
    """Of some offers those that fit at every end at which any of them does; the fastest first."""
    fits = [tuple([peak <= budget_bytes for peak in _peaks(offer)]) for offer in offers]
    can_fit = tuple(any(column) for column in zip(*fits, strict=True))
    fitting = [offer for offer, row in zip(offers, fits, strict=True) if row == can_fit] if any(can_fit) else []
    return sorted(fitting, key=by_time)


def _judged_at(bench: Bench, others: Sequence[Sizes]) -> Bench:
    """A bench at which a schedule takes the most that it does at its own sizes and at others."""
    return bench.judged(Simulator(bench.problem.graph, bench.storages, others).run if others else bench.simulator.run)


def _that_count(own: Sizes, others: Sequence[Sizes]) -> tuple[Sizes, ...]:
    """Leave out sizes at which nothing takes more memory than at the first ones, and those that are there already."""
    rows = [tuple(sizes.table_bytes) for sizes in (own, *others)]
    distinct = {row: sizes for row, sizes in zip(rows[1:], others, strict=True) if any(map(operator.gt, row, rows[0]))}
    return tuple(distinct.values())


def _peaks(offer: Offer) -> Sequence[int]:
    """The peak at each of the ends."""
    return offer.simulation.peaks or (offer.peak_bytes,)
