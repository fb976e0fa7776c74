"""One run of a region's forward for backward: fill the holders, stop when they are full, compare with the forward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from remat.eager import collectives
from remat.eager.determinism import (
    Metadata,
    Mismatch,
    SavePoint,
    default_metadata,
    describe_metadata,
    fewer_error,
    likely_causes,
    metadata_error,
    more_error,
)
from remat.eager.errors import CheckpointError
from remat.eager.execution import local
from remat.eager.hooks import ends_search
from remat.eager.reach import name_text
from remat.eager.state import ReadGuard, version_of
from remat.passes.module_path import current_module_path
from remat.passes.torch_private import (
    DisableTorchDispatch,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    queue_after_backward,
)

if TYPE_CHECKING:
    from remat.eager.frames import Frame, Holder

# The one op of torch's whose kernel fills a tensor (its noise) after autograd has saved it: stopping before that
# kernel would leave it empty, so a recomputation that ends there goes on to the next saved tensor.
_FILLED_LATE = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})


class _StopRecomputation(BaseException):
    """Unwinds a recomputation that has all it needs; no Exception, so that user code does not swallow it."""


def _data(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor off its history without an op."""
    return tensor.data


def _data_past_modes(tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor off its history without telling dispatch modes, which `.data` would."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return tensor.data
    with DisableTorchDispatch():
        return tensor.data


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Recomputation:
    """One run of a frame's forward for backward."""

    __slots__ = (
        "_frame",
        "_mismatches",
        "_only",
        "_stops",
        "_task",
        "guard",
        "num_needed",
        "num_saved",
        "stop",
    )

    def __init__(self, frame: Frame, task: Any, only: Holder | None, stops: bool = True) -> None:
        self._frame = frame
        self._task = task
        self._only = only
        self._stops = stops and (frame.early_stop or only is not None)
        self._mismatches: list[tuple[Mismatch, Any]] = []
        self.guard: ReadGuard | None = None
        self.stop = _StopRecomputation()
        self.num_saved = 0
        self.num_needed = len(frame.holders) if only is None else _index_of(only, frame.holders) + 1
        if only is None and self._stops:
            holders = frame.holders
            while self.num_needed > 0 and holders[self.num_needed - 1]() is None:
                self.num_needed -= 1  # nobody is left to want what comes last

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function until all that is wanted has been saved; return its result if it gets there."""
        push_saved_tensors_hooks(self._pack_hook(), _identity)
        try:
            if self._frame.store is not None and self._frame.selective is None:
                with collectives.watched():  # of which the store has results
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        except _StopRecomputation as stop:
            if stop is not self.stop:
                raise
            stop.__traceback__ = None  # its frames hold every tensor of the recomputation
        finally:
            pop_saved_tensors_hooks()

    def _pack_hook(self) -> Callable[[torch.Tensor], torch.Tensor]:
        frame, task, only, guard, stops = self._frame, self._task, self._only, self.guard, self._stops
        holders, metadata, check, num_needed = frame.holders, frame.metadata, frame.check, self.num_needed
        detach = torch.Tensor.detach if frame.copies_by_op else _data if frame.selective is None else _data_past_modes
        getframe, run = sys._getframe, self
        watched = local.watched
        assert watched is not None, "a recomputation sets this up before it runs anything"

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            index = run.num_saved
            run.num_saved = index + 1
            if guard is not None:
                guard.check_saved(tensor)
            original = tensor
            if tensor.requires_grad:
                tensor = detach(tensor)
            if index >= len(holders):
                if stops:
                    raise run.stop
                run.note_surplus(tensor)
                return tensor
            holder = holders[index]()
            if holder is not None and (only is None or holder is only):
                if holder.values is None:
                    holder.values = {task: tensor}
                else:
                    holder.values[task] = tensor
                watched.append((original, version_of(original), holder))
                if check is default_metadata:
                    if metadata[index] != (tensor.shape, tensor.dtype, tensor.device):
                        run.note_mismatch(index, default_metadata(tensor), sys._getframe(1))
                elif check is not None:
                    with torch.no_grad():
                        seen = check(tensor)
                    if metadata[index] != seen:
                        run.note_mismatch(index, seen, sys._getframe(1))
            if (
                stops
                and index + 1 >= num_needed
                and (index >= num_needed or _FILLED_LATE.isdisjoint(getframe(1).f_code.co_names))
            ):
                raise run.stop
            return tensor

        return pack

    def note_surplus(self, tensor: torch.Tensor) -> None:
        """Raise, unless the forward itself is still running and may save this later."""
        if self._frame.forward_done:
            first = (
                f"First tensor too many, in {self._frame.label}:\n"
                f"  recompute: {describe_metadata(default_metadata(tensor))}, saved {_where_am_i(sys._getframe(2))}\n"
            )
            raise more_error(first, likely_causes(None, self._training(), counts_differ=True))

    def note_mismatch(self, index: int, seen: Metadata, caller: Any) -> None:
        """Keep a difference for the error, with where in the recomputation it was seen."""
        self._mismatches.append((Mismatch(index, self._frame.metadata[index], seen), _where_am_i(caller)))

    def check(self) -> None:
        """Raise if the forward and this run did not save alike."""
        frame = self._frame
        if self.num_saved < self.num_needed and frame.forward_done:
            self.forget()
            seen = f"{describe_metadata(frame.metadata[self.num_saved])}, " if frame.metadata else ""
            first = (
                f"First tensor that is missing, number {self.num_saved} in {frame.label}:\n"
                f"  forward:   {seen}saved at {_save_point_of(frame.where[self.num_saved])}\n"
                f"  recompute: ended before it{self._last_seen()}\n"
            )
            causes = likely_causes(None, self._training(), counts_differ=True)
            raise fewer_error(len(frame.holders), self.num_saved, first, causes)
        if self._mismatches:
            self.forget()
            mismatch, where = self._mismatches[0]
            forward = _save_point_of(frame.where[mismatch.index])
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
        return f"; the last one that both saved was at {_save_point_of(self._frame.where[self.num_saved - 1])}"

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


def mark_overwritten(frame: Frame, watched: list[Any], task: Any) -> None:
    """Take back what was changed in place after it had been saved: autograd itself would not accept it."""
    for tensor, version, holder in watched:
        if version_of(tensor) != version and holder.values is not None and task in holder.values:
            holder.values[task] = Overwritten(frame, tensor)


def _index_of(holder: Holder, holders: list[weakref.ref[Holder]]) -> int:
    return next(i for i, reference in enumerate(holders) if reference() is holder)


def _forget(frame: Frame, task: Any) -> None:
    for reference in frame.holders:
        holder = reference()
        if holder is not None and holder.values is not None:
            holder.values.pop(task, None)


def _save_point(caller: Any) -> SavePoint:
    return SavePoint(caller.f_code, caller.f_lasti)


def _save_point_of(where: tuple[Any, int]) -> SavePoint:
    return SavePoint(*where)


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
