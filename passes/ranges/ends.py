"""Plan for the end of a range of sizes, and for its other ends at the same time.

Where several sizes change, a range ends in several directions, and a plan has to fit at all of its ends. One search
does: schedules are made with the prices and sizes of the first end, and each is judged by the most memory that it takes
at any of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from ..memory.schedule import Schedule, Scheduler
from ..memory.simulate import Simulation, Simulator
from ..memory.storage import Storages
from ..search.improve import has_few_tries
from ..search.planner import HEADROOM, LEVELS_TRIED, Offer, Planner
from ..search.problem import FlowProblem
from ..sizes.symbols import Sizes


class EndPlanner(Planner):
    """Makes schedules for one end of a range, and judges them at all of its ends."""

    def __init__(
        self, problem: FlowProblem, storages: Storages, others: Sequence[Sizes] = (), scheduler: Scheduler | None = None
    ) -> None:
        super().__init__(problem, storages, scheduler)
        self.others = _that_count(storages.sizes, others)
        """The ends beside the one that schedules are made for, without those at which nothing is larger."""
        self.judge = Simulator(problem.graph, storages, self.others) if self.others else self.simulator

    def _simulated(self, schedule: Schedule) -> Simulation:
        return self.judge.run(schedule)

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
        yield self._keeping(self.ladder_beyond(-1)[-1].saved)
        programme = self._programme(int(HEADROOM * budget_bytes))
        followed = (self._following(programme.script(level)) for level in programme.feasible_levels[:LEVELS_TRIED])
        yield from (offer for offer in followed if offer is not None)

    def only(self, is_wanted: Sequence[bool]) -> EndPlanner:
        """The same with fewer ends; the first one stays."""
        if all(is_wanted):
            return self
        others = [end for end, wanted in zip(self.others, is_wanted[1:], strict=True) if wanted]
        fewer = EndPlanner(self.problem, self.storages, others, self.scheduler)
        fewer.take_over(self)
        fewer._ladders, fewer._programmes = self._ladders, self._programmes
        return fewer

    def refine(self, planner: Planner, lowest: Offer, budget_bytes: int) -> None:
        """Look for faster schedules than the lowest one of a planner at other sizes, which is known to fit.

        Of the planners, only that of the chain gets as low. What it believed of memory at the other sizes steers well
        enough where the local search can make many tries; where it cannot, the chain is looked at anew.
        """
        offers = [self._offer(lowest.schedule, lowest.planner)]
        if has_few_tries(offers[0].simulation):
            offers += self._chain_offers(budget_bytes)
        else:
            self.take_over(planner)
            offers += self._levels_within(planner.programme_above(int(HEADROOM * lowest.peak_bytes)), budget_bytes)
        offers += self.improver.within(offers, budget_bytes)
        self.rivals += [self.fastest, *offers]

    def best(self, budget_bytes: int) -> list[Offer]:
        """Of all that was found, what fits at every end at which anything does; the fastest first."""
        rivals = self.rivals or [self.fastest]
        fits = [tuple([peak <= budget_bytes for peak in _peaks(offer)]) for offer in rivals]
        can_fit = tuple(any(column) for column in zip(*fits, strict=True))
        fitting = [offer for offer, row in zip(rivals, fits, strict=True) if row == can_fit] if any(can_fit) else []
        return sorted(fitting, key=lambda o: (o.extra_ticks, o.peak_bytes))


def _that_count(own: Sizes, others: Sequence[Sizes]) -> tuple[Sizes, ...]:
    """Leave out sizes at which nothing takes more memory than at the first ones, and those that are there already."""
    rows = [tuple([sizes.value_of_terms(terms) for terms in own.table]) for sizes in (own, *others)]
    distinct = {row: sizes for row, sizes in zip(rows[1:], others, strict=True) if any(map(operator.gt, row, rows[0]))}
    return tuple(distinct.values())


def _peaks(offer: Offer) -> Sequence[int]:
    """The peak at each of the ends."""
    return offer.simulation.peaks or (offer.peak_bytes,)
