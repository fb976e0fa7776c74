"""Squeeze a schedule that exceeds a budget: forget what is alive at the highest moments and not read there.

What is forgotten first is what frees most for the time that it takes to compute it again. The effort is bounded by the
number of nodes simulated, so that equal graphs give equal plans.
"""

from __future__ import annotations

from ..memory import Simulation
from .bench import Bench, Offer, by_peak
from .moves import Candidate, Move, Moves, excess_bytes


class Squeezer:
    """Lowers the peaks of schedules of one graph."""

    def __init__(self, bench: Bench, moves: Moves) -> None:
        self.bench, self.problem, self.tuning, self.moves = bench, bench.problem, bench.tuning, moves
        self.nodes_left = 0
        """How many nodes may still be simulated."""

    def squeeze_out(self, lowest: Offer) -> Offer:
        """Squeeze a schedule as long as that lowers its peak."""
        parts, self.nodes_left = list(self.tuning.squeezed_to), self.tuning.nodes_squeezed
        while parts:
            squeezed = self._squeeze(lowest, int(parts[0] * lowest.peak_bytes))
            if squeezed.peak_bytes < lowest.peak_bytes:
                lowest = squeezed
            else:
                parts.pop(0)
        return lowest

    def squeeze(self, offer: Offer, budget_bytes: int, most_moves: int | None = None) -> Offer:
        """Lower the peak towards a budget by forgetting what is not read at the highest moments; best first.

        With `most_moves` only so many are tried at a time, those first that free most for the time of one op.
        """
        self.nodes_left = self.tuning.nodes_squeezed
        return self._squeeze(offer, budget_bytes, most_moves)

    def _squeeze(self, offer: Offer, budget_bytes: int, most_moves: int | None = None) -> Offer:
        candidate, lowest = self.moves.read(offer.schedule), offer
        while offer.peak_bytes > budget_bytes and self.nodes_left > 0:
            for moment in self._highest_moments(offer.simulation, budget_bytes):
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

    def _relief(self, offer: Offer, other: Offer, budget_bytes: int) -> float:
        """How much less another schedule exceeds a budget, all its moments taken together, for what it adds to time."""
        relief = excess_bytes(offer.simulation, budget_bytes) - excess_bytes(other.simulation, budget_bytes)
        return relief / max(self.tuning.cheap * self.moves.forward_ticks, other.extra_ticks - offer.extra_ticks)

    def _seconds_per_byte(self, move: Move) -> float:
        """What it takes to compute again what a move forgets, if all that is read for it is at hand."""
        values = {fact.value for fact in (*move.added, *move.removed)}
        ticks = sum(self.problem.costs.run_ticks[self.problem.bases[v]] for v in values)
        return ticks / max(1, *(self.problem.num_bytes(v) for v in values))

    def _forgetting(self, offer: Offer, moment: int) -> list[Move]:
        """Ways to forget something large that is alive at a moment and not read there."""
        least_bytes = self.tuning.smallest_forgotten * offer.peak_bytes
        return self.moves.aimed_at(offer.simulation, self.moves.touches(offer.schedule), moment, least_bytes)

    def _try(self, candidate: Candidate) -> Offer:
        offer = self.bench.offer(self.moves.write(candidate), "search")
        self.nodes_left -= len(offer.simulation.order)
        return offer

    def _highest_moments(self, simulation: Simulation, budget_bytes: int) -> list[int]:
        """Some moments that exceed a budget, the highest first, none close to another."""
        live = simulation.live_bytes
        found: list[int] = []
        for moment in sorted((m for m, num in enumerate(live) if num > budget_bytes), key=lambda m: -live[m]):
            if all(abs(moment - other) > self.tuning.apart for other in found):
                found.append(moment)
                if len(found) == self.tuning.highest_moments:
                    break
        return found
