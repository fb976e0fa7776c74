"""One call of a region: what is kept instead of its activations, and how they come back.

Forward runs under a pair of saved-tensor hooks. The pack hook hands autograd a small `Holder` for each tensor it
wants to keep; the unpack hook, called by backward, runs the region again, and this time the pack hook puts each
tensor into the holder with the same number. The frame knows its holders weakly: a holder dies with the graph node
that owns it, and what was recomputed for it, or saved by a policy ahead of it, dies with it.

Regions nest to any depth: an inner region's arguments are saved through the hooks of the outer one, so that
asking for them makes the outer region recompute first.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from remat.eager import ambient as ambient_settings
from remat.eager import rng
from remat.eager.determinism import (
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
from remat.eager.errors import CheckpointError
from remat.eager.reach import Reached, name_text
from remat.eager.state import ReadGuard, WatchedState, version_of
from remat.passes.torch_private import (
    DisableTorchDispatch,
    SavedTensor,
    current_graph_task_id,
    current_graph_task_keeps_graph,
    get_graph_exec_group,
    is_full_backward,
    make_saved_tensor,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    queue_after_backward,
    set_grad_enabled,
    skip_code,
    top_saved_tensors_hooks,
)

if TYPE_CHECKING:
    from remat.eager.selective import Segment, Selective, Store

_UNPACKED_TWICE = "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once."
# The one op of torch's whose kernel fills a tensor (its noise) after autograd has saved it: stopping before
# that kernel
# would leave it empty, so a recomputation that ends there goes on to the next saved tensor.
_FILLED_LATE = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _StopRecomputation(BaseException):
    """Unwinds a recomputation that has all it needs; no Exception, so that user code does not swallow it."""


class Holder:
    """What autograd keeps in place of a tensor: room for its recomputed value, per backward pass."""

    __slots__ = ("__weakref__", "index", "segment", "values")

    def __init__(self, index: int, segment: Segment | None) -> None:
        self.index = index
        self.segment = segment  # keeps alive what a policy saved before this point, and nothing saved after it
        self.values: dict[Any, torch.Tensor] | None = None


class Execution:
    """A running forward or recomputation of a region on this thread."""

    __slots__ = ("frame", "mode", "num_children", "replay", "task")

    def __init__(self, frame: Frame | None, replay: Store | None, task: Any = None) -> None:
        self.frame = frame
        self.replay = replay  # what the forward of this very call saved, when that forward is being run again
        self.task = task  # the backward pass that this is a recomputation for; None in a forward
        self.mode: Any = None
        self.num_children = 0


class _Local(threading.local):
    execution: Execution | None = None
    recompute_depth: int = 0


local = _Local()


def is_recomputing() -> bool:
    """True while a region's forward is being run again for backward, on this thread."""
    return local.recompute_depth > 0


class SavedArguments:
    """A region's arguments, with the versions of its tensors; hidden from an outer region if there is one."""

    __slots__ = ("_args", "_kwargs", "_versions")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._versions: list[tuple[int, int]] | None = None
        if top_saved_tensors_hooks(True) is not None:  # an outer region, or a user's own hooks
            self._args: tuple[Any, ...] = tuple([_pack_argument(value) for value in args])
            self._kwargs = {name: _pack_argument(value) for name, value in kwargs.items()}
            return
        self._args, self._kwargs = args, kwargs
        values = (*args, *kwargs.values()) if kwargs else args
        self._versions = [(i, _version(v)) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]

    @property
    def num_positional(self) -> int:
        """How many of the arguments were passed by position."""
        return len(self._args)

    def keyword(self, position: int) -> str:
        """Return the name of a keyword argument."""
        return list(self._kwargs)[position]

    def unpack(self, name_of: Callable[[int], str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments; raise, naming it, if one was changed in place since the forward."""
        if self._versions is not None:
            values = (*self._args, *self._kwargs.values()) if self._kwargs else self._args
            for index, version in self._versions:
                if _version(values[index]) != version:
                    raise CheckpointError(changed_in_place(name_of(index)))
            return self._args, self._kwargs
        args = tuple([_unpack_argument(v, i, name_of) for i, v in enumerate(self._args)])
        offset = len(args)
        items = enumerate(self._kwargs.items())
        return args, {name: _unpack_argument(v, offset + i, name_of) for i, (name, v) in items}


def _unpack_argument(value: Any, index: int, name_of: Callable[[int], str]) -> Any:
    if type(value) is not SavedTensor:
        return value
    try:
        return value.unpack()
    except CheckpointError:
        raise
    except RuntimeError as error:  # torch's own version check knows no name
        if "modified by an inplace operation" not in str(error):
            raise
        raise CheckpointError(changed_in_place(name_of(index))) from error


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except (RuntimeError, AttributeError):
        return version_of(tensor)


def _pack_argument(value: Any) -> Any:
    return make_saved_tensor(value, is_output=False) if isinstance(value, torch.Tensor) else value


def changed_in_place(name: str) -> str:
    """Return the message for a tensor that is no longer what the forward read."""
    return (
        f"{name} has been modified by an inplace operation between the forward of a checkpointed region "
        f"and its "
        "recomputation, which would give silently wrong gradients. Change it after backward, or give the "
        "region a "
        "clone of it."
    )


class Frame:
    """One call of a region, from its forward until backward no longer needs it."""

    __slots__ = (
        "__weakref__",
        "_function",
        "_groups",
        "_lock",
        "_tasks",
        "ambient",
        "arguments",
        "check",
        "children",
        "copies_by_op",
        "early_stop",
        "forward_done",
        "holders",
        "metadata",
        "name",
        "on_error",
        "recompute_context",
        "rng",
        "segment",
        "selective",
        "state",
        "store",
        "tail",
        "training",
        "where",
    )

    def __init__(self, function: Any, name: str | None, early_stop: bool, check: MetadataFunction | None) -> None:
        self._function = function
        self._lock = threading.RLock()
        self._tasks: deque[int] = deque(maxlen=16)  # backward passes that this was recomputed for
        self._groups: weakref.WeakSet[Any] | None = None
        self.name = name
        self.early_stop = early_stop
        self.check = check
        self.holders: list[weakref.ref[Holder]] = []
        self.metadata: list[Metadata] = []
        self.where: list[tuple[Any, int]] = []
        self.forward_done = False
        self.arguments: SavedArguments
        self.ambient: ambient_settings.Ambient
        self.rng: rng.RngSnapshot | None = None
        self.state: WatchedState | None = None
        self.training: list[tuple[str, weakref.ref[Any], bool]] = []
        self.recompute_context: AbstractContextManager[Any] | None = None
        self.children: dict[int, weakref.ref[Frame]] | None = None  # inner regions, by number of their call
        self.on_error: Callable[[CheckpointError], CheckpointError] | None = None
        self.copies_by_op = False  # cut recomputed tensors off their history by an op, which costs more
        self.selective: Selective | None = None
        self.store: Store | None = None  # what a policy saved, known weakly
        self.segment: Segment | None = None  # the newest part of it, held only while forward runs
        self.tail: Segment | None = None

    def note_training(self, reached: Reached) -> None:
        """Remember whether the modules at the top were in train mode, for an error's guess at the cause."""
        self.training = [(name, weakref.ref(m), m.training) for name, m in reached.modules]

    def hooks(self) -> tuple[Callable[[torch.Tensor], Holder], Callable[[Holder], torch.Tensor]]:
        """Return the pack and unpack hooks of the forward."""
        add_holder, add_metadata, add_where = self.holders.append, self.metadata.append, self.where.append
        holders, check, ref, getframe = self.holders, self.check, weakref.ref, sys._getframe
        frame = self

        def pack(tensor: torch.Tensor) -> Holder:
            segment = frame.segment
            if segment is not None:
                segment.is_taken = True
            holder = Holder(len(holders), segment)
            add_holder(ref(holder))
            caller = getframe(1)
            add_where((caller.f_code, caller.f_lasti))
            if check is default_metadata:
                add_metadata((tensor.shape, tensor.dtype, tensor.device))
            elif check is not None:
                with torch.no_grad():
                    add_metadata(check(tensor))
            return holder

        return pack, self._unpack

    def _unpack(self, holder: Holder) -> torch.Tensor:
        group = get_graph_exec_group()
        task = group if group is not None else current_graph_task_id()
        if holder.values is not None:
            value = holder.values.pop(task, None)
            if value is not None:
                return value
        try:
            return self._recompute_for(holder, task, group)
        except CheckpointError as error:
            if self.on_error is None:
                raise
            raise self.on_error(error) from error

    def _recompute_for(self, holder: Holder, task: Any, group: Any) -> torch.Tensor:
        with self._lock:  # two threads of one backward may ask at once; the second finds the value
            value = holder.values.pop(task, None) if holder.values is not None else None
            if value is not None:
                return value
            if group is not None:
                self._recompute_in_group(group)
            elif task == -1:
                self._recompute(task, holder)  # outside of backward nobody else's values are wanted
            elif task in self._tasks:
                raise CheckpointError(f"{_UNPACKED_TWICE} Read ctx.saved_tensors once in backward, and keep them.")
            else:
                self._recompute(task, None)
                self.note_recomputed(task)
            assert holder.values is not None, "a recomputation that ended well fills every living holder"
            return holder.values.pop(task)

    def note_recomputed(self, task: Any) -> None:
        """Remember that the holders were filled for a backward pass."""
        if type(task) is int:
            self._tasks.append(task)
        else:
            if self._groups is None:
                self._groups = weakref.WeakSet()
            self._groups.add(task)

    def can_be_refilled(self, task: Any) -> bool:
        """True if a run inside the recomputation of an outer region can serve this one's backward."""
        if task == -1 or task in self._tasks or (self._groups is not None and task in self._groups):
            return False
        return any(reference() is not None for reference in self.holders)

    def refill(self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Execution) -> Any:
        """Run the region inside the recomputation of an outer one: fill the holders, return its result."""
        SavedArguments(args, kwargs)  # the outer region's forward saved them here too, and counted them
        run = Recomputation(self, outer.task, None, stops=False)
        local.execution = execution = Execution(self, self.store, outer.task)
        context: AbstractContextManager[Any] | None = None
        if self.selective is not None:
            context = execution.mode = self.selective.replayer(self.store)
        elif self.recompute_context is not None:
            context = _fresh(self.recompute_context)
        if outer.mode is not None:
            outer.mode.num_suspensions += 1
        try:
            with context if context is not None else nullcontext():
                out = run.call(self._function, args, kwargs)
        except BaseException:
            run.forget()
            raise
        finally:
            local.execution = outer
            if outer.mode is not None:
                outer.mode.num_suspensions -= 1
        if self.store is not None:
            self.store.restore_rng_after()
        run.check()
        self.note_recomputed(outer.task)
        return out

    def _recompute_in_group(self, group: Any) -> None:
        if self._groups is not None and group in self._groups:
            raise CheckpointError(
                f"{_UNPACKED_TWICE} "
                "Performing two backward calls that overlap is refused inside a GraphExecGroup, whose "
                "backwards share "
                "one recomputation of each activation. Run the second one outside of the group, or in its "
                "own."
            )
        self._recompute(group, None)
        self.note_recomputed(group)

    def _recompute(self, task: Any, only: Holder | None) -> None:
        """Run the forward again and put what it saves into the holders, or into one of them."""
        args, kwargs = self.arguments.unpack(self._argument_name)
        if task in self._tasks:
            return  # an outer region, asked for these arguments, has been run again, and this one with it
        run = Recomputation(self, task, only)
        surroundings = self._surroundings(run)
        had_grad, outer = torch.is_grad_enabled(), local.execution
        random_state = rng.swap_in(self.rng) if self.rng is not None else None
        local.execution = execution = Execution(self, self.store, task)
        local.recompute_depth += 1
        set_grad_enabled(True)
        try:
            if surroundings:
                execution.mode = surroundings[-1] if self.selective is not None else None
                with surroundings[0] if len(surroundings) == 1 else _all_of(surroundings):
                    run.call(self._function, args, kwargs)
            else:
                run.call(self._function, args, kwargs)
        except BaseException:
            run.forget()
            raise
        finally:
            set_grad_enabled(had_grad)
            local.recompute_depth -= 1
            local.execution = outer
            if random_state is not None:
                rng.put_back(random_state)
        run.check()
        if type(task) is int and task != -1 and (current_graph_task_keeps_graph() or not is_full_backward()):  # type: ignore[no-untyped-call]
            run.forget_after_backward()

    def _surroundings(self, run: Recomputation) -> list[AbstractContextManager[Any]]:
        """Return what the recomputation must be run under, outermost first; usually nothing."""
        found: list[AbstractContextManager[Any]] = []
        if not ambient_settings.is_in_force(self.ambient):
            found.append(ambient_settings.restored(self.ambient))
        if self.state is not None:
            found.extend(self._state_surroundings(self.state, run))
        if self.selective is not None:
            found.append(self.selective.replayer(self.store))
        elif self.recompute_context is not None:
            found.append(_fresh(self.recompute_context))
        return found

    def _state_surroundings(self, state: WatchedState, run: Recomputation) -> list[AbstractContextManager[Any]]:
        found: list[AbstractContextManager[Any]] = []
        if state.buffers is not None and state.buffers.needs_replay:
            found.append(state.buffers.replayed())
        moved = state.moved()
        if moved:
            run.guard = ReadGuard(moved, lambda what: f"{self.label}: {changed_in_place(what)}")
            found.append(run.guard)
        return found

    @property
    def label(self) -> str:
        """Name the region for a message."""
        name = self.name or getattr(self._function, "__qualname__", None) or type(self._function).__name__
        return f"region {name}"

    def _argument_name(self, index: int) -> str:
        """Name the index-th argument (positional, then keyword) as the function's signature does."""
        return f"argument {argument_name(self._function, index, self.arguments)} of {self.label}"


def argument_name(function: Any, index: int, arguments: SavedArguments) -> str:
    """Return the name a function gives to its index-th argument, or its position."""
    position = index - arguments.num_positional
    if position >= 0:
        return f"`{arguments.keyword(position)}`"
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        names = [p.name for p in inspect.signature(target).parameters.values() if p.kind in _POSITIONAL]
    except (TypeError, ValueError):
        names = []
    return f"`{names[index]}`" if index < len(names) else f"number {index}"


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


@contextmanager
def _all_of(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _fresh(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context that can be entered once more, even of the kind that can be entered only once."""
    recreate = getattr(context, "_recreate_cm", None)  # generators behind `contextlib.contextmanager`
    return recreate() if recreate is not None else context


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
        self.num_needed = len(frame.holders) if only is None else only.index + 1
        if only is None and self._stops:
            holders = frame.holders
            while self.num_needed > 0 and holders[self.num_needed - 1]() is None:
                self.num_needed -= 1  # nobody is left to want what comes last

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function until all that is wanted has been saved; return its result if it gets there."""
        push_saved_tensors_hooks(self._pack_hook(), _identity)
        try:
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

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            index = run.num_saved
            run.num_saved = index + 1
            if guard is not None:
                guard.check_saved(tensor)
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
            point = _save_point(sys._getframe(2))
            first = f"The first tensor too many: {default_metadata(tensor)} at {point}.\n"
            raise more_error(first, likely_causes(None, self._training(), counts_differ=True))

    def note_mismatch(self, index: int, seen: Metadata, caller: Any) -> None:
        """Keep a difference for the error, with where in the recomputation it was seen."""
        self._mismatches.append((Mismatch(index, self._frame.metadata[index], seen), _where_am_i(caller)))

    def check(self) -> None:
        """Raise if the forward and this run did not save alike."""
        frame = self._frame
        if self.num_saved < self.num_needed and frame.forward_done:
            self.forget()
            first = f"First tensor that is missing: number {self.num_saved}, saved in forward at "
            first += f"{_save_point_of(frame.where[self.num_saved])}.\n"
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


def _keep_compiler_out() -> None:
    """Keep Dynamo from compiling the hooks when compiled code inside a region calls them."""
    for function in (Frame.hooks, Recomputation._pack_hook):
        for constant in function.__code__.co_consts:
            if isinstance(constant, CodeType):
                skip_code(constant)
    for method in (Frame._unpack, Frame._recompute_for, Frame._recompute, Recomputation.call):
        skip_code(method.__code__)


_keep_compiler_out()


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
    modules, frame = [], caller
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, torch.nn.Module):
            modules.append(type(module).__name__)
        frame = frame.f_back
    inside = f" in module {' in '.join(modules)}" if modules else ""
    return f"at {_save_point(caller)}{inside}"
