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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from .blocks import Block, find_blocks
from .flow import FlowProblem
from .joint_graph import Role
from .ladder import keep_least, ladder
from .schedule import Schedule, ScheduleWriter, schedule_backward
from .simulate import Simulation, Simulator
from .storage import Storages
from .torch_private import without_modes

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

    def __init__(self, problem: FlowProblem, storages: Storages) -> None:
        self.problem, self.simulator = problem, Simulator(problem.graph, storages)
        self.blocks = find_blocks(problem)
        self.always = self._always_saved()
        """Values that are kept in every plan, because blocks cannot be recomputed without them."""
        self.forward_ticks = [self._forward_ticks(block) for block in self.blocks]
        self.options = self._options()

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

    def _options(self) -> list[tuple[Option, ...]]:
        """Cut at rising prices; keep what differs. The last option of a block keeps nothing but boundaries."""
        found: list[dict[frozenset[int], Option]] = [{} for _ in self.blocks]
        for rung in ladder(self.problem, self.boundaries):
            for k, option in enumerate(self._measured(rung.saved)):
                found[k].setdefault(option.saved, option)
        return [tuple(options.values()) for options in found]

    def _measured(self, saved: Sequence[int]) -> list[Option]:
        """Simulate one choice for all blocks and read off what each of them takes."""
        problem = self.problem
        schedule = schedule_backward(problem.graph, problem.constraints, [problem.bases[v] for v in saved])
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
    for memory in simulation.memory:
        if memory.first < simulation.num_forward:
            k = block_of[memory.first]
            first, end = max(memory.first, starts[k + 1]), min(memory.last + 1, ends[k])
            if first < end:
                changes[first] += memory.num_bytes
                changes[end] -= memory.num_bytes
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


class ChainProgramme:
    """The table of the dynamic programme for one size of memory."""

    def __init__(self, chain: Chain, memory_bytes: int) -> None:
        self.chain = chain
        self.step_bytes = max(1, -(-memory_bytes // GRID_STEPS))
        self.num_levels = GRID_STEPS + 1
        self.constant = chain.bytes_of(chain.always)
        self.levels = torch.empty(0)
        self.new_bytes = self._new_bytes()
        self.skip_bytes = self._skip_bytes()
        self.forward_ticks = list(accumulate(chain.forward_ticks, initial=0.0))
        self.ticks: list[torch.Tensor] = []
        """By length of the stretch less one, then by its first block, then by memory: the time it takes."""
        self.choices: list[list[list[int]]] = []
        # A compiler that is tracing has modes on that would trace this arithmetic, too.
        with without_modes():
            self.levels = torch.arange(self.num_levels, device=CPU)[None]
            self._fill()
            self.top_ticks, self.top_choices = self._fill_top()

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
        num_blocks = self.chain.num_blocks
        alone = [options[-1] for options in self.chain.options]
        base = torch.stack([self._from(self._needs(o.backward_bytes), o.ticks) for o in alone])
        self.ticks.append(base)
        self.choices.append([[-1] * self.num_levels] * num_blocks)
        for length in range(1, num_blocks):
            self._fill_length(length)

    def _fill_length(self, length: int) -> None:
        """Solve all stretches of length + 1 blocks at once."""
        num_starts = self.chain.num_blocks - length
        best = torch.full((num_starts, self.num_levels), INFEASIBLE, dtype=torch.float64, device=CPU)
        choice = torch.full((num_starts, self.num_levels), -1, dtype=torch.int32, device=CPU)
        for o in range(max(len(options) for options in self.chain.options[:num_starts])):
            self._offer(best, choice, self._keep_all(length, o), -1 - o)
        for skipped in range(1, length + 1):
            self._offer(best, choice, self._skip_all(length, skipped), skipped)
        self.ticks.append(best)
        self.choices.append(choice.tolist())

    def _keep_all(self, length: int, o: int) -> torch.Tensor:
        """Time of every stretch if its first block keeps its o-th option."""
        rows = range(self.chain.num_blocks - length)
        options = [self.chain.options[i][min(o, len(self.chain.options[i]) - 1)] for i in rows]
        kept = [self._steps(p.saved_bytes + self.new_bytes[i][i + 1]) for i, p in zip(rows, options, strict=True)]
        rest = self._shifted(self.ticks[length - 1][1:], kept)
        ticks = [self.chain.forward_ticks[i] + p.ticks for i, p in zip(rows, options, strict=True)]
        least = [self._needs(max(p.forward_bytes, p.backward_bytes)) for p in options]
        return self._limited(rest + torch.tensor(ticks, dtype=torch.float64, device=CPU)[:, None], least)

    def _skip_all(self, length: int, skipped: int) -> torch.Tensor:
        """Time of every stretch if its first `skipped` blocks keep nothing but what crosses after them."""
        rows = range(self.chain.num_blocks - length)
        kept = [self._steps(self.new_bytes[i][i + skipped]) for i in rows]
        rest = self._shifted(self.ticks[length - skipped][skipped:], kept)
        again = self.ticks[skipped - 1][: len(rows)]
        ticks = [self.forward_ticks[i + skipped] - self.forward_ticks[i] for i in rows]
        least = [self._needs(self.skip_bytes[i][i + skipped]) for i in rows]
        return self._limited(rest + again + torch.tensor(ticks, dtype=torch.float64, device=CPU)[:, None], least)

    def _fill_top(self) -> tuple[list[float], list[list[int]]]:
        """Solve the whole step: as above, but the first run of forward is not extra work."""
        num_blocks = self.chain.num_blocks
        ticks: list[torch.Tensor] = [torch.empty(0)] * num_blocks
        choices: list[list[int]] = [[]] * num_blocks
        for i in range(num_blocks - 1, -1, -1):
            best = torch.full((1, self.num_levels), INFEASIBLE, dtype=torch.float64, device=CPU)
            choice = torch.full((1, self.num_levels), -1, dtype=torch.int32, device=CPU)
            for o, option in enumerate(self.chain.options[i]):
                least = self._needs(max(option.forward_bytes, option.backward_bytes))
                if i + 1 == num_blocks:
                    offered = self._from(least, option.ticks)[None]
                else:
                    kept = self._steps(option.saved_bytes + self.new_bytes[i][i + 1])
                    offered = self._limited(self._shifted(ticks[i + 1][None], [kept]) + option.ticks, [least])
                self._offer(best, choice, offered, -1 - o)
            for s in range(i + 1, num_blocks):
                rest = self._shifted(ticks[s][None], [self._steps(self.new_bytes[i][s])])
                offered = rest + self.ticks[s - 1 - i][i]
                self._offer(best, choice, self._limited(offered, [self._needs(self.skip_bytes[i][s])]), s - i)
            ticks[i], choices[i] = best[0], choice[0].tolist()
        return ticks[0].tolist(), choices

    def _from(self, least: int, ticks: float) -> torch.Tensor:
        """A row that takes `ticks` with at least so much memory."""
        row = torch.full((self.num_levels,), INFEASIBLE, dtype=torch.float64, device=CPU)
        row[least:] = ticks
        return row

    def _shifted(self, rows: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
        """Each row as it looks to somebody who holds `steps` of the memory already."""
        index = self.levels - torch.tensor(steps, device=CPU)[:, None]
        return torch.where(index >= 0, rows.gather(1, index.clamp_min(0)), INFEASIBLE)

    def _limited(self, rows: torch.Tensor, least: Sequence[int]) -> torch.Tensor:
        """Rows that need at least so much memory."""
        enough = self.levels >= torch.tensor(least, device=CPU)[:, None]
        return torch.where(enough, rows, INFEASIBLE)

    @staticmethod
    def _offer(best: torch.Tensor, choice: torch.Tensor, offered: torch.Tensor, code: int) -> None:
        better = offered < best
        torch.minimum(best, offered, out=best)
        choice.masked_fill_(better, code)

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
        return self._decoded(self.top_choices[i][level], i)

    def choice(self, i: int, j: int, level: int) -> Keep | Skip:
        """What to do with block i when i..j are run again."""
        return self._decoded(self.choices[j - i][i][level], i)

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


def write(chain: Chain, script: Script) -> Schedule:
    """Turn a script into an order of nodes."""
    return _Writer(chain, script.saved).write(script.acts)


class _Writer:
    """Runs nodes as a script says."""

    def __init__(self, chain: Chain, saved: Iterable[int]) -> None:
        problem = chain.problem
        legal = sorted(problem.bases[v] for v in saved if problem.constraint(v).no_save is None)
        self.chain, self.writer = chain, ScheduleWriter(problem.graph, problem.constraints, legal)
        self.held: list[frozenset[int]] = []
        """Values that stretches in progress keep for later, innermost last."""

    def write(self, acts: Iterable[Act]) -> Schedule:
        """Write the whole step."""
        for act in acts:
            if act is None:
                self.held.pop()
            elif isinstance(act, int):
                self._run(self.chain.blocks[act].backward)
            else:
                self._run_again(act)
        return self.writer.finish()

    def _run_again(self, values: frozenset[int]) -> None:
        """Recompute values and hold on to them."""
        self.held.append(values)
        legal = (v for v in values if self.chain.problem.constraint(v).no_recompute is None)
        self._run(sorted(self.chain.problem.bases[v] for v in legal))

    def _run(self, nodes: Iterable[int]) -> None:
        """Run nodes, then forget what was recomputed for them and nobody holds."""
        problem, start = self.chain.problem, len(self.writer.events)
        for i in nodes:
            self.writer.run(i)
        held = frozenset().union(*self.held)
        value_of, roles = problem.value_of, problem.graph.roles
        done = dict.fromkeys(self.writer.events[start:])
        self.writer.drop(i for i in done if roles[i] is not Role.BACKWARD and value_of.get(i) not in held)
