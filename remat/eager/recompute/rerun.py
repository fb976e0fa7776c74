"""One run of a region's forward for backward: fill the holders, stop when they are full, compare with the forward."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from remat.eager.recompute import collectives
from remat.eager.recompute.determinism import Metadata, Mismatch, default_metadata, noted
from remat.eager.recompute.divergence import different, too_few, too_many, where_is
from remat.eager.recompute.forward import Forward
from remat.eager.recompute.holders import Holder, Overwritten, Save
from remat.passes.torch_private import pop_saved_tensors_hooks, push_saved_tensors_hooks, queue_after_backward

from ..state import ReadGuard, version_of
from ..types import all_of, ends_search

# The one op of torch's whose kernel fills a tensor (its noise) after autograd has saved it: stopping before that
# kernel would leave it empty, so a recomputation that ends there goes on to the next saved tensor.
_FILLED_LATE = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})


class _StopRecomputation(BaseException):
    """Unwinds a recomputation that has all it needs; no Exception, so that user code does not swallow it."""


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor off its history."""
    return tensor.detach() if tensor.requires_grad else tensor


class Recomputation:
    """One run of a forward for backward."""

    __slots__ = (
        "_forward",
        "_guard",
        "_mismatches",
        "_only",
        "_rest",
        "_stops",
        "_task",
        "is_complete",
        "num_needed",
        "stop",
    )

    def __init__(
        self,
        forward: Forward,
        task: Any,
        only: Holder | None,
        *,
        stops: bool = True,
        guard: ReadGuard | None = None,
    ) -> None:
        saves = forward.saves
        self._forward = forward
        self._task = task
        self._only = only
        self._stops = stops and (forward.early_stop or only is not None)
        self._mismatches: list[tuple[Mismatch, str]] = []
        self.is_complete = False  # known to have saved all that was needed, and alike
        self._rest: Iterator[Save] = iter(saves)  # what the forward saved and this run has not come to yet
        self._guard = guard
        self.stop = _StopRecomputation()
        self.num_needed = len(saves) if only is None else _index_of(only, saves) + 1
        if only is None and self._stops:
            while self.num_needed > 0 and saves[self.num_needed - 1][0]() is None:
                self.num_needed -= 1  # nobody is left to want what comes last

    @property
    def num_saved(self) -> int:
        """How many of the tensors that the forward saved this run has saved too."""
        return len(self._forward.saves) - operator.length_hint(self._rest)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], watched: list[Any]) -> Any:
        """Run the function until all that is wanted has been saved; return its result if it gets there.

        What is saved is listed in `watched`: tensor, its version then, holder.
        """
        function = self._forward.function
        push_saved_tensors_hooks(self.pack_hook(watched), self.unpack)
        try:
            if self._forward.store is not None and self._forward.make_replayer is None:
                with self.surroundings(None):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        except _StopRecomputation as stop:
            if stop is not self.stop:
                raise
            stop.__traceback__ = None  # its frames hold every tensor of the recomputation
            self.is_complete = not self._mismatches
        finally:
            pop_saved_tensors_hooks()

    def surroundings(self, context: AbstractContextManager[Any] | None) -> AbstractContextManager[Any]:
        """Return what the function must be run under, besides a context of its own."""
        if self._forward.store is not None and self._forward.make_replayer is None:
            watched = collectives.watched()  # of which the store has results
            return watched if context is None else all_of([watched, context])
        return nullcontext() if context is None else context

    def pack_hook(self, watched: list[Any]) -> Callable[[torch.Tensor], Holder | torch.Tensor]:
        """Return the hook that is given what autograd saves."""
        forward, task, only, guard, rest = self._forward, self._task, self._only, self._guard, self._rest
        check, run, cuts_now = forward.check, self, forward.copies_by_op
        last = forward.saves[self.num_needed - 1] if self._stops and self.num_needed else None
        watch, getframe = watched.append, sys._getframe

        def pack(tensor: torch.Tensor) -> Holder | torch.Tensor:
            nonlocal last
            if guard is not None:
                guard.check_saved(tensor)
            save = next(rest, None)
            if save is None:
                return run.on_surplus(tensor)
            holder = save[0]()
            packed: Holder | torch.Tensor | None = holder
            if holder is not None and (only is None or holder is only):
                value = _cut(tensor) if cuts_now else tensor
                holder.put(task, value)
                watch((tensor, version_of(tensor), holder))
                seen = default_metadata(value) if check is default_metadata else noted(check, value)
                if save[3] != seen:
                    run.note_mismatch(save, seen, getframe(1))
            else:
                packed = _cut(tensor)
            if save is last:
                if _FILLED_LATE.isdisjoint(getframe(1).f_code.co_names):
                    raise run.stop
                last = run.upcoming()
            return packed  # type: ignore[return-value]

        return pack

    def unpack(self, packed: Holder | torch.Tensor) -> torch.Tensor:
        """Serve a backward that the region's own function runs inside, during the recomputation."""
        if isinstance(packed, torch.Tensor):
            return packed
        value = packed.peek(self._task)
        assert isinstance(value, torch.Tensor), "values are handed out and replaced after the recomputation only"
        return value

    def upcoming(self) -> Save | None:
        """Return what the forward saved next; None at the end, where the next one is one too many."""
        saves, num_saved = self._forward.saves, self.num_saved
        return saves[num_saved] if num_saved < len(saves) else None

    def on_surplus(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stop at a tensor that the forward did not save, or raise, unless that is still running and may save it."""
        if self._stops:
            raise self.stop
        if self._forward.forward_done:
            raise too_many(self._forward, tensor, where_is(sys._getframe(2)))
        return _cut(tensor)

    def note_mismatch(self, save: Save, seen: Metadata, caller: Any) -> None:
        """Keep a difference for the error, with where in the recomputation it was seen."""
        self._mismatches.append((Mismatch(self.num_saved - 1, save[3], seen), where_is(caller)))

    def check(self) -> None:
        """Raise if the forward and this run did not save alike."""
        if self.is_complete:
            return
        if self.num_saved < self.num_needed and self._forward.forward_done:
            self.forget()
            raise too_few(self._forward, self.num_saved)
        if self._mismatches:
            self.forget()
            raise different(self._forward, self._mismatches)

    def forget(self) -> None:
        """Drop what this run has put into holders."""
        self._forward.forget(self._task)

    def forget_after_backward(self) -> None:
        """Drop, at the end of this backward, what it turned out not to need."""
        reference, task = weakref.ref(self._forward), self._task

        def forget() -> None:
            forward = reference()
            if forward is not None:
                forward.forget(task)

        queue_after_backward(forget)


def settle(forward: Forward, watched: list[Any], task: Any) -> None:
    """Cut what a recomputation saved off its history, and take back what it changed in place after saving it.

    Done at the end, when no dispatch mode of a policy is there to see it. Autograd itself would not accept what was
    changed after it had been saved.
    """
    for tensor, version, holder in watched:
        value = holder.take(task)
        if value is None:
            continue
        if version != -1 and tensor._version != version:
            value = Overwritten(forward.label, tensor)
        elif value is tensor and not tensor.is_leaf:
            value = tensor.data
        holder.put(task, value)


def _index_of(holder: Holder | None, saves: list[Save]) -> int:
    return next(i for i, (reference, *_) in enumerate(saves) if reference() is holder)


ends_search(Recomputation.call.__code__)
