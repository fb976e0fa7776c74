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
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import is_grad_enabled

from remat.eager.calls.out_of_memory import advise
from remat.eager.calls.served import Served
from remat.eager.calls.surroundings import context_of, surroundings
from remat.eager.state import rng
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

from ..recompute import Forward, Holder, MetadataFunction, Overwritten, Recomputation, default_metadata, noted, settle
from ..state import SavedArguments, argument_name
from ..types import CheckpointError, Differs, Execution, RegionCall, Segment, all_of, local


class Frame(Forward):
    """One call of a region, from its forward until backward no longer needs it."""

    children: dict[int, weakref.ref[RegionCall]] | None = None  # inner regions, by number of their call
    on_error: Callable[[CheckpointError], CheckpointError] | None = None
    segment: Segment | None = None  # the newest part of what a policy saved, held only while forward runs
    tail: Segment | None = None

    def __init__(self, function: Any, name: str | None, early_stop: bool, check: MetadataFunction | None) -> None:
        super().__init__(function, name, early_stop, check)
        self._lock = threading.RLock()
        self._served = Served()

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
            metadata = default_metadata(tensor) if check is default_metadata else noted(check, tensor)
            add_save((ref(holder), caller.f_code, caller.f_lasti, metadata))
            return holder

        return pack, self._unpack

    def _unpack(self, holder: Holder) -> torch.Tensor:
        task: Any = current_graph_task_id()
        value = holder.take(task)
        if value is None:
            if get_eval_frame_callback() is not None:  # compiled autograd: what ran in forward must run alike
                return run_uncompiled(self._unpack, holder)  # type: ignore[no-any-return]
            group = get_graph_exec_group()
            task = task if group is None else group
            try:
                with self._lock:  # two threads of one backward may ask at once; the second finds the value
                    if holder.peek(task) is None:
                        self._served.refuse_second_time(task)
                        # Asked for from here, and not by a helper: in nested regions this makes the outer one
                        # recompute, for whose arguments the next one is asked, and each helper would be one more step
                        # on the stack.
                        given = self.arguments.unpack(self._argument_name)
                        self._recompute_for(task, holder, *given)
                    value = holder.take(task)
            except CheckpointError as error:
                if self.on_error is None:
                    raise
                raise self.on_error(error) from error
        if type(value) is Overwritten:
            raise value.refuse()
        assert value is not None, "a recomputation that ended well fills every living holder"
        return value  # type: ignore[return-value]

    def _recompute_for(self, task: Any, holder: Holder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        only = holder if task == -1 else None  # outside of backward nobody else's values are wanted
        if only is None and task in self._served:
            return  # an outer region, asked for these arguments, may have run this one again
        is_guarded, differs = self._needs_guard(), False
        try:
            self._recompute(task, only, args, kwargs, is_guarded)
        except Differs:
            if not is_guarded or self.store is not None:
                raise
            differs = True
        if differs:  # under a dispatch mode some ops are made of others: `ctc_loss`
            self._serve_children_again(task)
            self._recompute(task, only, args, kwargs, is_guarded=False)
        if is_guarded and self.clearance is not None and only is None:  # for one value, too little has been run
            self.clearance.give()
        if only is None:
            self._served.add(task)

    def _needs_guard(self) -> bool:
        """True for a recomputation that is to be watched for writes to what outlives it.

        Under a dispatch mode forward-mode derivatives are computed by other ops than in forward.
        """
        return self.clearance is not None and not self.clearance.is_given() and not is_in_forward_ad()

    def _serve_children_again(self, task: Any) -> None:
        """Have inner regions serve a backward pass once more, whose values of an earlier run have been dropped."""
        for reference in (self.children or {}).values():
            child = reference()
            if isinstance(child, Frame):
                child._served.discard(task)
                child._serve_children_again(task)

    def can_be_refilled(self, task: Any) -> bool:
        """True if a run inside the recomputation of an outer region can serve this one's backward."""
        if task == -1 or task in self._served:
            return False
        return any(reference() is not None for reference, *_ in self.saves)

    def refill(self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Execution) -> Any:
        """Run the region inside the recomputation of an outer one: fill the holders, return its result."""
        SavedArguments(args, kwargs)  # the outer region's forward saved them here too, and counted them
        run = Recomputation(self, outer.task, None, stops=False)
        local.execution = execution = Execution.again(self, outer.task, outer.watched)
        context = context_of(self)
        execution.mode = context if self.make_replayer is not None else None
        if outer.mode is not None:
            outer.mode.num_suspensions += 1
        push_saved_tensors_hooks(run.pack_hook(execution.watched), run.unpack)
        try:  # as `run.call`, without its step on Python's stack: regions nest
            with run.surroundings(context):
                out = self.function(*args, **kwargs)
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
        self._served.add(outer.task)
        _forget_leftovers(run, outer.task)
        return out

    def _recompute(
        self, task: Any, only: Holder | None, args: tuple[Any, ...], kwargs: dict[str, Any], is_guarded: bool
    ) -> None:
        """Run the forward again and put what it saves into the holders, or into one of them."""
        around, guard = surroundings(self, is_guarded=is_guarded)
        run = Recomputation(self, task, only, guard=guard)
        had_grad, outer = is_grad_enabled(), local.execution
        random_state = rng.swap_in(self.rng) if self.rng is not None else None
        watched: list[Any] = []
        local.execution = execution = Execution.again(self, task, watched)
        set_grad_enabled(True)
        try:
            if around:
                execution.mode = around[-1] if self.make_replayer is not None else None
                with around[0] if len(around) == 1 else all_of(around):
                    run.call(args, kwargs, watched)
            else:
                run.call(args, kwargs, watched)
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

    def _argument_name(self, index: int) -> str:
        """Name the index-th argument (positional, then keyword) as the function's signature does."""
        return f"argument {argument_name(self.function, index, self.arguments)} of {self.label}"


def _forget_leftovers(run: Recomputation, task: Any) -> None:
    """See to it that values do not stay which this backward leaves lying, if nothing else takes them away."""
    if type(task) is int and task != -1 and (current_graph_task_keeps_graph() or not is_full_backward()):
        run.forget_after_backward()


def _keep_compiler_out() -> None:
    """Keep Dynamo from compiling the hooks when compiled code inside a region calls them."""
    for function in (Frame.hooks, Recomputation.pack_hook):
        for constant in function.__code__.co_consts:
            if isinstance(constant, CodeType):
                skip_code(constant)
    for method in (Frame._unpack, Frame._recompute_for, Frame._recompute, Recomputation.call, Recomputation.unpack):
        skip_code(method.__code__)


_keep_compiler_out()
