"""The activation peak of a schedule: run forward's order, then backward's, and add up the memory that is alive.

Memory is alive from the node that allocates it to the last one that reads it or a view of it. What forward returns to
its caller stays to the end; finished gradients are the step's result and are not counted, nor are inputs and
parameters. A node's results are allocated while its inputs are still there.

For an executor that fuses, three things differ: what only loops read has no memory (see `storage`), a loop may write
its result over an input that dies there, and both are guesses about a compiler, not facts about the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from .joint_graph import JointGraph, Role
from .schedule import Schedule
from .storage import Storages, size_of
from .symbols import terms_of

GENERATOR_STATE_BYTES = 5056
"""What the state of a CPU generator takes; that of an accelerator takes less."""


READS_IF_REUSED, MOST_READS = 4, 12
"""How many buffers a loop's result may be made of before inductor writes it to memory: if several ops read it, and if
one does (`realize_reads_threshold` and `realize_cpu_acc_reads_threshold` of its configuration, as they come)."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One stretch of memory in a simulated step."""

    node: int
    """Position of the node that allocates it."""
    num_bytes: int
    first: int
    """The moment at which it is allocated: an index into forward's order followed by backward's."""
    last: int
    """The moment after which it is free."""
    size: int
    """Its bytes again, or where sizes are symbols the position of those in their table."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What is alive when."""

    order: tuple[int, ...]
    """Node positions: what forward runs, then what backward runs."""
    num_forward: int
    """How many of them are forward's."""
    live_bytes: tuple[int, ...]
    """Per moment, the bytes alive while that node runs."""
    memory: tuple[Memory, ...]
    """Everything that was allocated and counts, in order of allocation."""

    @property
    def peak_bytes(self) -> int:
        """The activation peak."""
        return max(self.live_bytes, default=0)

    @property
    def peak_moment(self) -> int:
        """When it is reached first."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0

    def alive_at(self, moment: int) -> tuple[Memory, ...]:
        """What is alive while the node of a moment runs, largest first."""
        alive = [m for m in self.memory if m.first <= moment <= m.last]
        return tuple(sorted(alive, key=lambda m: (-m.num_bytes, m.first)))


def simulate(graph: JointGraph, storages: Storages, schedule: Schedule) -> Simulation:
    """Find what is alive at every moment of a step."""
    order = (*schedule.forward, *schedule.events)
    reads = _reads(graph, order)
    ends = _kept_to_the_end(graph, schedule, order)
    has_memory = None
    if any(storages.is_fused):
        has_memory = _written_to_memory(storages, order, reads, ends, schedule)
        _write_what_reads_much(graph, storages, order, reads, has_memory)
    return _Run(graph, storages, schedule, order, reads, has_memory).simulate(ends)


def _reads(graph: JointGraph, order: Sequence[int]) -> list[list[int]]:
    """Per moment, the moments at which what it reads was computed; what the step is given has none."""
    current: dict[int, int] = {}
    inputs = graph.inputs
    reads = []
    for moment, i in enumerate(order):
        reads.append([current[j] for j in inputs[i] if j in current])
        current[i] = moment
    return reads


def _kept_to_the_end(graph: JointGraph, schedule: Schedule, order: Sequence[int]) -> dict[int, bool]:
    """Moments whose results outlive the step; True for finished gradients, which do not count."""
    last: dict[int, int] = {}
    for moment, i in enumerate(order[: len(schedule.forward)]):
        last[i] = moment
    ends = {last[i]: False for i in _positions(graph, graph.forward_outputs) if i in last}
    for moment, i in enumerate(schedule.events, start=len(schedule.forward)):
        last[i] = moment
    gradients = [last[i] for i in _positions(graph, graph.backward_outputs) if i in last]
    return {**{moment: moment >= len(schedule.forward) for moment in gradients}, **ends}


def _positions(graph: JointGraph, outputs: Sequence[object]) -> list[int]:
    return [graph.resolve(o) for o in outputs if isinstance(o, fx.Node)]


def _written_to_memory(
    storages: Storages, order: Sequence[int], reads: Sequence[list[int]], ends: dict[int, bool], schedule: Schedule
) -> list[bool]:
    """Which results a compiler writes to memory: what leaves its graph, and what a kernel of its own reads."""
    num_forward = len(schedule.forward)
    written = [False] * len(order)
    for moment in ends:
        written[moment] = True
    for moment in range(len(order) - 1, -1, -1):
        i = order[moment]
        if not storages.is_fused[i]:
            for source in reads[moment]:
                written[source] = True
            continue
        if moment >= num_forward:
            for source in reads[moment]:
                if source < num_forward:
                    written[source] = True
        if written[moment] and storages.base[i] >= 0:
            for source in reads[moment][:1]:
                written[source] = True
    return written


def _write_what_reads_much(
    graph: JointGraph, storages: Storages, order: Sequence[int], reads: Sequence[list[int]], written: list[bool]
) -> None:
    """Mark also what would make its readers read too many buffers each, such as a long sum that several ops read."""
    users = Counter(source for sources in reads for source in dict.fromkeys(sources))
    buffers: list[frozenset[int]] = []
    """Per moment, what reading its result reads: moments, or the step's inputs as negative numbers."""
    for moment, i in enumerate(order):
        read = {moment}
        if storages.base[i] >= 0 or (storages.is_inlined[i] and not written[moment]):
            given = {-1 - j for j in graph.inputs[i] if graph.roles[j] is Role.INPUT}
            read = given.union(*(buffers[source] for source in reads[moment]))
            if len(read) > (READS_IF_REUSED if users[moment] > 1 else MOST_READS) and storages.base[i] < 0:
                written[moment] = True
                read = {moment}
        buffers.append(frozenset(read))


class _Run:
    """One pass over a step, with what it has allocated so far."""

    def __init__(
        self,
        graph: JointGraph,
        storages: Storages,
        schedule: Schedule,
        order: tuple[int, ...],
        reads: list[list[int]],
        has_memory: list[bool] | None,
    ) -> None:
        self.graph, self.storages, self.schedule = graph, storages, schedule
        self.order, self.reads, self.has_memory = order, reads, has_memory
        self.held: list[tuple[int, ...]] = []
        """Per moment, the memory that its result keeps alive."""
        self.num_bytes: list[int] = []
        self.sizes: list[int] = []
        self.first: list[int] = []
        self.last: list[int] = []

    def simulate(self, ends: dict[int, bool]) -> Simulation:
        """Allocate and release, moment by moment."""
        workspace = self.storages.workspace
        for moment, i in enumerate(self.order):
            for source in self.reads[moment]:
                for memory in self.held[source]:
                    self.last[memory] = moment
            self.held.append(self._result(moment, i))
            if i in workspace:
                self._allocate(moment, *workspace[i])
        self._keep(ends)
        return self._simulation()

    def _copies(self) -> list[Memory]:
        """Copies of inputs and of generators' states that forward keeps: counted all along, small as they are."""
        sizes, last = self.storages.sizes, len(self.order) - 1
        found = []
        for i in sorted(self.schedule.copied | self.storages.relaid.intersection(self.schedule.received)):
            value = self.graph.nodes[i].meta.get("val")
            num_bytes = sizes.bytes_of(value) if isinstance(value, torch.Tensor) else 0
            found.append(Memory(i, num_bytes, 0, last, size_of(value, sizes)))
        state = sizes.number_of(terms_of(GENERATOR_STATE_BYTES)) if sizes.symbols else GENERATOR_STATE_BYTES
        found += [Memory(i, GENERATOR_STATE_BYTES, 0, last, state) for i in sorted(self.schedule.replayed)]
        return found

    def _result(self, moment: int, i: int) -> tuple[int, ...]:
        """The memory that a node's result is in; new memory is allocated."""
        base = self.storages.base[i]
        if base >= 0:
            whole = self.held[self.reads[moment][0]] if self.reads[moment] else ()
            part = self.storages.part[i]
            return whole if part < 0 or len(whole) <= 1 else whole[part : part + 1]
        if self.has_memory is not None and self._has_none(moment, i):
            return tuple(dict.fromkeys(m for source in self.reads[moment] for m in self.held[source]))
        own = zip(self.storages.own_bytes[i], self.storages.own_sizes[i], strict=True)
        return tuple([self._allocate(moment, num_bytes, size) for num_bytes, size in own])

    def _has_none(self, moment: int, i: int) -> bool:
        assert self.has_memory is not None
        return self.storages.is_deferred[i] or (self.storages.is_inlined[i] and not self.has_memory[moment])

    def _allocate(self, moment: int, num_bytes: int, size: int) -> int:
        self.num_bytes.append(num_bytes)
        self.sizes.append(size)
        self.first.append(moment)
        self.last.append(moment)
        return len(self.last) - 1

    def _keep(self, ends: dict[int, bool]) -> None:
        """What leaves the step lives to its end, except that gradients, computed in backward, are not counted."""
        num_forward = len(self.schedule.forward)
        for moment, is_gradient in ends.items():
            for memory in self.held[moment]:
                if is_gradient and self.first[memory] >= num_forward:
                    self.num_bytes[memory] = self.sizes[memory] = 0
                else:
                    self.last[memory] = len(self.order) - 1

    def _simulation(self) -> Simulation:
        if self.has_memory is not None:
            self._write_over_inputs()
        changes = [0] * (len(self.order) + 1)
        for num_bytes, first, last in zip(self.num_bytes, self.first, self.last, strict=True):
            changes[first] += num_bytes
            changes[last + 1] -= num_bytes
        copies = self._copies()
        live, total = [], sum(copy.num_bytes for copy in copies)
        for change in changes[:-1]:
            total += change
            live.append(total)
        has_symbols = bool(self.storages.sizes.symbols)  # then what is empty now need not be at other sizes
        memory = tuple(
            Memory(self.order[first], num_bytes, first, last, size)
            for num_bytes, first, last, size in zip(self.num_bytes, self.first, self.last, self.sizes, strict=True)
            if num_bytes or (has_symbols and size)
        )
        return Simulation(self.order, len(self.schedule.forward), tuple(live), (*copies, *memory))

    def _write_over_inputs(self) -> None:
        """A loop writes its result over an input of the same size that nobody reads later: that one ends before it."""
        for memory, (num_bytes, moment) in enumerate(zip(self.num_bytes, self.first, strict=True)):
            if not num_bytes or not self.storages.is_fused[self.order[moment]]:
                continue
            for source in dict.fromkeys(m for s in self.reads[moment] for m in self.held[s]):
                if self.last[source] != moment or source == memory:
                    continue
                # Of a compiler that does not know the sizes, only what is equal at all of them is written over.
                if self.num_bytes[source] == num_bytes and self.sizes[source] == self.sizes[memory]:
                    self.last[source] = moment - 1
                    break
