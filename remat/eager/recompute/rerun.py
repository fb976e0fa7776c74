"""One run of a region's forward for backward: fill the holders, stop when they are full, compare with the forward."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from remat.eager.recompute import collectives
from remat.eager.recompute.determinism import (
    Metadata,
    MetadataFunction,
    Mismatch,
    SavePoint,
    default_metadata,
    describe_metadata,
    fewer_error,
    likely_causes,
    metadata_error,
    more_error,
)
from remat.eager.state.reach import name_text
from remat.eager.state.state import ReadGuard
from remat.eager.types.errors import CheckpointError
from remat.eager.types.execution import all_of
from remat.eager.types.hooks import ends_search
from remat.passes.shared.module_path import current_module_path
from remat.passes.torch_private import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    queue_after_backward,
)

if TYPE_CHECKING:
    from remat.eager.recompute.frames import Frame, Holder, Save

# The one op of torch's whose kernel fills a tensor (its noise) after autograd has saved it: stopping before that
# kernel would leave it empty, so a recomputation that ends there goes on to the next saved tensor.
_FILLED_LATE = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})


class _StopRecomputation(BaseException):
    """Unwinds a recomputation that has all it needs; no Exception, so that user code does not swallow it."""


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor off its history."""
    return tensor.detach() if tensor.requires_grad else tensor


class Recomputation:
    """One run of a frame's forward for backward."""

    __slots__ = (
        "_frame",
        "_mismatches",
        "_only",
        "_rest",
        "_stops",
        "_task",
        "guard",
        "is_complete",
        "num_needed",
        "stop",
    )

    def __init__(self, frame: Frame, task: Any, only: Holder | None, stops: bool = True) -> None:
        saves = frame.saves
        self._frame = frame
        self._task = task
        self._only = only
        self._stops = stops and (frame.early_stop or only is not None)
        self._mismatches: list[tuple[Mismatch, Any]] = []
        self.is_complete = False  # known to have saved all that was needed, and alike
        self._rest: Iterator[Save] = iter(saves)  # what the forward saved and this run has not come to yet
        self.guard: ReadGuard | None = None
        self.stop = _StopRecomputation()
        self.num_needed = len(saves) if only is None else _index_of(only, saves) + 1
        if only is None and self._stops:
            while self.num_needed > 0 and saves[self.num_needed - 1][0]() is None:
                self.num_needed -= 1  # nobody is left to want what comes last

    @property
    def num_saved(self) -> int:
        """How many of the tensors that the forward saved this run has saved too."""
        return len(self._frame.saves) - operator.length_hint(self._rest)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], watched: list[Any]) -> Any:
        """Run the function until all that is wanted has been saved; return its result if it gets there.

        What is saved is listed in `watched`: tensor, its version then, holder.
        """
        push_saved_tensors_hooks(self.pack_hook(watched), self.unpack)
        try:
            if self._frame.store is not None and self._frame.make_replayer is None:
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
        if self._frame.store is not None and self._frame.make_replayer is None:
            watched = collectives.watched()  # of which the store has results
            return watched if context is None else all_of([watched, context])
        return nullcontext() if context is None else context

    def pack_hook(self, watched: list[Any]) -> Callable[[torch.Tensor], Holder | torch.Tensor]:
        """Return the hook that is given what autograd saves."""
        frame = self._frame
        if self.guard is None and self._only is None and frame.check is default_metadata and not frame.copies_by_op:
            return self._usual_pack_hook(watched)
        return self._careful_pack_hook(watched)

    def _usual_pack_hook(self, watched: list[Any]) -> Callable[[torch.Tensor], Holder | torch.Tensor]:
        """Return the same as the careful one, with nothing in it that most recomputations have no need of.

        It is called once per saved tensor, and most of what a region costs is in such calls.
        """
        rest, task, stops, run, watch = self._rest, self._task, self._stops, self, watched.append
        last = self._frame.saves[self.num_needed - 1] if stops and self.num_needed else None
        getframe = sys._getframe

        def pack(tensor: torch.Tensor) -> Holder | torch.Tensor:
            nonlocal last
            save = next(rest, None)
            if save is None:
                return run.on_surplus(tensor)
            holder = save[0]()
            if holder is not None:
                if holder.task is None:  # as `put` does, without the call
                    holder.task = task
                    holder.value = tensor
                else:
                    holder.put(task, tensor)
                try:
                    watch((tensor, tensor._version, holder))
                except (RuntimeError, AttributeError):  # as in `version_of`, without the call
                    watch((tensor, -1, holder))
                try:
                    is_alike = save[3] == (tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device)
                except RuntimeError:
                    is_alike = save[3] == default_metadata(tensor)
                if not is_alike:
                    run.note_mismatch(save, default_metadata(tensor), getframe(1))
            if save is last:
                if _FILLED_LATE.isdisjoint(getframe(1).f_code.co_names):
                    raise run.stop
                last = run.upcoming()
            return holder if holder is not None else _cut(tensor)

        return pack

    def _careful_pack_hook(self, watched: list[Any]) -> Callable[[torch.Tensor], Holder | torch.Tensor]:
        frame, task, only, guard, stops = self._frame, self._task, self._only, self.guard, self._stops
        check, rest, run, cuts_now = frame.check, self._rest, self, frame.copies_by_op
        last = frame.saves[self.num_needed - 1] if stops and self.num_needed else None
        watch = watched.append

        def pack(tensor: torch.Tensor) -> Holder | torch.Tensor:
            nonlocal last
            if guard is not None:
                guard.check_saved(tensor)
            save = next(rest, None)
            if save is None:
                return run.on_surplus(tensor)
            holder = save[0]()
            packed: Holder | torch.Tensor
            if holder is not None and (only is None or holder is only):
                packed = holder
                value = _cut(tensor) if cuts_now else tensor
                if holder.task is None:  # as `put` does, without the call
                    holder.task, holder.value = task, value
                else:
                    holder.put(task, value)
                try:
                    watch((tensor, tensor._version, holder))
                except (RuntimeError, AttributeError):  # as in `version_of`, without the call
                    watch((tensor, -1, holder))
                if check is not None:
                    run.compare(save, value, check, sys._getframe(1))
            else:
                packed = _cut(tensor)
            if save is last:
                if _FILLED_LATE.isdisjoint(sys._getframe(1).f_code.co_names):
                    raise run.stop
                last = run.upcoming()
            return packed

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
        saves, num_saved = self._frame.saves, self.num_saved
        return saves[num_saved] if num_saved < len(saves) else None

    def compare(self, save: Save, value: torch.Tensor, check: MetadataFunction, caller: Any) -> None:
        """Note it if a check sees something else than it saw in forward."""
        with torch.no_grad():
            seen = check(value)
        if save[3] != seen:
            self.note_mismatch(save, seen, caller)

    def on_surplus(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stop at a tensor that the forward did not save, or raise, unless that is still running and may save it."""
        if self._stops:
            raise self.stop
        if self._frame.forward_done:
            first = (
                f"First tensor too many, in {self._frame.label}:\n"
                f"  recompute: {describe_metadata(default_metadata(tensor))}, saved {_where_am_i(sys._getframe(2))}\n"
            )
            raise more_error(first, likely_causes(None, self._training(), counts_differ=True))
        return _cut(tensor)

    def note_mismatch(self, save: Save, seen: Metadata, caller: Any) -> None:
        """Keep a difference for the error, with where in the recomputation it was seen."""
        self._mismatches.append((Mismatch(self.num_saved - 1, save[3], seen), _where_am_i(caller)))

    def check(self) -> None:
        """Raise if the forward and this run did not save alike."""
        if self.is_complete:
            return
        frame = self._frame
        num_saved = self.num_saved
        if num_saved < self.num_needed and frame.forward_done:
            self.forget()
            missing = frame.saves[num_saved]
            seen = f"{describe_metadata(missing[3])}, " if missing[3] is not None else ""
            first = (
                f"First tensor that is missing, number {num_saved} in {frame.label}:\n"
                f"  forward:   {seen}saved at {_save_point_of(missing)}\n"
                f"  recompute: ended before it{self._last_seen()}\n"
            )
            causes = likely_causes(None, self._training(), counts_differ=True)
            raise fewer_error(len(frame.saves), num_saved, first, causes)
        if self._mismatches:
            self.forget()
            mismatch, where = self._mismatches[0]
            forward = _save_point_of(frame.saves[mismatch.index])
            first = (
                f"First difference, in {frame.label}:\n"
                f"  forward:   {describe_metadata(mismatch.forward)}, saved at {forward}\n"
                f"  recompute: {describe_metadata(mismatch.recompute)}, saved {where}\n"
            )
            causes = likely_causes(mismatch, self._training(), counts_differ=False)
            raise metadata_error([m for m, _ in self._mismatches], first, causes)

    def _last_seen(self) -> str:
        if self.num_saved == 0:
            return ", without saving any"
        return f"; the last one that both saved was at {_save_point_of(self._frame.saves[self.num_saved - 1])}"

    def _training(self) -> list[tuple[str, bool, bool]]:
        found = [(name, module(), before) for name, module, before in self._frame.training]
        return [(name_text(n), before, module.training) for n, module, before in found if module is not None]

    def forget(self) -> None:
        """Drop what this run has put into holders."""
        _forget(self._frame, self._task)

    def forget_after_backward(self) -> None:
        """Drop, at the end of this backward, what it turned out not to need."""
        reference, task = weakref.ref(self._frame), self._task

        def forget() -> None:
            frame = reference()
            if frame is not None:
                _forget(frame, task)

        queue_after_backward(forget)


class Overwritten:
    """Stands where a recomputed value was that the region itself has changed in place since autograd saved it."""

    def __init__(self, frame: Frame, tensor: torch.Tensor) -> None:
        self._label, self._what = frame.label, describe_metadata(default_metadata(tensor))

    def refuse(self) -> CheckpointError:
        """Return the error for a backward that wants the value."""
        return CheckpointError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{self._label} saves a tensor for backward ({self._what}) and changes it in place afterwards. "
            "The same code fails without a region, too. Use the op that is not in place, or clone the tensor first."
        )


def settle(frame: Frame, watched: list[Any], task: Any) -> None:
    """Cut what a recomputation saved off its history, and take back what it changed in place after saving it.

    Done at the end, when no dispatch mode of a policy is there to see it. Autograd itself would not accept what was
    changed after it had been saved.
    """
    for tensor, version, holder in watched:
        is_same = version == -1 or tensor._version == version
        if is_same and holder.task == task:  # the usual case, without calls
            if holder.value is tensor and not tensor.is_leaf:
                holder.value = tensor.data
        elif holder.take(task) is not None:
            holder.put(task, tensor.data if is_same else Overwritten(frame, tensor))


def _index_of(holder: Holder | None, saves: list[Save]) -> int:
    return next(i for i, (reference, *_) in enumerate(saves) if reference() is holder)


def _forget(frame: Frame, task: Any) -> None:
    for reference, *_ in frame.saves:
        holder = reference()
        if holder is not None:
            holder.take(task)


def _save_point(caller: Any) -> SavePoint:
    return SavePoint(caller.f_code, caller.f_lasti)


def _save_point_of(save: Save) -> SavePoint:
    return SavePoint(save[1], save[2])


def _where_am_i(caller: Any) -> str:
    """Say which line, function and modules a Python frame belongs to, innermost first."""
    path, names = current_module_path(), []
    frame = caller
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, torch.nn.Module):
            names.append(type(module).__name__)
        frame = frame.f_back
    inside = f" in module {f'{path}: ' if path else ''}{' in '.join(names)}" if names else ""
    return f"at {_save_point(caller)}{inside}"


ends_search(Recomputation.call.__code__)
