"""Squeeze a schedule that exceeds a budget: forget what is alive at the highest moments and not read there.

What is forgotten first is what frees most for the time that it takes to compute it again. The effort is bounded by the
number of nodes simulated, so that equal graphs give equal plans.
"""

from __future__ import annotations

from ..memory.simulate import Simulation
from .moves import J, Move, Search, by_peak, excess_bytes

NODES_SQUEEZED = 250_000
"""The effort for squeezing one plan: more than for a search within a budget, since most plans need no squeezing."""

HIGHEST_MOMENTS, APART = 6, 10
"""How many of the highest moments a squeeze looks at before it gives up, and how far apart they are."""

SMALLEST_FORGOTTEN = 0.01
"""What part of the peak a value has to be for a squeeze to forget it."""

CHEAP = 1e-3
"""What part of the forward's time is nothing: moves that cost less are told apart by the bytes that they free."""

SQUEEZED_TO = (0.95, 0.9, 0.8)
"""In search of the lowest peak, the parts of the lowest one so far that a squeeze is to reach, one after the other:
a peak made of a few large values goes down in large steps."""


class Squeezer(Search[J]):
    """Lowers the peaks of schedules of one graph."""

    def squeeze_out(self, lowest: J) -> J:
        """Squeeze a schedule as long as that lowers its peak."""
        parts, self.nodes_left = list(SQUEEZED_TO), NODES_SQUEEZED
        while parts:
            squeezed = self._squeeze(lowest, int(parts[0] * lowest.peak_bytes))
            if squeezed.peak_bytes < lowest.peak_bytes:
                lowest = squeezed
            else:
                parts.pop(0)
        return lowest

    def squeeze(self, offer: J, budget_bytes: int, most_moves: int | None = None) -> J:
        """Lower the peak towards a budget by forgetting what is not read at the highest moments; best first.

        With `most_moves` only so many are tried at a time, those first that free most for the time of one op.
        """
        self.nodes_left = NODES_SQUEEZED
        return self._squeeze(offer, budget_bytes, most_moves)

    def _squeeze(self, offer: J, budget_bytes: int, most_moves: int | None = None) -> J:
        candidate, lowest = self.read(offer.schedule), offer
        while offer.peak_bytes > budget_bytes and self.nodes_left > 0:
            for moment in _highest_moments(offer.simulation, budget_bytes):
                moves = sorted(self._forgetting(offer, moment), key=self._seconds_per_byte)[:most_moves]
                changed = [move.apply(candidate) for move in moves]
                judged = [
                    (self._relief(offer, tried := self._try(facts), budget_bytes), tried, facts) for facts in changed
                ]
                relief, tried, facts = max(judged, key=lambda row: row[0], default=(0.0, offer, candidate))
                if relief > 0:
                    offer, candidate = tried, facts
                    break
            else:
                break  # nothing that is alive at any of these moments helps
            lowest = min(lowest, offer, key=by_peak)
        return lowest

    def _relief(self, offer: J, other: J, budget_bytes: int) -> float:
        """How much less another schedule exceeds a budget, all its moments taken together, for what it adds to time."""
        relief = excess_bytes(offer.simulation, budget_bytes) - excess_bytes(other.simulation, budget_bytes)
        return relief / max(CHEAP * self.forward_ticks, other.extra_ticks - offer.extra_ticks)

    def _seconds_per_byte(self, move: Move) -> float:
        """What it takes to compute again what a move forgets, if all that is read for it is at hand."""
        values = {fact.value for fact in (*move.added, *move.removed)}
        ticks = sum(self.problem.costs.run_ticks[self.problem.bases[v]] for v in values)
        return ticks / max(1, *(self.problem.num_bytes(v) for v in values))

    def _forgetting(self, offer: J, moment: int) -> list[Move]:
        """Ways to forget something large that is alive at a moment and not read there."""
        return self.aimed_moves(offer, self.touches(offer.schedule), moment, SMALLEST_FORGOTTEN * offer.peak_bytes)


def _highest_moments(simulation: Simulation, budget_bytes: int) -> list[int]:
    """Some moments that exceed a budget, the highest first, none close to another."""
    live = simulation.live_bytes
    found: list[int] = []
    for moment in sorted((m for m, num in enumerate(live) if num > budget_bytes), key=lambda m: -live[m]):
        if all(abs(moment - other) > APART for other in found):
            found.append(moment)
            if len(found) == HIGHEST_MOMENTS:
                break
    return found
