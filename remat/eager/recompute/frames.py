"""One call of a region: what is kept instead of its activations, and how they come back.

Forward runs under a pair of saved-tensor hooks. The pack hook hands autograd a small `Holder` for each tensor it
wants to keep; the unpack hook, called by backward, runs the region again, and this time the pack hook puts each
tensor into the holder with the same number. The frame knows its holders weakly: a holder dies with the graph node
that owns it, and what was recomputed for it, or saved by a policy ahead of it, dies with it.

Regions nest to any depth: an inner region's arguments are saved through the hooks of the outer one, so that
asking for them makes the outer region recompute first.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled

from remat.eager.recompute.determinism import Metadata, MetadataFunction, default_metadata
from remat.eager.recompute.out_of_memory import advise
from remat.eager.recompute.rerun import Overwritten, Recomputation, settle
from remat.eager.state import ambient as ambient_settings
from remat.eager.state import rng
from remat.eager.state.arguments import SavedArguments, argument_name, changed_in_place
from remat.eager.state.reach import Reached
from remat.eager.state.renorm import RenormReplay, renormed_twice
from remat.eager.state.state import ReadGuard, WatchedState
from remat.eager.state.swap import Copies, replayed
from remat.eager.state.write_guard import Clearance, WriteGuard, changed_twice
from remat.eager.types.errors import CheckpointError, Differs
from remat.eager.types.execution import Execution, all_of, local
from remat.passes.torch_private import (
    current_graph_task_id,
    current_graph_task_keeps_graph,
    get_eval_frame_callback,
    get_graph_exec_group,
    is_full_backward,
    is_in_forward_ad,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    run_uncompiled,
    set_grad_enabled,
    skip_code,
)

if TYPE_CHECKING:
    from remat.eager.selective.replayer import Replayer
    from remat.eager.selective.saved import Segment, Store

_MAX_TASKS = 15  # backward passes that are remembered besides the newest
_UNPACKED_TWICE = "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once."


class Holder:
    """What autograd keeps in place of a tensor: room for its recomputed value, per backward pass.

    There is one per saved tensor, so making and filling one must be quick: slots, set by who makes it, and a dictionary
    only for the rare case of two backward passes at a time.
    """

    __slots__ = ("__weakref__", "others", "segment", "task", "value")

    others: dict[Any, Recomputed] | None
    """Values for other backward passes than `task`."""
    segment: Segment
    """Keeps alive what a policy saved before this point, and nothing saved after it; not set without a policy."""
    task: Any
    """The backward pass that `value` is for; None if there is none."""
    value: Recomputed | None

    def put(self, task: Any, value: Recomputed) -> None:
        """Keep a value for a backward pass."""
        if self.task is None or self.task == task:
            self.task, self.value = task, value
            return
        if self.others is None:
            self.others = {}
        self.others[task] = value

    def peek(self, task: Any) -> Recomputed | None:
        """Return the value for a backward pass, if there is one."""
        if self.task is not None and self.task == task:
            return self.value
        return self.others.get(task) if self.others is not None else None

    def take(self, task: Any) -> Recomputed | None:
        """Return the value for a backward pass, if there is one, and forget it."""
        if self.task is not None and self.task == task:
            value, self.task, self.value = self.value, None, None
            return value
        return self.others.pop(task, None) if self.others is not None else None


Recomputed = torch.Tensor | Overwritten

Save = tuple["weakref.ref[Holder]", CodeType, int, Metadata]
"""One tensor that autograd saved in forward: its holder, the code and instruction that saved it, what a check noted."""


class Frame:
    """One call of a region, from its forward until backward no longer needs it."""

    # What most calls have nothing of is said once, for the class: setting it up in every call takes time.
    _groups: weakref.WeakSet[Any] | None = None
    _tasks: tuple[int, ...] = ()  # backward passes that this was recomputed for
    arguments: SavedArguments
    ambient: ambient_settings.Ambient
    forward_done = False
    rng: rng.RngSnapshot | None = None
    state: WatchedState | None = None
    clearance: Clearance | None = None
    training: Sequence[tuple[str, weakref.ref[Any], bool]] = ()
    recompute_context: AbstractContextManager[Any] | None = None
    children: dict[int, weakref.ref[Frame]] | None = None  # inner regions, by number of their call
    outer_names: tuple[str, ...] = ()  # of the regions around this call
    on_error: Callable[[CheckpointError], CheckpointError] | None = None
    copies_by_op = False  # cut recomputed tensors off their history by an op, which costs more
    make_replayer: type[Replayer] | None = None  # in a region with a policy
    policy: Any = None
    store: Store | None = None  # what a policy saved, known weakly
    segment: Segment | None = None  # the newest part of it, held only while forward runs
    tail: Segment | None = None

    def __init__(self, function: Any, name: str | None, early_stop: bool, check: MetadataFunction | None) -> None:
        self._function = function
        self._lock = threading.RLock()
        self.name = name
        self.early_stop = early_stop
        self.check = check
        self.saves: list[Save] = []

    def note_training(self, reached: Reached) -> None:
        """Remember whether the modules at the top were in train mode, for an error's guess at the cause."""
        self.training = [(name, weakref.ref(m), m.training) for name, m in reached.modules]

    def hooks(self) -> tuple[Callable[[torch.Tensor], Holder], Callable[[Holder], torch.Tensor]]:
        """Return the pack and unpack hooks of the forward."""
        add_save, check, ref, getframe, new_holder = self.saves.append, self.check, weakref.ref, sys._getframe, Holder
        frame = self
        frame.segment = frame.segment  # the instance's own: quicker to ask for than the class's, for each tensor

        def pack(tensor: torch.Tensor) -> Holder:
            holder = new_holder()
            holder.task = holder.others = None
            segment = frame.segment
            if segment is not None:
                segment.is_taken = True
                holder.segment = segment
            caller = getframe(1)
            if check is default_metadata:  # as it would answer, without the call
                try:
                    metadata: Metadata = (tensor.shape, tensor.dtype, tensor.is_cpu or tensor.device)
                except RuntimeError:
                    metadata = default_metadata(tensor)
            else:
                metadata = _noted(check, tensor)
            add_save((ref(holder), caller.f_code, caller.f_lasti, metadata))
            return holder

        return pack, self._unpack

    def _unpack(self, holder: Holder) -> torch.Tensor:
        task: Any = current_graph_task_id()
        if holder.task == task:  # as `take` does, without the call
            value = holder.value
            holder.task = holder.value = None
            if type(value) is Overwritten:
                raise value.refuse()
            return value  # type: ignore[return-value]
        if get_eval_frame_callback() is not None:  # compiled autograd: what ran in forward must run alike, uncompiled
            return run_uncompiled(self._unpack, holder)  # type: ignore[no-any-return]
        group = get_graph_exec_group()
        task = task if group is None else group
        try:
            with self._lock:  # two threads of one backward may ask at once; the second finds the value
                if holder.peek(task) is None:
                    self._refuse_second_time(task)
                    # Asked for from here, and not by a helper: in nested regions this makes the outer one recompute,
                    # for whose arguments the next one is asked, and each helper would be one more step on the stack.
                    given = self.arguments.unpack(self._argument_name)
                    self._recompute_for(task, holder, *given)
                value = holder.take(task)
            if type(value) is Overwritten:
                raise value.refuse()
        except CheckpointError as error:
            if self.on_error is None:
                raise
            raise self.on_error(error) from error
        assert value is not None, "a recomputation that ended well fills every living holder"
        return value  # type: ignore[return-value]

    def _refuse_second_time(self, task: Any) -> None:
        """Raise if the values for a backward pass were recomputed once and have been taken."""
        if task in self._tasks:
            raise CheckpointError(f"{_UNPACKED_TWICE} Read ctx.saved_tensors once in backward, and keep them.")
        if self._groups is not None and task in self._groups:
            raise CheckpointError(
                f"{_UNPACKED_TWICE} Performing two backward calls that overlap is refused inside a GraphExecGroup, "
                "whose backwards share one recomputation of each activation. Run the second one outside of the group, "
                "or in its own."
            )

    def _recompute_for(self, task: Any, holder: Holder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        only = holder if task == -1 else None  # outside of backward nobody else's values are wanted
        if only is None and self._was_run_for(task):
            return  # an outer region, asked for these arguments, may have run this one again
        is_guarded, differs = self._needs_guard(), False
        try:
            self._recompute(task, only, args, kwargs, is_guarded)
        except Differs:
            if not is_guarded or self.store is not None:
                raise
            differs = True
        if differs:  # under a dispatch mode some ops are made of others: `ctc_loss`
            self._forget_run_of_children(task)
            self._recompute(task, only, args, kwargs, is_guarded=False)
        if is_guarded and self.clearance is not None and only is None:  # for one value, too little has been run
            self.clearance.give()
        if only is None:
            self.note_recomputed(task)

    def _needs_guard(self) -> bool:
        """True for a recomputation that is to be watched for writes to what outlives it.

        Under a dispatch mode forward-mode derivatives are computed by other ops than in forward.
        """
        return self.clearance is not None and not self.clearance.is_given() and not is_in_forward_ad()

    def _was_run_for(self, task: Any) -> bool:
        return task in self._tasks or (self._groups is not None and task in self._groups)

    def note_recomputed(self, task: Any) -> None:
        """Remember that the holders were filled for a backward pass."""
        if type(task) is int:
            self._tasks = (*self._tasks[-_MAX_TASKS:], task) if self._tasks else (task,)
        else:
            if self._groups is None:
                self._groups = weakref.WeakSet()
            self._groups.add(task)

    def _forget_run_of_children(self, task: Any) -> None:
        """Have inner regions serve a backward pass once more, whose values of an earlier run have been dropped."""
        for reference in (self.children or {}).values():
            child = reference()
            if child is not None:
                child._tasks = tuple([done for done in child._tasks if done != task])
                if child._groups is not None:
                    child._groups.discard(task)
                child._forget_run_of_children(task)

    def can_be_refilled(self, task: Any) -> bool:
        """True if a run inside the recomputation of an outer region can serve this one's backward."""
        if task == -1 or self._was_run_for(task):
            return False
        return any(reference() is not None for reference, *_ in self.saves)

    def refill(self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Execution) -> Any:
        """Run the region inside the recomputation of an outer one: fill the holders, return its result."""
        SavedArguments(args, kwargs)  # the outer region's forward saved them here too, and counted them
        run = Recomputation(self, outer.task, None, stops=False)
        local.execution = execution = Execution.again(self, outer.task, outer.watched)
        context: AbstractContextManager[Any] | None = None
        if self.make_replayer is not None:
            context = execution.mode = self.make_replayer(self.store)
        elif self.recompute_context is not None:
            context = _fresh(self.recompute_context)
        if outer.mode is not None:
            outer.mode.num_suspensions += 1
        push_saved_tensors_hooks(run.pack_hook(execution.watched), run.unpack)
        try:  # as `run.call`, without its step on Python's stack: regions nest
            with run.surroundings(context):
                out = self._function(*args, **kwargs)
        except BaseException as error:
            run.forget()
            advise(error, self, "recomputation")
            raise
        finally:
            pop_saved_tensors_hooks()
            local.execution = outer
            if outer.mode is not None:
                outer.mode.num_suspensions -= 1
        if self.store is not None:
            self.store.restore_rng_after()
        run.check()
        self.note_recomputed(outer.task)
        _forget_leftovers(run, outer.task)
        return out

    def _recompute(
        self, task: Any, only: Holder | None, args: tuple[Any, ...], kwargs: dict[str, Any], is_guarded: bool
    ) -> None:
        """Run the forward again and put what it saves into the holders, or into one of them."""
        run = Recomputation(self, task, only)
        surroundings = self._surroundings(run, is_guarded)
        had_grad, outer = is_grad_enabled(), local.execution
        random_state = rng.swap_in(self.rng) if self.rng is not None else None
        watched: list[Any] = []
        local.execution = execution = Execution.again(self, task, watched)
        set_grad_enabled(True)
        try:
            if surroundings:
                execution.mode = surroundings[-1] if self.make_replayer is not None else None
                with surroundings[0] if len(surroundings) == 1 else all_of(surroundings):
                    run.call(self._function, args, kwargs, watched)
            else:
                run.call(self._function, args, kwargs, watched)
            settle(self, watched, task)
        except BaseException as error:
            for _, _, holder in watched:  # of this region, and of inner ones that ran again with it
                holder.take(task)
            advise(error, self, "recomputation")
            raise
        finally:
            watched.clear()  # the tensors in it know the hooks by their history, and those know the list
            set_grad_enabled(had_grad)
            local.execution = outer
            if random_state is not None:
                rng.put_back(random_state)
        if not run.is_complete:
            run.check()
        _forget_leftovers(run, task)

    def _surroundings(self, run: Recomputation, is_guarded: bool) -> list[AbstractContextManager[Any]]:
        """Return what the recomputation must be run under, outermost first; usually nothing."""
        found: list[AbstractContextManager[Any]] = []
        if not ambient_settings.is_in_force(self.ambient):
            found.append(ambient_settings.restored(self.ambient))
        state = self.state
        copies = state.buffers.copies() if state is not None and state.buffers is not None else []
        if is_guarded:
            outliving = self.arguments.tensors() + (state.tensors() if state is not None else [])
            guard = WriteGuard(lambda what: changed_twice(self.label, what), self.rng, self.label, outliving)
            guard.allow(copy for _, _, copy in copies)
            found.append(guard)
        if state is not None:
            found.extend(self._state_surroundings(state, copies, run))
        if self.make_replayer is not None:
            found.append(self.make_replayer(self.store))
        elif self.recompute_context is not None:
            found.append(_fresh(self.recompute_context))
        return found

    def _state_surroundings(
        self, state: WatchedState, copies: Copies, run: Recomputation
    ) -> list[AbstractContextManager[Any]]:
        found: list[AbstractContextManager[Any]] = []
        replaced = state.replaced()
        if replaced is not None:
            raise CheckpointError(
                f"{self.label}: {replaced} is another tensor than it was in forward, so the recomputation in backward "
                "would use the wrong one. torch.func.functional_call, for one, puts tensors into a module only while "
                "it is called: make the call itself a region, remat.checkpoint(functional_call, module, tensors, x)."
            )
        if copies:
            found.append(replayed(copies))
        moved = state.moved()
        if moved:
            run.guard = ReadGuard(moved, lambda what: f"{self.label}: {changed_in_place(what)}")
            found.append(run.guard)
        if state.renormed:
            found.append(RenormReplay(state.renormed, lambda what: f"{self.label}: {renormed_twice(what)}"))
        return found

    @property
    def label(self) -> str:
        """Name the region for a message, with the regions around it."""
        return f"region {'/'.join(self.names)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the regions around this one, and its own."""
        name = self.name or getattr(self._function, "__qualname__", None) or type(self._function).__name__
        return (*self.outer_names, name)

    def _argument_name(self, index: int) -> str:
        """Name the index-th argument (positional, then keyword) as the function's signature does."""
        return f"argument {argument_name(self._function, index, self.arguments)} of {self.label}"


def _forget_leftovers(run: Recomputation, task: Any) -> None:
    """See to it that values do not stay which this backward leaves lying, if nothing else takes them away."""
    if type(task) is int and task != -1 and (current_graph_task_keeps_graph() or not is_full_backward()):
        run.forget_after_backward()


def _noted(check: MetadataFunction | None, tensor: torch.Tensor) -> Metadata:
    if check is None:
        return None
    with torch.no_grad():
        return check(tensor)


def _fresh(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context that can be entered once more, even of the kind that can be entered only once."""
    recreate = getattr(context, "_recreate_cm", None)  # generators behind `contextlib.contextmanager`
    return recreate() if recreate is not None else context


def _keep_compiler_out() -> None:
    """Keep Dynamo from compiling the hooks when compiled code inside a region calls them."""
    for function in (Frame.hooks, Recomputation._usual_pack_hook, Recomputation._careful_pack_hook):
        for constant in function.__code__.co_consts:
            if isinstance(constant, CodeType):
                skip_code(constant)
    for method in (Frame._unpack, Frame._recompute_for, Frame._recompute, Recomputation.call, Recomputation.unpack):
        skip_code(method.__code__)


_keep_compiler_out()
