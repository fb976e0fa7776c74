"""The dynamic programme over a chain of blocks, in numbers alone: knows nothing of graphs.

The recursion is that of Rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, 2019), with options per block as in
Rockmate (Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, 2023): for the stretch i..j of blocks, with i's input at
hand,

    keep   run i forward and keep an option of it, do i+1..j with less memory, undo i; or
    skip   run i..s-1 forward and keep what crosses into s, do s..j with less memory, then do i..s-1 afresh.

Memory is counted in steps of a grid; what the programme believes about memory only steers it, since every plan it
proposes is simulated before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ..torch_private import without_modes

CPU = torch.device("cpu")
"""Said each time: a user's default device must not move the planner's arithmetic."""

INFEASIBLE = 1e30
"""The time of what cannot be done."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to treat a block whose boundaries are kept."""

    saved: frozenset[int]
    """Values it keeps beside its boundaries."""
    saved_bytes: int
    ticks: float
    """To write and read what is kept, and to recompute the rest."""
    forward_bytes: int
    """Memory it works in while it runs forward, beside what other blocks and its input hold."""
    backward_bytes: int
    """Memory it works in while it is undone."""


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """What the programme has to know of a chain of blocks."""

    forward_ticks: tuple[float, ...]
    """Per block, what running it once more takes."""
    options: tuple[tuple[Option, ...], ...]
    """Per block, the ways to treat it; the last one keeps nothing but its boundaries."""
    crossing: tuple[Mapping[int, int], ...]
    """Per block, the bytes of each value that it reads from earlier ones, unless that is kept in every plan."""
    always_bytes: int
    """What every plan keeps."""

    @property
    def num_blocks(self) -> int:
        """The length of the chain."""
        return len(self.options)


@dataclass(frozen=True, slots=True)
class Keep:
    """Run a block and keep an option of it."""

    option: int


@dataclass(frozen=True, slots=True)
class Skip:
    """Run to the start of a later block, keep only what crosses there, and come back afterwards."""

    to: int


class Way(NamedTuple):
    """One way to do a stretch of blocks: do what is left of it with less memory, then part of it again."""

    code: int
    """The number of blocks that are skipped, or -1 less the option that is kept."""
    rest: int
    """The row of the table that tells how long the rest takes."""
    kept_steps: int
    """Memory that the rest does not have."""
    again: int
    """The row of what is done again afterwards."""
    ticks: float
    """What it takes beside these two."""
    least_steps: int
    """Memory without which it cannot be done."""


NO_TIME = 0
"""The row of the table for what is not there to be done."""


class ChainProgramme:
    """The table of the dynamic programme for one size of memory."""

    def __init__(self, links: Links, memory_bytes: int, grid_steps: int) -> None:
        self.links = links
        self.step_bytes = max(1, -(-memory_bytes // grid_steps))
        self.num_levels = grid_steps + 1
        self.new_bytes = self._new_bytes()
        self.new_steps = [[self._steps(num_bytes) for num_bytes in row] for row in self.new_bytes]
        self.skip_steps = [[self._needs(num_bytes) for num_bytes in row] for row in self._skip_bytes()]
        self.forward_ticks = list(accumulate(links.forward_ticks, initial=0.0))
        self.rows = self._rows()
        self.first_top_row = 1 + max(row for rows in self.rows for row in rows)
        self.choices: dict[int, list[int]] = {}
        """By row of the table, then by memory: the code of the best way."""
        # A compiler that is tracing has modes on that would trace this arithmetic, too.
        with without_modes():
            self.levels = torch.arange(self.num_levels, device=CPU)
            shape = self.first_top_row + links.num_blocks, 2 * self.num_levels
            self.table = torch.full(shape, INFEASIBLE, dtype=torch.float64, device=CPU)
            """Per row the time that something takes by memory; the first half is for less memory than none."""
            self.table[NO_TIME] = 0.0
            self._fill()
            self._fill_top()
            self.top_ticks: list[float] = self.table[self.first_top_row, self.num_levels :].tolist()

    def _rows(self) -> list[list[int]]:
        """The row of every stretch, by its length less one and its first block; equal ones share a row.

        Two stretches are equal if the shorter ones at both ends are and as much crosses from end to end.
        """
        blocks = [
            (ticks, *((o.saved_bytes, o.ticks, o.forward_bytes, o.backward_bytes) for o in options))
            for ticks, options in zip(self.links.forward_ticks, self.links.options, strict=True)
        ]
        numbers: dict[object, int] = {None: NO_TIME}
        rows = [[numbers.setdefault(block, len(numbers)) for block in blocks]]
        for length in range(1, len(blocks)):
            ends = [(*pair, self.new_bytes[i][i + length]) for i, pair in enumerate(pairwise(rows[-1]))]
            rows.append([numbers.setdefault(end, len(numbers)) for end in ends])
        return rows

    # ---------------------------------------------------------------------------------------------- memory

    def _new_bytes(self) -> list[list[int]]:
        """For i < s: the bytes that cross into s but not into i."""
        crossing = self.links.crossing
        return [
            [sum(later[v] for v in later.keys() - earlier.keys()) if s > i else 0 for s, later in enumerate(crossing)]
            for i, earlier in enumerate(crossing)
        ]

    def _skip_bytes(self) -> list[list[int]]:
        """For i < s: the memory in which i..s-1 run forward, beside i's input."""
        work = [options[-1].forward_bytes for options in self.links.options]
        rows = []
        for i in range(self.links.num_blocks):
            needed = [0] * (i + 1)
            for s in range(i + 1, self.links.num_blocks):
                needed.append(max(needed[-1], self.new_bytes[i][s - 1] + work[s - 1]))
            rows.append(needed)
        return rows

    def _steps(self, num_bytes: int) -> int:
        return min(self.num_levels, round(num_bytes / self.step_bytes))

    def _needs(self, num_bytes: int) -> int:
        return min(self.num_levels, -(-num_bytes // self.step_bytes))

    # ---------------------------------------------------------------------------------------------- the table

    def _fill(self) -> None:
        """Solve all stretches, short ones first."""
        for length, rows in enumerate(self.rows):
            firsts: dict[int, int] = {}
            for i, row in enumerate(rows):
                firsts.setdefault(row, i)
            self._solve({row: self._ways(i, length) for row, i in firsts.items()})

    def _ways(self, i: int, length: int) -> list[Way]:
        """All ways to do a stretch of length + 1 blocks."""
        if not length:
            alone = self.links.options[i][-1]
            return [Way(-1, NO_TIME, 0, NO_TIME, alone.ticks, self._needs(alone.backward_bytes))]
        keeps = self._keeps(i, self.rows[length - 1][i + 1], self.links.forward_ticks[i])
        rests = [self.rows[length - skipped][i + skipped] for skipped in range(1, length + 1)]
        runs = [self.forward_ticks[i + skipped] - self.forward_ticks[i] for skipped in range(1, length + 1)]
        return keeps + self._skips(i, rests, runs)

    def _fill_top(self) -> None:
        """Solve the whole step: as above, but the first run of forward is not extra work."""
        num_blocks, top = self.links.num_blocks, self.first_top_row
        for i in range(num_blocks - 1, -1, -1):
            rests = list(range(top + i + 1, top + num_blocks))
            keeps = self._keeps(i, rests[0] if rests else NO_TIME, 0.0)
            self._solve({top + i: keeps + self._skips(i, rests, [0.0] * len(rests))})

    def _keeps(self, i: int, rest: int, run_ticks: float) -> list[Way]:
        """Run a block and keep an option of it: one way per option."""
        new_bytes = self.new_bytes[i][i + 1] if i + 1 < self.links.num_blocks else 0
        return [
            Way(
                code=-1 - o,
                rest=rest,
                kept_steps=self._steps(option.saved_bytes + new_bytes),
                again=NO_TIME,
                ticks=run_ticks + option.ticks,
                least_steps=self._needs(max(option.forward_bytes, option.backward_bytes)),
            )
            for o, option in enumerate(self.links.options[i])
        ]

    def _skips(self, i: int, rests: Sequence[int], run_ticks: Sequence[float]) -> list[Way]:
        """Run the first blocks, keep nothing but what crosses after them, and do them again: one way per number."""
        new, least, rows = self.new_steps[i], self.skip_steps[i], self.rows
        return [
            Way(skipped, rest, new[i + skipped], rows[skipped - 1][i], ticks, least[i + skipped])
            for skipped, (rest, ticks) in enumerate(zip(rests, run_ticks, strict=True), start=1)
        ]

    def _solve(self, ways: dict[int, list[Way]]) -> None:
        """Fill rows of the table with the best of several ways, by memory; of equally good ones the first is taken."""
        width = max(len(row) for row in ways.values())
        padded = [way for row in ways.values() for way in (*row, *[row[-1]] * (width - len(row)))]
        codes, rests, kept, again, ticks, least = zip(*padded, strict=True)
        starts = [(2 * rest + 1) * self.num_levels - steps for rest, steps in zip(rests, kept, strict=True)]
        taken = self.table.flatten().take(_column(starts) + self.levels)
        taken += self.table[_column(again).flatten(), self.num_levels :]
        taken += torch.tensor(ticks, dtype=torch.float64, device=CPU)[:, None]
        taken.masked_fill_(self.levels < _column(least), INFEASIBLE)
        by_row = taken.view(len(ways), width, self.num_levels)
        best, first = by_row.min(1)  # of equal ones the first, as argmin has it, in a fraction of its time
        best.clamp_max_(INFEASIBLE)
        self.table[_column(list(ways)).flatten(), self.num_levels :] = best
        chosen = _column(codes).view(len(ways), width).gather(1, first)
        self.choices.update(zip(ways, chosen.masked_fill(best >= INFEASIBLE, -1).tolist(), strict=True))

    # ---------------------------------------------------------------------------------------------- plans

    @property
    def feasible_levels(self) -> range:
        """The levels of memory that the programme believes it can do with, smallest first."""
        start = self._steps(self.links.always_bytes)
        first = next((level for level, ticks in enumerate(self.top_ticks) if ticks < INFEASIBLE), self.num_levels)
        return range(min(first + start, self.num_levels), self.num_levels)

    def left_at(self, level: int) -> int:
        """What a level of memory leaves beside what every plan keeps."""
        return level - self._steps(self.links.always_bytes)

    def top_choice(self, i: int, level: int) -> Keep | Skip:
        """What to do with block i during the first run of forward."""
        return self._decoded(self.choices[self.first_top_row + i][level], i)

    def choice(self, i: int, j: int, level: int) -> Keep | Skip:
        """What to do with block i when i..j are run again."""
        return self._decoded(self.choices[self.rows[j - i][i]][level], i)

    def _decoded(self, code: int, i: int) -> Keep | Skip:
        if code < 0:
            return Keep(min(-1 - code, len(self.links.options[i]) - 1))
        return Skip(i + code)

    def after_keep(self, i: int, option: int, level: int) -> int:
        """The level that is left for the rest when block i keeps an option."""
        kept = self.links.options[i][option].saved_bytes + self.new_bytes[i][i + 1]
        return level - self._steps(kept)

    def after_skip(self, i: int, to: int, level: int) -> int:
        """The level that is left for the rest when i is skipped to a later block."""
        return level - self._steps(self.new_bytes[i][to])


def _column(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=CPU)[:, None]
