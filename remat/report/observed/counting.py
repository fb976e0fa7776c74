"""Count what a training step really holds in memory.

**Activation peak.** The largest sum, at any moment of forward and backward, of the bytes of live storages that the
step itself allocates. Two counters give it:

- ``dispatch`` (eager, aot_eager): a dispatch mode sees every op, notes each storage that first appears as an op's
  output, and learns of its death by a weak reference. A storage that first appears as an op's *input* (parameters,
  buffers, the batch) was there before the step and is not counted; a view shares its base's storage, so it counts
  once. Scratch memory inside a kernel is not seen.
- ``allocator`` (inductor, whose kernels never reach the dispatcher; works for the others too): the allocator's own
  record of every allocation and release, with addresses. Scratch memory that a kernel takes from torch's allocator
  is seen.

**Gradients** of parameters are the step's result and are reported apart. They start as ``None``, so every gradient that
exists afterwards was allocated by the step: its storage is the one that ``param.grad`` holds at the end. That storage
is left out of the running sum from its allocation on. Why this is fair to all sides: autograd fills gradients one by
one and compiled graphs return them all at the end of backward, so counting them would charge a side for
when it happens to produce them; each side ends with the same gradients, of the same bytes. Two guards against hiding
activations this way:

- a gradient whose storage was allocated before backward began has been an activation first (a compiler may write a
  gradient into a dead activation's buffer): it is counted, all along;
- of a storage larger than the gradients in it, only the gradients' own bytes are left out.

What remains unseen: a compiler that reuses a *backward* temporary's buffer for a gradient of the same size. The zoo's
shapes avoid equal sizes, and the report also has the peak with gradients included, which bounds the truth from above.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ...passes.ops import is_to_disk
from ...passes.torch_private import TorchDispatchMode, tree_leaves

Counter = Literal["dispatch", "allocator"]
BACKWARD_MARK = "remat: backward starts"
NoteOrigin = Callable[[int, Any, torch.UntypedStorage], None]
"""Told of every storage that an op allocates: its number, the op, and the storage."""
NoteMark = Callable[[str, "Mapping[int, MemoryEvent]"], None]
"""Told of every range in a profiler's record: its name, and what is alive then, by address."""


@dataclass(frozen=True)
class MemoryEvent:
    """One storage coming alive (positive bytes) or dying (the same bytes, negative)."""

    storage: int
    num_bytes: int


@dataclass(frozen=True)
class MemoryLog:
    """All storages that a step allocated, in the order of their events."""

    events: tuple[MemoryEvent, ...]
    backward_start: int
    """Index of the first event of backward."""
    gradient_bytes: Mapping[int, int]
    """Storage to the bytes of the parameter gradients that it holds at the end of the step."""


@dataclass(frozen=True)
class Peak:
    """What a step held in memory, in bytes; see the module's docstring for what counts."""

    activation_bytes: int
    """The activation peak: finished parameter gradients are not part of it."""
    forward_end_bytes: int
    """Live when backward starts: what forward saved, and the loss."""
    gradient_bytes: int
    """Parameter gradients left by the step."""
    with_gradients_bytes: int
    """The peak if gradients counted too: an upper bound on the activation peak."""
    num_allocations: int


def activation_peak(
    forward: Callable[[], torch.Tensor],
    parameters: Iterable[torch.Tensor],
    *,
    counter: Counter = "allocator",
    warm_up: int = 1,
) -> Peak:
    """Run forward and backward of one training step and report its memory.

    ``forward`` returns the scalar loss; backward is run here, so that its start is known. Warm-up steps come first:
    they compile, fill caches and are not measured.
    """
    params = list(parameters)
    for _ in range(warm_up):
        clear_gradients(params)
        forward().backward()  # type: ignore[no-untyped-call]
    clear_gradients(params)
    gc.collect()
    record = record_by_dispatch if counter == "dispatch" else record_by_allocator
    with gc_disabled():
        log = record(forward, params)
    peak = summarise(log)
    clear_gradients(params)
    return peak


def clear_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Set every gradient to None, the state that a measured step starts from."""
    for parameter in parameters:
        parameter.grad = None


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Keep the cycle collector out of a measurement."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def summarise(log: MemoryLog) -> Peak:
    """Turn a log into peaks by running sums with and without gradients."""
    excluded = _excluded_gradient_bytes(log)
    live = live_with_gradients = peak = peak_with_gradients = forward_end = num_allocations = 0
    for index, event in enumerate(log.events):
        if index == log.backward_start:
            forward_end = live
        sign = 1 if event.num_bytes > 0 else -1
        num_allocations += event.num_bytes > 0
        live_with_gradients += event.num_bytes
        live += event.num_bytes - sign * excluded.get(event.storage, 0)
        peak = max(peak, live)
        peak_with_gradients = max(peak_with_gradients, live_with_gradients)
    return Peak(peak, forward_end, sum(log.gradient_bytes.values()), peak_with_gradients, num_allocations)


def alive_at_peak(log: MemoryLog) -> dict[int, int]:
    """The storages alive when the activation peak is reached first, with the bytes that count."""
    excluded = _excluded_gradient_bytes(log)
    alive: dict[int, int] = {}
    best: dict[int, int] = {}
    live = peak = 0
    for event in log.events:
        counted = abs(event.num_bytes) - excluded.get(event.storage, 0)
        live += counted if event.num_bytes > 0 else -counted
        if event.num_bytes > 0:
            alive[event.storage] = counted
        else:
            del alive[event.storage]
        if live > peak:
            peak, best = live, dict(alive)
    return {storage: num_bytes for storage, num_bytes in best.items() if num_bytes}


def _excluded_gradient_bytes(log: MemoryLog) -> dict[int, int]:
    """Find the bytes to leave out: of gradients whose storage was allocated during backward."""
    born_in_backward: dict[int, int] = {}
    for event in log.events[log.backward_start :]:
        if event.num_bytes > 0:
            born_in_backward[event.storage] = event.num_bytes
    return {
        storage: min(num_bytes, born_in_backward[storage])
        for storage, num_bytes in log.gradient_bytes.items()
        if storage in born_in_backward
    }


def _gradient_bytes_by_address(parameters: Iterable[torch.Tensor]) -> dict[int, int]:
    """Add up gradients per storage address; gradients that share a storage are counted there together."""
    totals: dict[int, int] = {}
    seen: set[tuple[int, int, int]] = set()
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        key = (grad.untyped_storage().data_ptr(), int(grad.storage_offset()), grad.nbytes)
        if key not in seen:  # a parameter that is listed twice
            seen.add(key)
            totals[key[0]] = totals.get(key[0], 0) + grad.nbytes
    return totals


# --- counting at dispatch level -------------------------------------------------------------------------------------


@dataclass
class _Tracked:
    """A storage under watch: its number in the log, 0 for one that was there before the step."""

    number: int
    num_bytes: int
    watch: weakref.ref[torch.UntypedStorage]


@dataclass
class _StorageBook:
    """Every storage seen during a step, by the identity of its (live) storage object."""

    events: list[MemoryEvent] = field(default_factory=list)
    tracked: dict[int, _Tracked] = field(default_factory=dict)
    num_storages: int = 0

    def note_external(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that an op reads: if it is new here, the step did not allocate it."""
        if id(storage) not in self.tracked:
            self._track(storage, 0, 0)

    def note_allocated(self, storage: torch.UntypedStorage) -> bool:
        """Note a storage that an op returns: if it is new here, that op allocated it."""
        if id(storage) in self.tracked:
            return False
        self.num_storages += 1
        num_bytes = storage.nbytes()
        self._track(storage, self.num_storages, num_bytes)
        if num_bytes:
            self.events.append(MemoryEvent(self.num_storages, num_bytes))
        return True

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """Give the storage's number in the log; 0 if the step did not allocate it."""
        tracked = self.tracked.get(id(storage))
        return tracked.number if tracked else 0

    def _track(self, storage: torch.UntypedStorage, number: int, num_bytes: int) -> None:
        key = id(storage)
        watch = weakref.ref(storage, lambda _: self._release(key))
        self.tracked[key] = _Tracked(number, num_bytes, watch)

    def _release(self, key: int) -> None:
        tracked = self.tracked.pop(key)
        if tracked.num_bytes:
            self.events.append(MemoryEvent(tracked.number, -tracked.num_bytes))


class _DispatchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every storage that ops read or return into a book."""

    supports_higher_order_operators = True

    def __init__(self, book: _StorageBook, note_origin: NoteOrigin | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.book, self.note_origin = book, note_origin

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay out of compilation, but see the ops that a compiled graph runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and note its inputs' and outputs' storages."""
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self.book.note_external(storage)
        outputs = func(*args, **kwargs)
        for storage in _storages(outputs):
            if is_to_disk(func):
                self.book.note_external(storage)  # the pages of a file
            elif self.book.note_allocated(storage) and self.note_origin is not None:
                self.note_origin(self.book.number_of(storage), func, storage)
        return outputs


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()


def record_by_dispatch(
    forward: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor], note_origin: NoteOrigin | None = None
) -> MemoryLog:
    """Run a step under the dispatch counter."""
    book = _StorageBook()
    with _DispatchCounter(book, note_origin):
        loss = forward()
        backward_start = len(book.events)
        loss.backward()  # type: ignore[no-untyped-call]
    del loss
    by_address = _gradient_bytes_by_address(parameters)
    gradient_bytes: dict[int, int] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        storage = parameter.grad.untyped_storage()
        number = book.number_of(storage)
        if number == 0:
            raise RuntimeError(
                f"The gradient of a parameter of shape {tuple(parameter.shape)} was allocated out of the "
                "dispatcher's sight, as inductor's kernels do. Measure this step with counter=\"allocator\"."
            )
        gradient_bytes[number] = by_address[storage.data_ptr()]
    return MemoryLog(tuple(book.events), backward_start, gradient_bytes)


# --- counting by the allocator's record -----------------------------------------------------------------------------


def record_by_allocator(
    forward: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    note_mark: NoteMark | None = None,
) -> MemoryLog:
    """Run a step under the profiler, and read the allocator's record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        loss = forward()
        with record_function(BACKWARD_MARK):
            pass
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    # The public event list has no addresses; the event tree is what torch's own memory viewer reads.
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    return _log_from_tree(tree, _gradient_bytes_by_address(parameters), note_mark)


def _log_from_tree(
    tree: Iterable[Any],
    gradient_bytes_by_address: Mapping[int, int],
    note_mark: NoteMark | None = None,
) -> MemoryLog:
    """Number allocations (an address is used many times) and drop releases of older memory."""
    events: list[MemoryEvent] = []
    live: dict[int, MemoryEvent] = {}
    backward_start: int | None = None
    for record in sorted(_flatten(tree), key=lambda record: record.start_time_ns):
        if record.name == BACKWARD_MARK:
            backward_start = len(events)
            continue
        if record.typed[0].name != "Allocation":
            if note_mark is not None:
                note_mark(record.name, live)
            continue
        address, num_bytes = record.typed[1].ptr, record.typed[1].alloc_size
        if num_bytes > 0:
            live[address] = MemoryEvent(len(events) + 1, num_bytes)
            events.append(live[address])
        elif address in live:
            born = live.pop(address)
            events.append(MemoryEvent(born.storage, -born.num_bytes))
    if backward_start is None:
        raise RuntimeError(
            "The profiler recorded no backward mark, so activations and gradients cannot be told apart. "
            "Check that no other torch.profiler session is active around this measurement."
        )
    gradient_bytes = {
        live[address].storage: num_bytes for address, num_bytes in gradient_bytes_by_address.items() if address in live
    }
    return MemoryLog(tuple(events), backward_start, gradient_bytes)


def _flatten(tree: Iterable[Any]) -> Iterator[Any]:
    stack = list(tree)
    while stack:
        record = stack.pop()
        yield record
        stack.extend(record.children)
