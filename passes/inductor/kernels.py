"""The peak of what a compiler has made of a plan: its kernels, in the order in which it runs them.

A plan's peak is simulated before anything is compiled, with guesses about what a compiler will fuse, write to memory
and write over. Once it has made its kernels, and before it generates code, there is nothing left to guess. What it
takes is compared with the budget then, and if it is too much, one can still plan again with less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch.fx as fx

from ..graph import JointGraph
from ..memory import Simulation, Storages


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """What one kernel does with memory."""

    name: str
    nodes: tuple[fx.Node, ...]
    """The graph's nodes that it was made of."""
    is_loop: bool
    """Generated code, and no call of an op."""
    made: Mapping[str, int]
    """Buffers that it is the first to write, and their bytes."""
    used: frozenset[str]
    """Buffers that it reads or writes."""
    overwritten: Mapping[str, str]
    """Of the buffers that it makes, those that take the place of one that it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """One half of a step as it was compiled."""

    kernels: Sequence[Kernel]
    given: Mapping[str, int]
    """The bytes of the graph's inputs."""
    returned: frozenset[str]
    """Buffers and inputs that leave the graph."""
    is_backward: bool
    groups_loops: bool
    """Loops between two calls of ops become one function: see `storage.Storages`."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is in memory between forward and backward, as a plan has it."""

    num_bytes: int = 0
    """All of it."""
    freed: frozenset[str] = field(default_factory=frozenset)
    """Inputs of backward that nothing but backward holds: their memory is free after the last use."""


SLACK = 0.005
"""By what part kernels may exceed a budget: allocators round sizes, and single numbers are not counted exactly."""


@dataclass(frozen=True, slots=True)
class Excess:
    """Kernels that take more than a plan's peak was promised to be."""

    planned_bytes: int
    num_bytes: int

    @property
    def margin(self) -> float:
        """What part of a budget has to be left free if another plan is exceeded in the same proportion."""
        return 1 - self.planned_bytes / self.num_bytes


class PeakExceeded(Exception):
    """The kernels that a compiler has made of a plan take more than the budget; to be caught where it was called."""

    def __init__(self, excess: Excess) -> None:
        super().__init__(f"{excess.num_bytes} bytes, where {excess.planned_bytes} were planned")
        self.excess = excess


@dataclass(frozen=True, slots=True)
class Promise:
    """What the kernels of a plan may take."""

    planned_bytes: int
    num_bytes: int
    held: Held

    def excess_of(self, half: Kernels) -> Excess | None:
        """Compare one half of a step with it."""
        peak = kernel_peak(half, self.held)
        return Excess(self.planned_bytes, peak) if peak > (1 + SLACK) * self.num_bytes else None


def held_between(simulation: Simulation, graph: JointGraph, storages: Storages, names: Iterable[str]) -> Held:
    """What a plan has in memory between forward and backward, given the names of backward's inputs."""

    def owner(i: int) -> int:
        while storages.base[i] >= 0:
            i = storages.base[i]
        return i

    kept = {owner(graph.resolve(output)) for output in graph.forward_outputs if isinstance(output, fx.Node)}
    end = simulation.num_forward
    across = [m for m in simulation.memory if m.first < end <= m.last]
    own = {m.node for m in across} - kept
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    freed = frozenset(name for name in names if name in position and owner(position[name]) in own)
    return Held(sum(m.num_bytes for m in across), freed)


def kernel_peak(half: Kernels, held: Held) -> int:
    """The most bytes of activations that are alive while one half of a step runs; finished gradients do not count."""
    live = live_bytes(half, held)
    return max(live, default=held.num_bytes if half.is_backward else 0)


def live_bytes(half: Kernels, held: Held) -> list[int]:
    """Per kernel, the bytes that are alive while it runs."""
    last = _last_uses(half)
    changes = [0] * (len(half.kernels) + 1)
    if half.is_backward:
        changes[0] = held.num_bytes
        for name in held.freed.intersection(half.given) - half.returned:
            changes[last.get(name, -1) + 1] -= half.given[name]
    for k, kernel in enumerate(half.kernels):
        for name, num_bytes in kernel.made.items():
            if name not in half.returned:
                changes[k] += num_bytes
                changes[last.get(name, k) + 1] -= num_bytes
            elif not half.is_backward:
                changes[k] += num_bytes
    return list(accumulate(changes[:-1]))


def _last_uses(half: Kernels) -> dict[str, int]:
    """Per buffer, the last kernel while which its memory is taken."""
    ends = list(range(len(half.kernels)))
    if half.groups_loops:
        for k in range(len(ends) - 2, -1, -1):
            if half.kernels[k].is_loop and half.kernels[k + 1].is_loop:
                ends[k] = ends[k + 1]
    last = {name: ends[k] for k, kernel in enumerate(half.kernels) for name in kernel.used}
    for k, kernel in enumerate(half.kernels):
        last.update(dict.fromkeys(kernel.overwritten.values(), k - 1))
    return last
