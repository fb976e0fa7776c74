"""Improve schedules by local search: what is kept, what is recomputed when needed, and what is forgotten in between.

Two searches among candidates:

fill     use the memory that a schedule leaves under its budget: keep what is recomputed, dearest per byte first;
anneal   simulated annealing (Kirkpatrick, Gelatt, Vecchi, 1983), for graphs that are small enough for many tries;

The effort is bounded by the number of nodes simulated, not by time, and the random numbers are seeded: equal graphs
give equal plans.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from ..graph.joint_graph import Role
from ..memory.simulate import Simulation
from .moves import Candidate, Fact, J, Move, Search, Touch, What, by_peak, excess_bytes

NODES_SIMULATED, NODES_SIMULATED_IF_LARGE = 120_000, 40_000
"""The effort for one budget; large graphs are chains mostly, where others plan well. A node takes four microseconds."""

FEWEST_TRIES = 200
"""With fewer tries than these left, annealing finds nothing."""

FEW_TRIES = 12
"""With fewer tries than these, the local search was seen to leave memory unused on large graphs (T5), and not with
twice as many (Llama)."""

LARGEST_TABLE = 2_500
"""Values times stages up to which forgetting everything everywhere is tried."""

START_TEMPERATURE, END_TEMPERATURE = 3e-2, 3e-4
"""As parts of the forward's time. Not derived: tried on small graphs with known optima."""

EXCESS_PRICE = 4.0
"""What exceeding the budget costs in the search: exceeding it by 1 % is as bad as 4 % of the forward's time."""

EXCESS_PRICE_IF_NONE_FITS = 16.0
"""The same as long as nothing that fits has been found."""

EXCESS_SHARE = 0.2
"""What exceeding it at one more moment costs, compared with the largest excess."""

AIMED_SHARE, SECOND_SHARE = 0.5, 0.3
"""How often a move is aimed at the peak while that exceeds the budget, and how often two moves are made at once."""

LOWER_BY, ROUNDS_TO_LOWER = 0.6, 3
"""In search of the lowest peak, the part of the lowest one so far that is tried next, and how often."""


def has_few_tries(simulation: Simulation) -> bool:
    """Is a step so long that a search can hardly look at others?"""
    return FEW_TRIES * len(simulation.order) > NODES_SIMULATED_IF_LARGE


class Improver(Search[J]):
    """Searches around schedules of one graph."""

    excess_price = EXCESS_PRICE

    def within(self, offers: Sequence[J], budget_bytes: int) -> list[J]:
        """Look for schedules that fit a budget and are faster than those offered."""
        self.nodes_left = NODES_SIMULATED if self.is_small else NODES_SIMULATED_IF_LARGE
        ranked = sorted(offers, key=lambda o: self._energy(o, budget_bytes))
        # What nearly fits often leads further; what fits leads somewhere for certain.
        fitting = [o for o in ranked[2:] if o.peak_bytes <= budget_bytes and ranked[1].peak_bytes > budget_bytes]
        starts = [self.read(o.schedule) for o in (*ranked[:2], *fitting[:1])]
        if self.is_small:
            starts.append(self._best_kept(offers, budget_bytes, self._keep_plainly, 3 * NODES_SIMULATED // 4))
            starts.append(self._best_kept(offers, budget_bytes, self._keep_only, NODES_SIMULATED // 2))
        filled = [self._fill(start, budget_bytes) for start in starts]
        annealed = self._anneal(filled, budget_bytes)
        return [*filled, *annealed]

    def lower(self, offers: Sequence[J]) -> J:
        """Look for a lower peak than those offered have."""
        lowest = min(offers, key=by_peak)
        if not self.is_small:
            return lowest
        for _ in range(ROUNDS_TO_LOWER):
            lower = min((lowest, *self.within([lowest, *offers], int(LOWER_BY * lowest.peak_bytes))), key=by_peak)
            if lower.peak_bytes == lowest.peak_bytes:
                break
            lowest = lower
        return lowest

    @property
    def is_small(self) -> bool:
        """True if forgetting everything everywhere can be tried, and annealing pays."""
        return len(self.members) * len(self.roots) < LARGEST_TABLE

    def _best_kept(
        self,
        offers: Sequence[J],
        budget_bytes: int,
        keep: Callable[[frozenset[int]], Candidate],
        nodes_kept: int,
    ) -> Candidate:
        """Choose which values to keep, by trying what offers keep and changing it one by one as long as that helps."""
        offered = [frozenset(f.value for f in self.read(o.schedule) if f.what is What.SAVED) for o in offers]
        starts = dict.fromkeys((*offered, *self._evenly_spaced(min(offered, key=len))))
        tried = [(self._energy(self._try(keep(kept)), budget_bytes), k) for k, kept in enumerate(starts)]
        energy, k = min(tried)
        kept = list(starts)[k]
        values = [v for v in range(len(self.members)) if self._may_drop(v) and self._may_save(v)]
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

    def _keep_plainly(self, kept: frozenset[int]) -> Candidate:
        """Keep a few values; recompute the others once."""
        return frozenset(Fact(What.SAVED, v) for v in kept)

    def _evenly_spaced(self, always: frozenset[int]) -> Iterator[frozenset[int]]:
        """Every second forward value, every third, and so on, beside what is always kept."""
        bases, roles = self.problem.bases, self.problem.graph.roles
        forward = [v for v, i in enumerate(bases) if roles[i] is Role.FORWARD and self._may_save(v)]
        for step in range(2, 1 + len(forward) // 2):
            yield always.union(forward[step - 1 :: step])

    def _keep_only(self, kept: frozenset[int]) -> Candidate:
        """Keep a few values, and forget all others after each stage: little memory, much time."""
        forgotten = [v for v in range(len(self.members)) if v not in kept and self._may_drop(v)]
        dropped = (Fact(What.DROPPED, v, stage) for v in forgotten for stage in range(len(self.roots)))
        return frozenset((*(Fact(What.SAVED, v) for v in kept), *dropped))

    def _energy(self, offer: J, budget_bytes: int) -> float:
        ticks = offer.extra_ticks / self.forward_ticks
        if offer.peak_bytes <= budget_bytes:
            return ticks
        # Where several moments exceed the budget, bringing down one of them is progress, too.
        excess = excess_bytes(offer.simulation, budget_bytes)
        return ticks + self.excess_price * (offer.peak_bytes - budget_bytes + EXCESS_SHARE * excess) / max(
            1, budget_bytes
        )

    # ---------------------------------------------------------------------------------------------- fill

    def _fill(self, candidate: Candidate, budget_bytes: int) -> J:
        """Keep what is recomputed, as much as fits, until nothing more does."""
        best = self._try(candidate)
        is_better = best.peak_bytes <= budget_bytes
        while is_better and self.nodes_left > 0:
            before = best
            moves = self._keeps(candidate, best)
            is_large = has_few_tries(best.simulation)
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

    def _keeps(self, candidate: Candidate, offer: J) -> list[Move]:
        """All ways to recompute less, dearest per byte first."""
        costs, bases = self.problem.costs, self.problem.bases
        rows = []
        for v, touches in sorted(self.touches(offer.schedule).items()):
            per_byte = costs.run_ticks[bases[v]] / max(1, self.problem.num_bytes(v))
            rows += [(-per_byte, v, move) for move in self._moves(candidate, v, touches) if move.is_keep]
        return [move for _, _, move in sorted(rows, key=lambda row: row[:2])]

    def _moves(self, candidate: Candidate, v: int, touches: Sequence[Touch]) -> list[Move]:
        """All that can be done about one value."""
        moves = []
        saved = frozenset({Fact(What.SAVED, v)})
        if saved <= candidate:
            if self._may_drop(v):
                moves.append(Move(removed=saved))
        elif self._may_save(v) and touches:
            moves.append(Move(added=saved, is_keep=True))
        if not self._may_drop(v):
            return moves
        for before, touch in itertools.pairwise(touches):
            if 0 <= before.stage < touch.stage:
                stages = range(before.stage, touch.stage)
                dropped = frozenset(Fact(What.DROPPED, v, stage) for stage in stages)
                is_keep = touch.is_run
                if is_keep:
                    moves.append(Move(removed=dropped, is_keep=True))
                else:
                    moves.append(Move(added=frozenset({Fact(What.DROPPED, v, before.stage)})))
        return moves

    # ---------------------------------------------------------------------------------------------- anneal

    def _anneal(self, starts: Sequence[J], budget_bytes: int) -> list[J]:
        """Anneal from each start with an equal share of the effort that is left."""
        found = list(starts)
        for k in range(len(starts)):
            share = self.nodes_left // (len(starts) - k)
            if share < FEWEST_TRIES * len(self.problem.graph.nodes):
                break
            fits = any(o.peak_bytes <= budget_bytes for o in found)
            self.excess_price = EXCESS_PRICE if fits else EXCESS_PRICE_IF_NONE_FITS
            start = min(found, key=lambda o: self._rank(o, budget_bytes)) if k else starts[-1]
            candidate = self.read(start.schedule)
            found.append(self._anneal_from(candidate, budget_bytes, self.nodes_left - share, random.Random(k)))
        return found

    def _anneal_from(self, candidate: Candidate, budget_bytes: int, nodes_kept: int, rng: random.Random) -> J:
        offer = best = self._try(candidate)
        touches = self.touches(offer.schedule)
        total = self.nodes_left - nodes_kept
        while self.nodes_left > nodes_kept:
            move = None
            if offer.peak_bytes > budget_bytes and rng.random() < AIMED_SHARE:
                move = self._aimed_move(offer, touches, rng)
            move = move or self._random_move(candidate, touches, rng)
            if move is None:
                break
            changed = move.apply(candidate)
            if rng.random() < SECOND_SHARE:
                second = self._random_move(candidate, touches, rng)
                changed = changed if second is None else second.apply(changed)
            tried = self._try(changed)
            progress = 1 - (self.nodes_left - nodes_kept) / total
            temperature = START_TEMPERATURE * (END_TEMPERATURE / START_TEMPERATURE) ** progress
            rise = self._energy(tried, budget_bytes) - self._energy(offer, budget_bytes)
            if rise <= 0 or rng.random() < math.exp(-rise / temperature):
                candidate, offer = changed, tried
                touches = self.touches(offer.schedule)
                if self._rank(offer, budget_bytes) < self._rank(best, budget_bytes):
                    best = offer
        return best

    def _rank(self, offer: J, budget_bytes: int) -> tuple[int, int, int]:
        return max(0, offer.peak_bytes - budget_bytes), offer.extra_ticks, offer.peak_bytes

    def _random_move(self, candidate: Candidate, touches: dict[int, list[Touch]], rng: random.Random) -> Move | None:
        values = sorted(touches)
        if not values:
            return None  # backward reads nothing of forward's
        for _ in range(20):
            v = values[int(rng.random() * len(values))]
            moves = [*self._moves(candidate, v, touches[v]), *self._early(candidate, v, touches)]
            if moves:
                return moves[int(rng.random() * len(moves))]
        return None

    def _aimed_move(self, offer: J, touches: dict[int, list[Touch]], rng: random.Random) -> Move | None:
        """Forget something that is alive at the peak and is not read there."""
        moves = self.aimed_moves(offer, touches, offer.simulation.peak_moment)
        return moves[int(rng.random() * len(moves))] if moves else None

    def _early(self, candidate: Candidate, v: int, touches: dict[int, list[Touch]]) -> list[Move]:
        """Compute a value where something it is computed from is at hand, or do not do so any more."""
        done = sorted(fact.stage for fact in candidate if fact.what is What.EARLY and fact.value == v)
        moves = [Move(removed=frozenset({Fact(What.EARLY, v, stage)})) for stage in done]
        runs = [touch.stage for touch in touches[v] if touch.is_run and touch.stage > 0]
        hands = {touch.stage for u in self.problem.inputs[v] for touch in touches.get(u, ()) if touch.stage >= 0}
        for run in runs:
            moves += [Move(added=frozenset({Fact(What.EARLY, v, stage)})) for stage in sorted(hands) if stage < run]
        return moves
