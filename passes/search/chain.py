"""Plan a chain of blocks by dynamic programming: what to keep of each block, what to recompute, and how often.

Each block has a few options, found by cutting the whole graph at rising prices per byte while everything that crosses
a boundary is there for nothing: how much it keeps, how long recomputing the rest takes, how much memory it works in.
A block may also keep nothing: then it is recomputed from an earlier boundary, possibly several times. The recursion is
that of Rotor (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, 2019), with options per block as in Rockmate (Zhao,
Le Hellard, Eyraud-Dubois, Gusak, Beaumont, 2023): for the stretch i..j of blocks, with i's input at hand,

    keep   run i forward and keep an option of it, do i+1..j with less memory, undo i; or
    skip   run i..s-1 forward and keep what crosses into s, do s..j with less memory, then do i..s-1 afresh.

Memory is counted in steps of a grid; what the programme believes about memory only steers it, since every plan it
proposes is simulated before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ..graph.joint_graph import Role
from ..memory.schedule import Schedule, Scheduler
from ..memory.simulate import Simulation, Simulator
from ..torch_private import without_modes
from .blocks import Block, find_blocks
from .ladder import NUM_CUTS, keep_least, ladder
from .problem import FlowProblem

GRID_STEPS = 400
"""Resolution of memory; a budget is this many steps."""

CPU = torch.device("cpu")
"""Said each time: a user's default device must not move the planner's arithmetic."""

INFEASIBLE = 1e30


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


class Chain:
    """A graph as a chain of blocks with options."""

    def __init__(
        self, problem: FlowProblem, scheduler: Scheduler, simulator: Simulator, num_cuts: int = NUM_CUTS
    ) -> None:
        """Split a graph; the blocks' options are found by so many cuts."""
        self.problem, self.scheduler, self.simulator = problem, scheduler, simulator
        self.blocks = find_blocks(problem)
        self.always = self._always_saved()
        """Values that are kept in every plan, because blocks cannot be recomputed without them."""
        self.forward_ticks = [self._forward_ticks(block) for block in self.blocks]
        self.options = self._options(num_cuts)

    @property
    def num_blocks(self) -> int:
        """The length of the chain."""
        return len(self.blocks)

    @cached_property
    def boundaries(self) -> frozenset[int]:
        """Everything that crosses a boundary."""
        return frozenset(v for block in self.blocks for v in block.crossing)

    def crossing_into(self, block: int) -> frozenset[int]:
        """What a block reads from earlier ones."""
        return self.blocks[block - 1].crossing if block else frozenset()

    def bytes_of(self, values: Iterable[int]) -> int:
        """Bytes that keeping some values takes."""
        return sum(self.problem.num_bytes(v) for v in values)

    def _always_saved(self) -> frozenset[int]:
        """What is kept even if all that can be recomputed is: whatever a plan recomputes, it needs no more."""
        problem = self.problem
        return frozenset(v for v in keep_least(problem) if problem.constraint(v).no_recompute is not None)

    def _forward_ticks(self, block: Block) -> float:
        """What running a block once more takes."""
        graph, costs = self.problem.graph, self.problem.costs
        if not block.values:
            return 0.0
        first, last = self.problem.bases[block.values[0]], self.problem.bases[block.values[-1]]
        return float(sum(costs.run_ticks[i] for i in range(first, last + 1) if graph.roles[i] is Role.FORWARD))

    # ---------------------------------------------------------------------------------------------- options

    def _options(self, num_cuts: int) -> list[tuple[Option, ...]]:
        """Cut at rising prices; keep what differs. The last option of a block keeps nothing but boundaries."""
        found: list[dict[frozenset[int], Option]] = [{} for _ in self.blocks]
        for rung in ladder(self.problem, self.boundaries, num_cuts=num_cuts):
            for k, option in enumerate(self._measured(rung.saved)):
                found[k].setdefault(option.saved, option)
        return [tuple(options.values()) for options in found]

    def _measured(self, saved: Sequence[int]) -> list[Option]:
        """Simulate one choice for all blocks and read off what each of them takes."""
        problem = self.problem
        schedule = self.scheduler.backward([problem.bases[v] for v in saved])
        simulation = self.simulator.run(schedule)
        block_of = self._block_of_moments(schedule)
        outside = _bytes_of_earlier_blocks(simulation, block_of, self.num_blocks)
        forward, backward = [0] * self.num_blocks, [0] * self.num_blocks
        ticks = [0.0] * self.num_blocks
        for moment, (i, live) in enumerate(zip(simulation.order, simulation.live_bytes, strict=True)):
            k = block_of[moment]
            peaks = forward if moment < simulation.num_forward else backward
            peaks[k] = max(peaks[k], live - outside[moment])
            if moment >= simulation.num_forward and problem.graph.roles[i] is Role.FORWARD:
                ticks[k] += problem.costs.recompute_ticks[i]
        kept = frozenset(saved) - self.boundaries - self.always
        own = [kept.intersection((*block.values, *block.by_products)) for block in self.blocks]
        for k, values in enumerate(own):
            ticks[k] += sum(problem.costs.save_ticks[problem.bases[v]] for v in values)
        return [
            Option(values, self.bytes_of(values), ticks[k], forward[k], backward[k]) for k, values in enumerate(own)
        ]

    def _block_of_moments(self, schedule: Schedule) -> list[int]:
        """Per moment of a step, the block that runs or is undone."""
        starts = [self.problem.bases[block.values[0]] if block.values else 0 for block in self.blocks]
        moments, k = [], 0
        for i in schedule.forward:
            # What only backward needs runs as soon as it can, so it belongs to the block that is at work.
            while self.problem.graph.roles[i] is Role.FORWARD and k + 1 < len(starts) and i >= starts[k + 1]:
                k += 1
            moments.append(k)
        block_of = {i: k for k, block in enumerate(self.blocks) for i in block.backward}
        k = self.num_blocks - 1
        pending = 0
        for i in schedule.events:
            pending += 1
            if i in block_of:
                k = block_of[i]
                moments += [k] * pending
                pending = 0
        return moments + [k] * pending


def _bytes_of_earlier_blocks(simulation: Simulation, block_of: Sequence[int], num_blocks: int) -> list[int]:
    """Per moment, the live bytes that blocks before the one at work have left."""
    starts = _first_moments(block_of[: simulation.num_forward], range(num_blocks + 1), 0)
    back = [num_blocks - 1 - k for k in block_of[simulation.num_forward :]]
    reached = _first_moments(back, range(num_blocks), simulation.num_forward)
    ends = reached[::-1]
    """When backward has come as far as each block."""
    changes = [0] * (len(block_of) + 1)
    for allocated, last, num_bytes in simulation.spans:
        if allocated < simulation.num_forward:
            k = block_of[allocated]
            first, end = max(allocated, starts[k + 1]), min(last + 1, ends[k])
            if first < end:
                changes[first] += num_bytes
                changes[end] -= num_bytes
    return list(accumulate(changes[:-1]))


def _first_moments(blocks: Sequence[int], wanted: range, offset: int) -> list[int]:
    """When a run through blocks first is at each of them, or past it."""
    moments: list[int] = []
    for moment, k in enumerate(blocks):
        while len(moments) < len(wanted) and k >= len(moments):
            moments.append(offset + moment)
    return moments + [offset + len(blocks)] * (len(wanted) - len(moments))


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

    def __init__(self, chain: Chain, memory_bytes: int) -> None:
        self.chain = chain
        self.step_bytes = max(1, -(-memory_bytes // GRID_STEPS))
        self.num_levels = GRID_STEPS + 1
        self.constant = chain.bytes_of(chain.always)
        self.new_bytes = self._new_bytes()
        self.new_steps = [[self._steps(num_bytes) for num_bytes in row] for row in self.new_bytes]
        self.skip_steps = [[self._needs(num_bytes) for num_bytes in row] for row in self._skip_bytes()]
        self.forward_ticks = list(accumulate(chain.forward_ticks, initial=0.0))
        self.rows = self._rows()
        self.first_top_row = 1 + max(row for rows in self.rows for row in rows)
        self.choices: dict[int, list[int]] = {}
        """By row of the table, then by memory: the code of the best way."""
        # A compiler that is tracing has modes on that would trace this arithmetic, too.
        with without_modes():
            self.levels = torch.arange(self.num_levels, device=CPU)
            shape = self.first_top_row + chain.num_blocks, 2 * self.num_levels
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
            for ticks, options in zip(self.chain.forward_ticks, self.chain.options, strict=True)
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
        chain = self.chain
        crossing = [chain.crossing_into(k) - chain.always for k in range(chain.num_blocks)]
        sizes = {v: chain.problem.num_bytes(v) for v in chain.boundaries}
        return [
            [sum(sizes[v] for v in crossing[s] - crossing[i]) if s > i else 0 for s in range(chain.num_blocks)]
            for i in range(chain.num_blocks)
        ]

    def _skip_bytes(self) -> list[list[int]]:
        """For i < s: the memory in which i..s-1 run forward, beside i's input."""
        work = [options[-1].forward_bytes for options in self.chain.options]
        rows = []
        for i in range(self.chain.num_blocks):
            needed = [0] * (i + 1)
            for s in range(i + 1, self.chain.num_blocks):
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
            alone = self.chain.options[i][-1]
            return [Way(-1, NO_TIME, 0, NO_TIME, alone.ticks, self._needs(alone.backward_bytes))]
        keeps = self._keeps(i, self.rows[length - 1][i + 1], self.chain.forward_ticks[i])
        rests = [self.rows[length - skipped][i + skipped] for skipped in range(1, length + 1)]
        runs = [self.forward_ticks[i + skipped] - self.forward_ticks[i] for skipped in range(1, length + 1)]
        return keeps + self._skips(i, rests, runs)

    def _fill_top(self) -> None:
        """Solve the whole step: as above, but the first run of forward is not extra work."""
        num_blocks, top = self.chain.num_blocks, self.first_top_row
        for i in range(num_blocks - 1, -1, -1):
            rests = list(range(top + i + 1, top + num_blocks))
            keeps = self._keeps(i, rests[0] if rests else NO_TIME, 0.0)
            self._solve({top + i: keeps + self._skips(i, rests, [0.0] * len(rests))})

    def _keeps(self, i: int, rest: int, run_ticks: float) -> list[Way]:
        """Run a block and keep an option of it: one way per option."""
        new_bytes = self.new_bytes[i][i + 1] if i + 1 < self.chain.num_blocks else 0
        return [
            Way(
                code=-1 - o,
                rest=rest,
                kept_steps=self._steps(option.saved_bytes + new_bytes),
                again=NO_TIME,
                ticks=run_ticks + option.ticks,
                least_steps=self._needs(max(option.forward_bytes, option.backward_bytes)),
            )
            for o, option in enumerate(self.chain.options[i])
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
        start = self._steps(self.constant)
        first = next((level for level, ticks in enumerate(self.top_ticks) if ticks < INFEASIBLE), self.num_levels)
        return range(min(first + start, self.num_levels), self.num_levels)

    def script(self, level: int) -> Script:
        """What it proposes for a level of memory; different levels may give the same."""
        return _Teller(self).tell(level - self._steps(self.constant))

    def top_choice(self, i: int, level: int) -> Keep | Skip:
        """What to do with block i during the first run of forward."""
        return self._decoded(self.choices[self.first_top_row + i][level], i)

    def choice(self, i: int, j: int, level: int) -> Keep | Skip:
        """What to do with block i when i..j are run again."""
        return self._decoded(self.choices[self.rows[j - i][i]][level], i)

    def _decoded(self, code: int, i: int) -> Keep | Skip:
        if code < 0:
            return Keep(min(-1 - code, len(self.chain.options[i]) - 1))
        return Skip(i + code)

    def after_keep(self, i: int, option: int, level: int) -> int:
        """The level that is left for the rest when block i keeps an option."""
        kept = self.chain.options[i][option].saved_bytes + self.new_bytes[i][i + 1]
        return level - self._steps(kept)

    def after_skip(self, i: int, to: int, level: int) -> int:
        """The level that is left for the rest when i is skipped to a later block."""
        return level - self._steps(self.new_bytes[i][to])


def _column(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=CPU)[:, None]


@dataclass(frozen=True, slots=True)
class Script:
    """What is kept of forward, and what backward does, block by block."""

    saved: frozenset[int]
    acts: tuple[Act, ...]


Act = int | frozenset[int] | None
"""Undo a block; recompute values and hold on to them; or let go of what was held last."""


class _Teller:
    """Turns the programme's choices into a script."""

    def __init__(self, programme: ChainProgramme) -> None:
        self.programme, self.chain = programme, programme.chain
        self.acts: list[Act] = []

    def tell(self, level: int) -> Script:
        """Tell the whole step."""
        trail = self._first_run(level)
        for _, stretch, level in reversed(trail):
            self._undo(*stretch, level)
        return Script(self.chain.always.union(*(values for values, _, _ in trail)), tuple(self.acts))

    def _first_run(self, level: int) -> list[tuple[frozenset[int], tuple[int, int], int]]:
        """Walk forward once: what is kept, and the stretches to undo from the last to the first."""
        trail = []
        i = 0
        while i < self.chain.num_blocks:
            choice = self.programme.top_choice(i, level)
            if isinstance(choice, Skip):
                trail.append((self.chain.crossing_into(choice.to), (i, choice.to - 1), level))
                level, i = self.programme.after_skip(i, choice.to, level), choice.to
                continue
            kept = self.chain.options[i][choice.option].saved | self.chain.blocks[i].crossing
            trail.append((kept, (i, i), level))
            if i + 1 < self.chain.num_blocks:
                level = self.programme.after_keep(i, choice.option, level)
            i += 1
        return trail

    def _undo(self, i: int, j: int, level: int) -> None:
        """Undo the blocks i..j, given what crosses into i; run them again as the programme says."""
        if i == j:
            self.acts.append(i)
            return
        choice = self.programme.choice(i, j, level)
        if isinstance(choice, Skip):
            self.acts.append(self.chain.crossing_into(choice.to))
            self._undo(choice.to, j, self.programme.after_skip(i, choice.to, level))
            self.acts.append(None)
            self._undo(i, choice.to - 1, level)
            return
        option = self.chain.options[i][choice.option]
        self.acts.append(option.saved | self.chain.blocks[i].crossing)
        self._undo(i + 1, j, self.programme.after_keep(i, choice.option, level))
        self.acts += [None, i]


def write(chain: Chain, script: Script, most_runs: int | None = None) -> Schedule | None:
    """Turn a script into an order of nodes; None if backward would run more of them than it may."""
    return _Writer(chain, script.saved).write(script.acts, math.inf if most_runs is None else most_runs)


class _Writer:
    """Runs nodes as a script says."""

    def __init__(self, chain: Chain, saved: Iterable[int]) -> None:
        problem = chain.problem
        legal = sorted(problem.bases[v] for v in saved if problem.constraint(v).no_save is None)
        self.chain, self.writer = chain, chain.scheduler.writer(legal)
        self.held: list[frozenset[int]] = []
        """Values that stretches in progress keep for later, innermost last."""

    def write(self, acts: Iterable[Act], most_runs: float) -> Schedule | None:
        """Write the whole step, or give it up."""
        for act in acts:
            if len(self.writer.events) > most_runs:
                return None
            if act is None:
                self.held.pop()
            elif isinstance(act, int):
                self._run(self.chain.blocks[act].backward)
            else:
                self._run_again(act)
        return self.writer.finish() if len(self.writer.events) <= most_runs else None

    def _run_again(self, values: frozenset[int]) -> None:
        """Recompute values and hold on to them."""
        self.held.append(values)
        legal = (v for v in values if self.chain.problem.constraint(v).no_recompute is None)
        self._run(sorted(self.chain.problem.bases[v] for v in legal))

    def _run(self, nodes: Iterable[int]) -> None:
        """Run nodes, then forget what was recomputed for them and nobody holds."""
        value_of, start = self.chain.problem.value_of, len(self.writer.events)
        for i in nodes:
            self.writer.run(i)
        held = frozenset().union(*self.held)
        done = set(self.writer.events[start:]).difference(self.writer.scheduler.own_backward)
        self.writer.drop([i for i in done if value_of.get(i) not in held])
