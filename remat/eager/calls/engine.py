"""The one way into a region: set a frame up, run the function under it, seal the frame."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import is_grad_enabled, nn

from remat.eager.calls.frames import Frame
from remat.eager.calls.out_of_memory import advise
from remat.eager.recompute import collectives
from remat.eager.state import rng
from remat.passes.torch_private import (
    get_eval_frame_callback,
    is_tracing,
    peek_functorch_stack,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    run_uncompiled,
)

from ..recompute import DebugLogs, MetadataFunction, find_determinism_check
from ..selective import Recorder, Replayer, Selective
from ..state import Ambient, Clearance, SavedArguments, WatchedState, generators_of, reach
from ..types import Execution, Overrides, RegionCall, Segment, adopt_child, all_of, ends_search, local, overrides

ContextFunction = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def noop_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts that do nothing."""
    return nullcontext(), nullcontext()


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """How a region is to be run."""

    name: str | None = None
    preserve_rng_state: bool = True
    selective: Selective | None = None
    check: MetadataFunction | None = None
    debug: bool = False
    early_stop: bool = True
    is_refilled: bool = False
    """Whether the recomputation of an outer region also serves this one's backward.

    Each op then runs again once, as in compiled code. Nested regions of torch's run once more per level, and
    hold less at a time.
    """


@functools.lru_cache(maxsize=1024)
def cached_spec(
    preserve_rng_state: bool, determinism_check: str, debug: bool, early_stop: bool, name: str | None = None
) -> RegionSpec:
    """Return the spec of a region without contexts; the same few come again and again."""
    return RegionSpec(
        name=name,
        preserve_rng_state=preserve_rng_state,
        check=find_determinism_check(determinism_check),
        debug=debug,
        early_stop=early_stop,
    )


def run_region(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    spec: RegionSpec,
    context_fn: ContextFunction = noop_context_fn,
) -> Any:
    """Call a function as a region: keep its inputs, not its activations, and run it again in backward.

    Inside of torch.func's transforms (grad, vmap, jvp), and without grad mode, the function is just called. It is
    called from here, and not by helpers: regions nest, and each helper would be one more step on Python's stack.
    """
    around = overrides.get()
    debug = spec.debug if around.debug is None else around.debug
    if debug and (context_fn is not noop_context_fn or spec.selective is not None):
        raise ValueError("debug=True is incompatible with non-default context_fn (or a policy)")
    if not is_grad_enabled() or peek_functorch_stack() is not None:
        # Nothing is saved without grad mode. torch.func's transforms allow no saved-tensor hooks; there the region is
        # run as plain code, with the same results and without its memory being saved.
        return function(*args, **kwargs)
    if get_eval_frame_callback() is not None:
        # Called from compiled code after a graph break: what runs here must run alike in backward, so uncompiled.
        return run_uncompiled(run_region, function, args, kwargs, spec, context_fn)
    outer = local.execution
    number, replay, former = (0, None, None) if outer is None else _enter_child(outer)
    if outer is not None and spec.is_refilled and former is not None and former.can_be_refilled(outer.task):
        return former.refill(args, kwargs, outer)
    contexts: Any = DebugLogs() if debug else None if context_fn is noop_context_fn else context_fn()
    frame = _open_frame(function, args, kwargs, spec, around)
    execution, out = Execution(frame, outer), _NOTHING
    context = _enter_region(frame, execution, outer, number, _attach_contexts(frame, execution, contexts, spec, replay))
    push_saved_tensors_hooks(*frame.hooks())
    try:
        if context is None:
            out = function(*args, **kwargs)
        else:
            with context:
                out = function(*args, **kwargs)
            if out is _NOTHING:
                raise RuntimeError(_SUPPRESSED)
        if execution.mode is not None or replay is not None:
            _note_rng_after(execution)
    except Exception as error:
        advise(error, frame, "forward")
        raise
    finally:
        pop_saved_tensors_hooks()
        _leave_region(frame, execution, outer, has_returned=out is not _NOTHING)
    _seal(frame, outer, number)
    return out


_NOTHING = object()  # what a function has returned that has not returned
_SUPPRESSED = (
    "torch.utils.checkpoint: the forward context that context_fn returned suppressed an exception raised during the "
    "region's forward, which leaves nothing to return. Let the exception through."
)


def _enter_region(
    frame: Frame,
    execution: Execution,
    outer: Execution | None,
    number: int,
    context: AbstractContextManager[Any] | None,
) -> AbstractContextManager[Any] | None:
    """Tell the region around about this one; return what the forward must be run under."""
    if outer is not None:
        if outer.frame is not None:
            frame.outer_names = outer.frame.names
            if outer.task is None:
                outer.frame.children = outer.frame.children or {}
                outer.frame.children[number] = weakref.ref(frame)
        if outer.mode is not None:
            outer.mode.num_suspensions += 1  # the inner region's policy holds inside it, and only that
    local.execution = execution
    if execution.mode is None and collectives.may_run():
        watched = collectives.watched()
        return watched if context is None else all_of([watched, context])
    return context


def _note_rng_after(execution: Execution) -> None:
    if isinstance(execution.mode, Recorder):
        execution.mode.note_rng_after()
    elif execution.replay is not None:
        execution.replay.restore_rng_after()


def _leave_region(frame: Frame, execution: Execution, outer: Execution | None, *, has_returned: bool) -> None:
    """Give the word back to the region around; untie frame and recorder, which would keep each other alive."""
    local.execution = outer
    execution.frame = None
    if outer is not None and outer.mode is not None:
        outer.mode.num_suspensions -= 1
    if isinstance(execution.mode, Recorder):
        execution.mode.release()
    execution.mode = None
    if frame.state is not None:
        frame.state.seal() if has_returned else frame.state.end_forward()


def _open_frame(function: Any, args: Any, kwargs: dict[str, Any], spec: RegionSpec, around: Overrides) -> Frame:
    """Note all that a recomputation must find as it is now."""
    early_stop = spec.early_stop if around.early_stop is None else around.early_stop
    frame = Frame(function, spec.name, early_stop, spec.check)
    frame.arguments = SavedArguments(args, kwargs)
    frame.ambient = Ambient.current()
    if is_tracing():
        frame.copies_by_op = True  # so that the graph being traced has them
        return frame  # and nothing of ours: what follows is about values, and there are none
    reached = reach(function, args, kwargs)
    frame.clearance = clearance = Clearance(reached)
    if spec.preserve_rng_state:
        generators = generators_of(reached) if reached.modules else reached.generators
        frame.rng = rng.RngSnapshot(rng.accelerator_devices(args), generators)
    if reached.modules:
        clearance.keep_codes()
        frame.state = WatchedState(reached, (_region_key(function), clearance.codes))
        frame.note_training(reached)
    elif reached.tensors:
        frame.state = WatchedState(reached, None)
    return frame


def _region_key(function: Any) -> Any:
    """Return what tells regions apart whose first call is looked at more closely."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return code if code is not None else type(function) if isinstance(function, nn.Module) else id(function)


def _enter_child(outer: Execution) -> tuple[int, Segment | None, RegionCall | None]:
    """Number this call within the region around it; if that is run again, find what it was then."""
    number = outer.num_children
    outer.num_children = number + 1
    if type(outer.mode) is Recorder:
        outer.mode.note_rng_before_child(number)
    elif outer.replay is not None and number in outer.replay.rng_before_children:
        for state in outer.replay.rng_before_children[number]:
            state.restore()
    saved = outer.replay.children.get(number) if outer.replay is not None else None
    former = None
    if outer.task is not None and outer.frame is not None and outer.frame.children is not None:
        former = outer.frame.children.get(number)
    return number, saved() if saved is not None else None, former() if former is not None else None


def _attach_contexts(
    frame: Frame, execution: Execution, contexts: Any, spec: RegionSpec, replay: Any
) -> AbstractContextManager[Any] | None:
    """Connect the frame with its contexts and return the one for the forward."""
    if replay is not None:
        frame.store, frame.segment = replay.store, replay
        execution.replay = replay.store
    selective: Selective | Recorder | None = spec.selective
    forward: Any = None
    if isinstance(contexts, DebugLogs):
        frame.recompute_context, frame.on_error = contexts.recompute_context(), contexts.explain
        return contexts.forward_context()
    if contexts is not None:
        forward, recompute = contexts
        if type(forward) is Recorder and type(recompute) is Replayer:
            selective = forward
        else:
            frame.recompute_context = recompute
            frame.copies_by_op = True  # a user's dispatch mode may count on seeing them
    if selective is None:
        return forward  # type: ignore[no-any-return]
    frame.make_replayer, frame.policy = Replayer, selective.policy
    if replay is not None and replay.store.counts:
        # An outer region is being run again: what this call's own forward saved is not computed a second
        # time.
        execution.mode = Replayer(replay.store)
    elif type(forward) is Recorder and not forward.is_bound:
        execution.mode = forward.bind(frame)
    else:
        execution.mode = selective.recorder(frame)
    return execution.mode  # type: ignore[no-any-return]


def _seal(frame: Frame, outer: Execution | None, number: int) -> None:
    """Finish a frame after its forward: let go of what only a running forward needs."""
    frame.forward_done = True
    segment, frame.segment = frame.segment, None
    if segment is not None and (segment.items or segment.previous is not None):
        if not frame.early_stop:
            frame.tail = segment
        if outer is not None and outer.task is None and outer.frame is not None:
            adopt_child(outer.frame, number, segment)
    if frame.rng is not None:
        frame.rng.seal()


ends_search(run_region.__code__)
