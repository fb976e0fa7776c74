"""The activation peak of a schedule: run forward's order, then backward's, and add up the memory that is alive.

Memory is alive from the node that allocates it to the last one that reads it or a view of it. What forward returns to
its caller stays to the end; finished gradients are the step's result and are not counted, nor are inputs and
parameters. A node's results are allocated while its inputs are still there.

For an executor that fuses, three things differ: what only loops read has no memory (see `storage`), a loop may write
its result over an input that dies there, and on a CPU the loops between two kernels of their own become one function,
so that what dies in one of them is free only after the last. All are guesses about a compiler, not facts about the
graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
import torch.fx as fx

from ..graph import JointGraph, Role
from ..sizes import NO_SIZE, SizeNumber, Sizes, terms_of
from .schedule import Schedule
from .storage import Storages

GENERATOR_STATE_BYTES = 5056
"""What the state of a CPU generator takes; that of an accelerator takes less."""


READS_IF_REUSED, MOST_READS = 4, 12
"""How many buffers a loop's result may be made of before inductor writes it to memory: if several ops read it, and if
one does (`realize_reads_threshold` and `realize_cpu_acc_reads_threshold` of its configuration, as they come)."""


SMALLEST_TOLD = 4096
"""Bytes below which it does not matter whether a result is written to memory."""


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
    size: SizeNumber
    """Which size that is."""


@dataclass(frozen=True, slots=True, eq=False)
class Allocations:
    """Stretches of memory, field by field as in `Memory`, in order of allocation."""

    num_bytes: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]
    sizes: Sequence[SizeNumber]


@dataclass(frozen=True, eq=False)
class Simulation:
    """What is alive when."""

    order: tuple[int, ...]
    """Node positions: what forward runs, then what backward runs."""
    num_forward: int
    """How many of them are forward's."""
    live_bytes: tuple[int, ...]
    """Per moment, the bytes alive while that node runs; the most of them, if several sizes were looked at."""
    copies: tuple[Memory, ...]
    """What is copied for backward, and alive all along."""
    allocations: Allocations
    """Everything else that was allocated."""
    has_symbols: bool
    """What is empty now need not be at other sizes."""
    peaks: tuple[int, ...] = ()
    """If several sizes were looked at, the peak at each of them, the simulator's own first."""
    overwritten: Mapping[int, int] = field(default_factory=dict)
    """Moments at which a node writes its result over one of its inputs, and the position of that input."""
    realized: frozenset[int] = frozenset()
    """Moments of backward at which a compiler has to be told to write a result to memory."""

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Everything that was allocated and counts, in order of allocation."""
        order, allocated = self.order, self.allocations
        rows = zip(allocated.num_bytes, allocated.first, allocated.last, allocated.sizes, strict=True)
        counted = [
            Memory(order[first], num_bytes, first, last, size)
            for num_bytes, first, last, size in rows
            if num_bytes or (self.has_symbols and size)
        ]
        return (*self.copies, *counted)

    @property
    def spans(self) -> Iterator[tuple[int, int, int]]:
        """The first moment, the last one and the bytes of everything that was allocated."""
        allocated = self.allocations
        yield from ((copy.first, copy.last, copy.num_bytes) for copy in self.copies)
        yield from zip(allocated.first, allocated.last, allocated.num_bytes, strict=True)

    @cached_property
    def peak_bytes(self) -> int:
        """The activation peak."""
        return max(self.live_bytes, default=0)

    @cached_property
    def peak_moment(self) -> int:
        """When it is reached first."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0

    def alive_at(self, moment: int) -> tuple[Memory, ...]:
        """What is alive while the node of a moment runs, largest first."""
        alive = [m for m in self.memory if m.first <= moment <= m.last]
        return tuple(sorted(alive, key=lambda m: (-m.num_bytes, m.first)))


def simulate(graph: JointGraph, storages: Storages, schedule: Schedule) -> Simulation:
    """Find what is alive at every moment of a step."""
    return Simulator(graph, storages).run(schedule)


OWN, SHARED, INLINED, NOWHERE = range(4)
"""Where a node's result is: in memory of its own, in that of its first input, in its own only if it is written for a
reader, or nowhere. Plain numbers, since they are compared for every node of every simulated step."""


class Simulator:
    """Simulates schedules of one graph; what does not depend on a schedule is looked up once.

    It may look at several sizes of the same symbols at once: what is alive is then the most that is at any of them.
    """

    def __init__(self, graph: JointGraph, storages: Storages, elsewhere: Sequence[Sizes] = ()) -> None:
        self.graph, self.storages, self.elsewhere = graph, storages, tuple(elsewhere)
        self.bytes_elsewhere = [sizes.table_bytes for sizes in elsewhere]
        """At the other sizes, the bytes of everything by the number of its size."""
        self.fuses = storages.executor.fuses
        self.overwrites = any(storages.overwrites)
        self.is_kernel = [not storages.is_fused[i] and not storages.is_deferred[i] for i in range(len(graph.nodes))]
        """Per node: it runs by itself, between loops."""
        self.places = [_place(storages, i, self.fuses) for i in range(len(graph.nodes))]
        self.own = [
            tuple(zip(num_bytes, sizes, strict=True))
            for num_bytes, sizes in zip(storages.own_bytes, storages.own_sizes, strict=True)
        ]
        """Per node, the bytes of what it allocates, each with which size that is."""
        space = storages.workspace
        self.taken = [(*own, space[i]) if i in space else own for i, own in enumerate(self.own)]
        """The same with what it takes only while it runs."""
        self.is_part = [part >= 0 and self.places[storages.base[i]] == OWN for i, part in enumerate(storages.part)]
        """Per node: it takes one of several results of an op, which are buffers each."""
        self.given = [tuple([-1 - j for j in inputs if graph.roles[j] is Role.INPUT]) for inputs in graph.inputs]
        """Per node, the step's inputs that it reads, as negative numbers."""
        self.forward_outputs = _positions(graph, graph.forward_outputs)
        self.backward_outputs = _positions(graph, graph.backward_outputs)

    def run(self, schedule: Schedule) -> Simulation:
        """Find what is alive at every moment of a step."""
        order = (*schedule.forward, *schedule.events)
        reads, ends = self._reads(schedule)
        written: list[bool] = []
        realized: set[int] = set()
        if self.fuses:
            written = _written_to_memory(self.storages, order, reads, ends, schedule)
            realized = self._write_what_reads_much(order, reads, written, len(schedule.forward))
        return _Run(self, schedule, order, reads, written, frozenset(realized)).simulate(ends)

    def least_bytes(self) -> int:
        """A bound below the peak of every schedule: what the largest op of forward works on."""
        roles, places = self.graph.roles, self.places
        allocating = [i for i, role in enumerate(roles) if role is Role.FORWARD and places[i] == OWN]
        return max([self._working_bytes(i) for i in allocating], default=0)

    def _working_bytes(self, i: int) -> int:
        """What an op reads and writes; of one that may write over its inputs only the one or the other."""
        if self.storages.is_fused[i]:
            held: set[int | None] = {i}
        else:
            read = {self._memory_of(j) for j in self.graph.inputs[i]}
            held = read if self.storages.overwrites[i] else read | {i}
        return sum(num_bytes for j in held if j is not None for num_bytes, _ in self.own[j])

    def bytes_beside(self, i: int, forward: Collection[int] = ()) -> int:
        """A bound below what is alive while an op of backward runs, beside what is kept for later.

        That is its result and what it reads of backward's results and of some values of forward; finished gradients do
        not count.
        """
        gradients = {self._owner(j) for j in self.backward_outputs}
        is_loop = self.fuses and not self.is_kernel[i]
        read = {self._owner(j) for j in self.graph.inputs[i]}
        held = read if is_loop or self.storages.overwrites[i] else {*read, self._owner(i)}
        return sum(
            num_bytes
            for j in held - gradients
            if j is not None and self.is_kernel[j] and self.places[j] == OWN
            if self.graph.roles[j] is Role.BACKWARD or j in forward
            for num_bytes, _ in self.own[j]
        )

    def _memory_of(self, i: int) -> int | None:
        """The node of forward that allocates what a node's result is in, if it is all of that."""
        owner = self._owner(i)
        return owner if owner is not None and self.graph.roles[owner] is Role.FORWARD else None

    def _owner(self, i: int) -> int | None:
        """The node that allocates what a node's result is in, if it is all of that."""
        while self.places[i] == SHARED:
            if self.storages.part[i] >= 0:
                return None
            i = self.storages.base[i]
        return i if self.places[i] != NOWHERE else None

    def _reads(self, schedule: Schedule) -> tuple[list[tuple[int, ...]], dict[int, bool]]:
        """Per moment, the moments at which what it reads was computed; what the step is given has none.

        And the moments whose results outlive the step; True for finished gradients, which do not count.
        """
        inputs, num_forward = self.graph.inputs, len(schedule.forward)
        current = [-1] * len(inputs)
        reads: list[tuple[int, ...]] = []

        def run(order: Iterable[int]) -> None:
            for i in order:
                # The garbage collector soon forgets tuples of numbers; lists it would visit again and again.
                sources = tuple([current[j] for j in inputs[i] if current[j] >= 0])
                current[i] = len(reads)
                reads.append(sources)

        run(schedule.forward)
        ends = {current[i]: False for i in self.forward_outputs if current[i] >= 0}
        run(schedule.events)
        left_over = self.storages.left_over
        gradients = {current[i]: i not in left_over for i in self.backward_outputs if current[i] >= 0}
        finished = {moment: is_finished and moment >= num_forward for moment, is_finished in gradients.items()}
        return reads, {**finished, **ends}

    def _write_what_reads_much(
        self, order: Sequence[int], reads: Sequence[tuple[int, ...]], written: list[bool], num_forward: int
    ) -> set[int]:
        """Mark also what would make its readers read too many buffers each, such as a long sum that several read.

        Return the moments of backward whose results a compiler would not write of itself, but is told to: a gradient
        that is made of several as large as itself, and read at more than one place, keeps those alive until the last.
        """
        places, given = self.places, self.given
        users, spread = self._readers(order, reads, written, num_forward)
        told: set[int] = set()
        buffers: list[tuple[int, ...]] = []
        """Per moment, what reading its result reads: moments, or the step's inputs as negative numbers."""
        for moment, (i, sources) in enumerate(zip(order, reads, strict=True)):
            place = places[i]
            if self.is_part[i] or (place != SHARED and (place != INLINED or written[moment])):
                buffers.append((moment,))
                continue
            if len(sources) == 1 and not given[i]:
                read = buffers[sources[0]]
            else:
                read = tuple(set(given[i]).union(*[buffers[source] for source in sources]))
            if len(read) > 1 and place == INLINED:
                is_much = len(read) > READS_IF_REUSED and (users[moment] > 1 or len(read) > MOST_READS)
                is_spread = moment >= num_forward and spread[moment] > 0
                if is_spread and not is_much and self._are_larger(order, read, i):
                    told.add(moment)
                if is_much or moment in told:
                    written[moment] = True
                    read = (moment,)
            buffers.append(read)
        return told

    def _readers(
        self, order: Sequence[int], reads: Sequence[tuple[int, ...]], written: Sequence[bool], num_forward: int
    ) -> tuple[list[int], list[int]]:
        """Per moment, how many read its result, and of backward's how many kernels run between the first and last."""
        places, slots = self.places, list(accumulate([int(self.is_kernel[i]) for i in order]))
        users, first, last = [0] * len(order), [len(order)] * len(order), [0] * len(order)
        for sources in reads[:num_forward]:
            for source in sources:
                users[source] += 1
        for moment in range(len(order) - 1, num_forward - 1, -1):
            begin = end = slots[moment]
            place = places[order[moment]]
            if users[moment] and (place == SHARED or (place == INLINED and not written[moment])):
                begin, end = first[moment], last[moment]  # who reads it reads what it is made of
            for source in reads[moment]:
                users[source] += 1
                if begin < first[source]:
                    first[source] = begin
                if end > last[source]:
                    last[source] = end
        return users, list(map(operator.sub, last, first))

    def _are_larger(self, order: Sequence[int], read: Sequence[int], i: int) -> bool:
        """Are at least two of the buffers that are read no smaller than a node's result, which is large itself?"""
        own = self._bytes_of(i)
        return own >= SMALLEST_TOLD and sum(self._bytes_of(order[m]) >= own for m in read if m >= 0) > 1

    def _bytes_of(self, i: int) -> int:
        if self.is_part[i]:
            return self.own[self.storages.base[i]][self.storages.part[i]][0]
        return sum(num_bytes for num_bytes, _ in self.own[i])


def _place(storages: Storages, i: int, fuses: bool) -> int:
    if storages.base[i] >= 0:
        return SHARED
    if fuses and storages.is_deferred[i]:
        return NOWHERE
    return INLINED if fuses and storages.is_inlined[i] else OWN


def _positions(graph: JointGraph, outputs: Sequence[object]) -> list[int]:
    return [graph.resolve(o) for o in outputs if isinstance(o, fx.Node)]


def _written_to_memory(
    storages: Storages,
    order: Sequence[int],
    reads: Sequence[tuple[int, ...]],
    ends: dict[int, bool],
    schedule: Schedule,
) -> list[bool]:
    """Which results a compiler writes to memory: what leaves its graph, and what a kernel of its own reads."""
    num_forward = len(schedule.forward)
    is_fused, base = storages.is_fused, storages.base
    written = [False] * len(order)
    for moment in ends:
        written[moment] = True
    for moment in range(len(order) - 1, -1, -1):
        i = order[moment]
        if not is_fused[i]:
            for source in reads[moment]:
                written[source] = True
            continue
        if moment >= num_forward:
            for source in reads[moment]:
                if source < num_forward:
                    written[source] = True
        if written[moment] and base[i] >= 0:
            for source in reads[moment][:1]:
                written[source] = True
    return written


class _Run:
    """One pass over a step, with what it has allocated so far."""

    def __init__(
        self,
        simulator: Simulator,
        schedule: Schedule,
        order: tuple[int, ...],
        reads: list[tuple[int, ...]],
        written: list[bool],
        realized: frozenset[int],
    ) -> None:
        self.realized = realized
        self.simulator, self.schedule = simulator, schedule
        self.order, self.reads, self.written = order, reads, written
        self.held: list[tuple[int, ...]] = []
        """Per moment, the memory that its result keeps alive."""
        self.num_bytes: list[int] = []
        self.sizes: list[SizeNumber] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self.overwritten: dict[int, int] = {}

    def simulate(self, ends: dict[int, bool]) -> Simulation:
        """Allocate and release, moment by moment."""
        places, part, held, last = self.simulator.places, self.simulator.storages.part, self.held, self.last
        for moment, (i, sources) in enumerate(zip(self.order, self.reads, strict=True)):
            for source in sources:
                for memory in held[source]:
                    last[memory] = moment
            place = places[i]
            if place == OWN or (place == INLINED and self.written[moment]):
                held.append(self._allocated(moment, i))
            elif place == SHARED and part[i] >= 0:
                whole = held[sources[0]] if sources else ()
                held.append(whole if len(whole) <= 1 else whole[part[i] : part[i] + 1])
            elif place == SHARED or len(sources) == 1:
                held.append(held[sources[0]] if sources else ())
            else:
                held.append(tuple(dict.fromkeys([m for source in sources for m in held[source]])))
        self._keep(ends)
        return self._simulation()

    def _allocated(self, moment: int, i: int) -> tuple[int, ...]:
        """New memory for a node's result; what it takes only while it runs, nothing holds."""
        own = self.simulator.own[i]
        start = len(self.last)
        for num_bytes, size in self.simulator.taken[i]:
            self.num_bytes.append(num_bytes)
            self.sizes.append(size)
            self.first.append(moment)
            self.last.append(moment)
        return (start,) if len(own) == 1 else tuple(range(start, start + len(own)))

    def _copies(self) -> tuple[Memory, ...]:
        """Copies of inputs and of generators' states that forward keeps: counted all along, small as they are."""
        storages, last = self.simulator.storages, len(self.order) - 1
        sizes = storages.sizes
        found = []
        for i in sorted(self.schedule.copied | storages.relaid.intersection(self.schedule.received)):
            value = self.simulator.graph.nodes[i].meta.get("val")
            num_bytes = sizes.bytes_of(value) if isinstance(value, torch.Tensor) else 0
            found.append(Memory(i, num_bytes, 0, last, sizes.size_number(value)))
        state = sizes.number_of(terms_of(GENERATOR_STATE_BYTES))
        found += [Memory(i, GENERATOR_STATE_BYTES, 0, last, state) for i in sorted(self.schedule.replayed)]
        return tuple(found)

    def _keep(self, ends: dict[int, bool]) -> None:
        """What leaves the step lives to its end, except that gradients, computed in backward, are not counted."""
        num_forward = len(self.schedule.forward)
        for moment, is_gradient in ends.items():
            for memory in self.held[moment]:
                if is_gradient and self.first[memory] >= num_forward:
                    self.num_bytes[memory], self.sizes[memory] = 0, NO_SIZE
                else:
                    self.last[memory] = len(self.order) - 1

    def _simulation(self) -> Simulation:
        if self.simulator.fuses:
            written_over = self._write_over_inputs()
            if self.simulator.storages.groups_loops:
                self._free_after_loops(written_over)
        elif self.simulator.overwrites:
            self._overwrite()
        changes = [0] * (len(self.order) + 1)
        for num_bytes, first, last in zip(self.num_bytes, self.first, self.last, strict=True):
            changes[first] += num_bytes
            changes[last + 1] -= num_bytes
        copies = self._copies()
        changes[0] += sum(copy.num_bytes for copy in copies)
        live = tuple(accumulate(changes[:-1]))
        others = self._live_elsewhere(copies)
        return Simulation(
            order=self.order,
            num_forward=len(self.schedule.forward),
            live_bytes=tuple(map(max, live, *others)) if others else live,
            copies=copies,
            allocations=Allocations(self.num_bytes, self.first, self.last, self.sizes),
            has_symbols=bool(self.simulator.storages.sizes.symbols),
            peaks=tuple(max(one, default=0) for one in (live, *others)) if others else (),
            overwritten=self.overwritten,
            realized=self.realized,
        )

    def _live_elsewhere(self, copies: Sequence[Memory]) -> list[list[int]]:
        """Per moment, what is alive at each of the other sizes."""
        found = []
        for sizes, num_bytes in zip(self.simulator.elsewhere, self.simulator.bytes_elsewhere, strict=True):
            changes = [0] * (len(self.order) + 1)
            for size, first, last in zip(self.sizes, self.first, self.last, strict=True):
                if size:
                    changes[first] += num_bytes[size]
                    changes[last + 1] -= num_bytes[size]
            changes[0] += sum(sizes.value_of_terms(sizes.table[copy.size]) for copy in copies)
            found.append(list(accumulate(changes[:-1])))
        return found

    def _write_over_inputs(self) -> set[int]:
        """A loop writes its result over an input of the same size that nobody reads later: that one ends before it."""
        found = set()
        is_fused, order, reads, held = self.simulator.storages.is_fused, self.order, self.reads, self.held
        all_bytes, sizes, last = self.num_bytes, self.sizes, self.last
        for memory, (num_bytes, moment) in enumerate(zip(all_bytes, self.first, strict=True)):
            if not num_bytes or not is_fused[order[moment]]:
                continue
            for source in [m for s in reads[moment] for m in held[s]]:
                # Of a compiler that does not know the sizes, only what is equal at all of them is written over.
                is_equal = all_bytes[source] == num_bytes and sizes[source] == sizes[memory]
                is_last = is_equal and last[source] == moment and source != memory
                if is_last and self._reads_in_place(moment, source):
                    last[source] = moment - 1
                    found.add(source)
                    break
        return found

    def _reads_in_place(self, moment: int, memory: int) -> bool:
        """Is each element of some memory read, on every way to it, only for that at the same place of a result?"""
        moves, elements = self.simulator.storages.moves, self.simulator.storages.elements
        order, pending, seen = self.order, [moment], {moment}
        while pending:
            reader = pending.pop()
            sources = [s for s in self.reads[reader] if memory in self.held[s]]
            if any(moves[order[reader]] or elements[order[s]] != elements[order[reader]] for s in sources):
                return False
            on_the_way = [s for s in sources if s != self.first[memory] and s not in seen]
            seen.update(on_the_way)
            pending += on_the_way
        return True

    def _free_after_loops(self, written_over: set[int]) -> None:
        """Loops between two kernels of their own are called as one: what dies in any of them is free after the last."""
        is_kernel, order, num_forward = self.simulator.is_kernel, self.order, len(self.schedule.forward)
        ends = list(range(len(order)))
        for moment in range(len(order) - 2, -1, -1):
            if not is_kernel[order[moment]] and not is_kernel[order[moment + 1]] and moment + 1 != num_forward:
                ends[moment] = ends[moment + 1]
        self.last = [last if memory in written_over else ends[last] for memory, last in enumerate(self.last)]

    def _overwrite(self) -> None:
        """Where ops run one by one, those that may write over an input do so if that one is of no use any more."""
        overwrites, order = self.simulator.storages.overwrites, self.order
        all_bytes, sizes, last = self.num_bytes, self.sizes, self.last
        for memory, (num_bytes, moment) in enumerate(zip(all_bytes, self.first, strict=True)):
            if not num_bytes or not overwrites[order[moment]]:
                continue
            for source in self.reads[moment]:
                if order[source] not in overwrites[order[moment]]:
                    continue
                old = self._held_alone(source, moment)
                if old is not None and all_bytes[old] == num_bytes and sizes[old] == sizes[memory]:
                    last[old] = moment - 1
                    self.overwritten[moment] = order[source]
                    break

    def _held_alone(self, source: int, moment: int) -> int | None:
        """The memory that a result is in, if the same half of the step has made it and nothing else reads it later."""
        held, num_forward = self.held, len(self.schedule.forward)
        if len(held[source]) != 1:
            return None
        (old,) = held[source]
        is_own = (self.first[old] >= num_forward) == (moment >= num_forward)
        # Another view of the same memory may lie elsewhere in it.
        is_viewed = any(old in held[other] for other in self.reads[moment] if other != source)
        return old if is_own and not is_viewed and self.last[old] == moment else None
