"""Improve schedules by local search: what is kept, what is recomputed when needed, and what is forgotten in between.

Two searches among candidates:

fill     use the memory that a schedule leaves under its budget: keep what is recomputed, dearest per byte first;
anneal   simulated annealing (Kirkpatrick, Gelatt, Vecchi, 1983), for graphs that are small enough for many tries;

The effort is bounded by the number of nodes simulated, not by time, and the random numbers are seeded: equal graphs
give equal plans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import reduce

from .bench import Bench, Offer, by_excess, by_peak
from .moves import Candidate, Move, Moves, Touches, What, excess_bytes, keep_plainly


class Improver:
    """Searches around schedules of one graph; what is done with some values only, if told so."""

    def __init__(self, bench: Bench, moves: Moves, movable: Collection[int] | None = None) -> None:
        self.bench, self.problem, self.tuning, self.moves = bench, bench.problem, bench.tuning, moves
        self.movable = movable
        """Values that annealing may treat in another way; None for all of them."""
        self.nodes_left = 0
        """How many nodes may still be simulated."""
        self.excess_price = self.tuning.excess_price
        """What exceeding a budget costs, as long as the last search has seen."""

    def within(self, offers: Sequence[Offer], budget_bytes: int) -> list[Offer]:
        """Look for schedules that fit a budget and are faster than those offered."""
        num_nodes = self.nodes_left = self.tuning.nodes_simulated
        ranked = sorted(offers, key=lambda o: self._energy(o, budget_bytes))
        # What nearly fits often leads further; what fits leads somewhere for certain.
        fitting = [o for o in ranked[2:] if o.peak_bytes <= budget_bytes and ranked[1].peak_bytes > budget_bytes]
        starts = [self.moves.read(o.schedule) for o in (*ranked[:2], *fitting[:1])]
        if self.bench.is_small:
            starts.append(self._best_kept(offers, budget_bytes, keep_plainly, 3 * num_nodes // 4))
            starts.append(self._best_kept(offers, budget_bytes, self.moves.keep_only, num_nodes // 2))
        filled = [self._fill(start, budget_bytes) for start in starts]
        annealed = self._anneal(filled, budget_bytes)
        return [*filled, *annealed]

    def around(self, start: Offer, budget_bytes: int) -> list[Offer]:
        """Anneal from one schedule."""
        self.nodes_left = self.tuning.nodes_in_region
        return self._anneal([start], budget_bytes)

    def lower(self, offers: Sequence[Offer]) -> Offer:
        """Look for a lower peak than those offered have."""
        lowest = min(offers, key=by_peak)
        if not self.bench.is_small:
            return lowest
        for _ in range(self.tuning.rounds_to_lower):
            lower = min(
                (lowest, *self.within([lowest, *offers], int(self.tuning.lower_by * lowest.peak_bytes))), key=by_peak
            )
            if lower.peak_bytes == lowest.peak_bytes:
                break
            lowest = lower
        return lowest

    def _best_kept(
        self,
        offers: Sequence[Offer],
        budget_bytes: int,
        keep: Callable[[frozenset[int]], Candidate],
        nodes_kept: int,
    ) -> Candidate:
        """Choose which values to keep, by trying what offers keep and changing it one by one as long as that helps."""
        offered = [frozenset(f.value for f in self.moves.read(o.schedule) if f.what is What.SAVED) for o in offers]
        starts = dict.fromkeys((*offered, *self.moves.evenly_spaced(min(offered, key=len))))
        tried = [(self._energy(self._try(keep(kept)), budget_bytes), k) for k, kept in enumerate(starts)]
        energy, k = min(tried)
        kept = list(starts)[k]
        values = [v for v in range(len(self.problem.bases)) if self.moves.may_drop(v) and self.moves.may_save(v)]
        swaps = [frozenset({v, w}) for v in values for w in values if v <= w]
        is_better = True
        while is_better and self.nodes_left > nodes_kept:
            is_better = False
            for swap in sorted(swaps, key=len):
                if len(swap) == 2 and len(swap & kept) != 1:
                    continue
                changed = self._energy(self._try(keep(kept ^ swap)), budget_bytes)
                if changed < energy:
                    kept, energy, is_better = kept ^ swap, changed, True
                if self.nodes_left < nodes_kept:
                    break
        return keep(kept)

    def _energy(self, offer: Offer, budget_bytes: int) -> float:
        ticks = offer.extra_ticks / self.moves.forward_ticks
        if offer.peak_bytes <= budget_bytes:
            return ticks
        # Where several moments exceed the budget, bringing down one of them is progress, too.
        excess = excess_bytes(offer.simulation, budget_bytes)
        weighted = offer.peak_bytes - budget_bytes + self.tuning.excess_share * excess
        return ticks + self.excess_price * weighted / max(1, budget_bytes)

    def _try(self, candidate: Candidate) -> Offer:
        offer = self.bench.offer(self.moves.write(candidate), "search")
        self.nodes_left -= len(offer.simulation.order)
        return offer

    # ---------------------------------------------------------------------------------------------- fill

    def _fill(self, candidate: Candidate, budget_bytes: int) -> Offer:
        """Keep what is recomputed, as much as fits, until nothing more does."""
        best = self._try(candidate)
        is_better = best.peak_bytes <= budget_bytes
        while is_better and self.nodes_left > 0:
            before = best
            moves = self._keeps(candidate, best)
            is_large = best.is_long
            pending = [self._surely_fitting(moves, budget_bytes - best.peak_bytes) if is_large else moves]
            while pending and self.nodes_left > 0:
                moves = pending.pop()
                changed = reduce(lambda facts, move: move.apply(facts), moves, candidate)
                offer = self._try(changed)
                if offer.peak_bytes <= budget_bytes and offer.extra_ticks < best.extra_ticks:
                    candidate, best = changed, offer
                elif len(moves) > 1 and not is_large:
                    middle = len(moves) // 2
                    pending += [moves[middle:], moves[:middle]]
            is_better = best is not before
        return best

    def _surely_fitting(self, moves: Sequence[Move], free_bytes: int) -> list[Move]:
        """Those that together need no more than the memory that is free, first come, first served."""
        chosen: list[Move] = []
        for move in moves:
            num_bytes = sum(self.problem.num_bytes(v) for v in {fact.value for fact in (*move.added, *move.removed)})
            if num_bytes <= free_bytes:
                chosen.append(move)
                free_bytes -= num_bytes
        return chosen

    def _keeps(self, candidate: Candidate, offer: Offer) -> list[Move]:
        """All ways to recompute less, dearest per byte first."""
        costs, bases = self.problem.costs, self.problem.bases
        rows = []
        for v, touches in sorted(self.moves.touches(offer.schedule).items()):
            per_byte = costs.run_ticks[bases[v]] / max(1, self.problem.num_bytes(v))
            rows += [(-per_byte, v, move) for move in self.moves.of_value(candidate, v, touches) if move.is_keep]
        return [move for _, _, move in sorted(rows, key=lambda row: row[:2])]

    # ---------------------------------------------------------------------------------------------- anneal

    def _anneal(self, starts: Sequence[Offer], budget_bytes: int) -> list[Offer]:
        """Anneal from each start with an equal share of the effort that is left."""
        found = list(starts)
        for k in range(len(starts)):
            share = self.nodes_left // (len(starts) - k)
            if share < self.tuning.fewest_tries * len(self.problem.graph.nodes):
                break
            fits = any(o.peak_bytes <= budget_bytes for o in found)
            prices = self.tuning.excess_price, self.tuning.excess_price_if_none_fits
            self.excess_price = prices[0] if fits else prices[1]
            start = min(found, key=lambda o: by_excess(o, budget_bytes)) if k else starts[-1]
            candidate = self.moves.read(start.schedule)
            found.append(self._anneal_from(candidate, budget_bytes, self.nodes_left - share, random.Random(k)))
        return found

    def _anneal_from(self, candidate: Candidate, budget_bytes: int, nodes_kept: int, rng: random.Random) -> Offer:
        offer = best = self._try(candidate)
        touches = self.moves.touches(offer.schedule)
        total, tuning = self.nodes_left - nodes_kept, self.tuning
        while self.nodes_left > nodes_kept:
            move = None
            if offer.peak_bytes > budget_bytes and rng.random() < tuning.aimed_share:
                move = self._aimed_move(offer, touches, rng)
            move = move or self._random_move(candidate, touches, rng)
            if move is None:
                break
            changed = move.apply(candidate)
            if rng.random() < tuning.second_share:
                second = self._random_move(candidate, touches, rng)
                changed = changed if second is None else second.apply(changed)
            tried = self._try(changed)
            progress = 1 - (self.nodes_left - nodes_kept) / total
            temperature = tuning.start_temperature * (tuning.end_temperature / tuning.start_temperature) ** progress
            rise = self._energy(tried, budget_bytes) - self._energy(offer, budget_bytes)
            if rise <= 0 or rng.random() < math.exp(-rise / temperature):
                candidate, offer = changed, tried
                touches = self.moves.touches(offer.schedule)
                if by_excess(offer, budget_bytes) < by_excess(best, budget_bytes):
                    best = offer
        return best

    def _random_move(self, candidate: Candidate, touches: Touches, rng: random.Random) -> Move | None:
        if self.movable is not None:
            touches = {v: moments for v, moments in touches.items() if v in self.movable}
        values = sorted(touches)
        if not values:
            return None  # backward reads nothing of forward's
        for _ in range(self.tuning.moves_drawn):
            v = values[int(rng.random() * len(values))]
            moves = [*self.moves.of_value(candidate, v, touches[v]), *self.moves.early(candidate, v, touches)]
            if moves:
                return moves[int(rng.random() * len(moves))]
        return None

    def _aimed_move(self, offer: Offer, touches: Touches, rng: random.Random) -> Move | None:
        """Forget something that is alive at the peak and is not read there."""
        moves = self.moves.aimed_at(offer.simulation, touches, offer.simulation.peak_moment)
        return moves[int(rng.random() * len(moves))] if moves else None
