"""Plan a chain of blocks: what to keep of each block, what to recompute, and how often.

Each block has a few options, found by cutting the whole graph at rising prices per byte while everything that crosses
a boundary is there for nothing: how much it keeps, how long recomputing the rest takes, how much memory it works in.
A block may also keep nothing: then it is recomputed from an earlier boundary, possibly several times. The dynamic
programme of `table` chooses for a size of memory; its choices are told as a script, and a script is written as a
schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..graph import Role
from ..memory import Schedule, Simulation
from .bench import Bench, Offer
from .blocks import Block, find_blocks
from .ladder import End, keep_least, ladder, narrow
from .table import ChainProgramme, Links, Option, Skip


class Chain:
    """A graph as a chain of blocks with options."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.problem = bench, bench.problem
        self.blocks = find_blocks(bench.problem, bench.tuning)
        self.boundaries = frozenset(v for block in self.blocks for v in block.crossing)
        self.always = self._always_saved()
        """Values that are kept in every plan, because blocks cannot be recomputed without them."""
        self.options = self._options()
        self._programmes: dict[int, ChainProgramme] = {}
        self._written: dict[Script, Schedule | None] = {}

    @property
    def num_blocks(self) -> int:
        """The length of the chain."""
        return len(self.blocks)

    @cached_property
    def links(self) -> Links:
        """The chain in numbers."""
        crossing = [sorted(self.crossing_into(k) - self.always) for k in range(self.num_blocks)]
        return Links(
            forward_ticks=tuple(self._forward_ticks(block) for block in self.blocks),
            options=tuple(self.options),
            crossing=tuple({v: self.problem.num_bytes(v) for v in values} for values in crossing),
            always_bytes=self._bytes_of(self.always),
        )

    def programme(self, memory_bytes: int) -> ChainProgramme:
        """The table for a size of memory, made once."""
        if memory_bytes not in self._programmes:
            self._programmes[memory_bytes] = ChainProgramme(self.links, memory_bytes, self.bench.tuning.grid_steps)
        return self._programmes[memory_bytes]

    def programme_above(self, memory_bytes: int) -> ChainProgramme:
        """Of the tables that were made, the smallest one for at least so much memory; the largest if none is."""
        large = [known for known in self._programmes if known >= memory_bytes]
        return self.programme(min(large, default=max(self._programmes, default=memory_bytes)))

    def write(self, script: Script) -> Schedule | None:
        """Turn a script into an order of nodes; None if it is too long for a graph that is not small."""
        if script not in self._written:
            self._written[script] = _Writer(self, script.saved).write(script.acts, self._most_runs)
        return self._written[script]

    @property
    def _most_runs(self) -> float:
        """How many nodes backward may run."""
        longest = self.bench.tuning.longest_plan
        return math.inf if longest is None else longest * len(self.problem.graph.nodes)

    def crossing_into(self, block: int) -> frozenset[int]:
        """What a block reads from earlier ones."""
        return self.blocks[block - 1].crossing if block else frozenset()

    def _bytes_of(self, values: Iterable[int]) -> int:
        """Bytes that keeping some values takes."""
        return sum(self.problem.num_bytes(v) for v in values)

    def _always_saved(self) -> frozenset[int]:
        """What is kept even if all that can be recomputed is: whatever a plan recomputes, it needs no more."""
        problem = self.problem
        kept = keep_least(problem, self.bench.tuning)
        return frozenset(v for v in kept if problem.constraint(v).no_recompute is not None)

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
        for rung in ladder(self.problem, self.bench.tuning, self.boundaries):
            for k, option in enumerate(self._measured(rung.saved)):
                found[k].setdefault(option.saved, option)
        return [tuple(options.values()) for options in found]

    def _measured(self, saved: Sequence[int]) -> list[Option]:
        """Simulate one choice for all blocks and read off what each of them takes."""
        problem = self.problem
        schedule = self.bench.scheduler.backward([problem.bases[v] for v in saved])
        simulation = self.bench.simulator.run(schedule)
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
            Option(values, self._bytes_of(values), ticks[k], forward[k], backward[k]) for k, values in enumerate(own)
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
class Script:
    """What is kept of forward, and what backward does, block by block."""

    saved: frozenset[int]
    acts: tuple[Act, ...]


Act = int | frozenset[int] | None
"""Undo a block; recompute values and hold on to them; or let go of what was held last."""


def tell(chain: Chain, programme: ChainProgramme, level: int) -> Script:
    """What a programme proposes for a level of memory; different levels may give the same."""
    return _Teller(chain, programme).tell(programme.left_at(level))


class _Teller:
    """Turns a programme's choices into a script."""

    def __init__(self, chain: Chain, programme: ChainProgramme) -> None:
        self.chain, self.programme = chain, programme
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


class _Writer:
    """Runs nodes as a script says."""

    def __init__(self, chain: Chain, saved: Iterable[int]) -> None:
        problem = chain.problem
        legal = sorted(problem.bases[v] for v in saved if problem.constraint(v).no_save is None)
        self.chain, self.writer = chain, chain.bench.scheduler.writer(legal)
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


# -------------------------------------------------------------------------------------------------- what is proposed


def follow(bench: Bench, chain: Chain, script: Script) -> Offer | None:
    """Do as a script says; None if that repeats too much."""
    schedule = chain.write(script)
    return None if schedule is None else bench.remembered(script, lambda: schedule, "chain")


def chain_offers(bench: Bench, chain: Chain, budget_bytes: int) -> Iterator[Offer]:
    """Look for the most memory that the chain planner may believe in so that its plan really fits."""
    return offers_within(bench, chain, chain.programme(int(bench.tuning.headroom * budget_bytes)), budget_bytes)


def offers_within(bench: Bench, chain: Chain, programme: ChainProgramme, budget_bytes: int) -> Iterator[Offer]:
    """Look for the highest level of memory of a programme whose plan fits."""
    levels = programme.feasible_levels
    if not levels:
        return
    most = follow(bench, chain, tell(chain, programme, levels[-1]))
    if most is None:
        return
    yield most
    if most.peak_bytes > budget_bytes:
        ends = End(levels[0] - 1, (levels[0] - 1) * programme.step_bytes), End(levels[-1], most.peak_bytes)
        close = bench.close_bytes(budget_bytes)

        def plan_at(level: int) -> Offer | None:
            return follow(bench, chain, tell(chain, programme, level))

        yield from narrow(plan_at, *ends, budget_bytes, close, bench.tuning.guesses)


def lowest_levels(bench: Bench, chain: Chain, memory_bytes: int) -> Iterator[Offer]:
    """Follow the chain planner with little memory, as long as it does not repeat too much."""
    programme, most = chain.programme(memory_bytes), bench.tuning.levels_tried
    levels = programme.feasible_levels
    if bench.is_large:
        tried: Sequence[int] = _least_repeating(chain, programme)[:most]
    else:
        tried = sorted({*levels[:most], *levels[:: max(1, len(levels) // most)]})
    for level in reversed(tried):
        offer = follow(bench, chain, tell(chain, programme, level))
        if offer is None:
            break
        yield offer


def _least_repeating(chain: Chain, programme: ChainProgramme) -> range:
    """The levels at which the chain planner does not repeat too much, supposing that it repeats less with more."""
    levels = programme.feasible_levels
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        is_long = chain.write(tell(chain, programme, levels[middle])) is None
        low, high = (middle + 1, high) if is_long else (low, middle)
    return levels[low:]
