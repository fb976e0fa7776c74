"""Collectives inside regions: they run once, in forward; a recomputation is given what they returned then.

A recomputation that communicates must do so on all ranks and in the same order, which nobody can promise: how far
a region is run again depends on what backward asks for on that rank. So their results are kept, as in compiled
code. A region with a policy sees them in its dispatch mode (`recorder`); one without has no mode, and watches
nothing but collectives, by a dispatch key of their own.

What FSDP does in its hooks is left alone, collectives included (`hooks`).
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from remat.passes.torch_private import (
    TorchDispatchMode,
    has_process_group,
    is_faking,
    unwatched_collectives,
    wait_for,
    watch_collectives,
    watched_collectives,
)

from ...passes.ops import COLLECTIVE_NAMESPACES, facts_of
from ..selective import Entry, OnMutation, answer, tensors_of, without_handles
from ..types import Execution, OpFacts, calling_module, is_called_by_fsdp, local, op_facts, open_segment


def may_run() -> bool:
    """True if there is anybody to communicate with."""
    return has_process_group() and not is_faking()


_is_watching = False
_lock = threading.Lock()


def watched() -> AbstractContextManager[Any]:
    """Keep the results of collectives in the running forward, or answer from what is kept in a recomputation."""
    if not _is_watching:
        _start_watching()
    return watched_collectives()


def _start_watching() -> None:
    global _is_watching
    with _lock:
        if not _is_watching:
            watch_collectives(COLLECTIVE_NAMESPACES, _on_collective)
            _is_watching = True


def _on_collective(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective that a region without a policy calls, or answer it."""
    execution = local.execution
    with unwatched_collectives():
        is_ours = execution is not None and execution.mode is None and execution.frame is not None
        if not is_ours or facts_of(op).is_wait or is_faking() or is_called_by_fsdp():
            return op(*args, **kwargs)
        assert execution is not None
        with _OneCollective(execution):  # below autograd, which records the call in either case
            return op(*args, **kwargs)


class _OneCollective(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around one call of a collective: keep what it returns, or return what was kept."""

    def __init__(self, execution: Execution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._execution = execution

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper that keeps compilers out of a mode: nothing is compiled in here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run or answer one op.

        What was kept without a copy and changed since is communicated once more, on all ranks alike.
        """
        kwargs = kwargs or {}
        facts = op_facts(func)
        if not facts.is_pending:
            return func(*args, **kwargs)
        key = _next_key(self._execution, func)
        replay = self._execution.replay
        entry = replay.entry(key) if replay is not None else None
        if entry is not None and not entry.is_changed:
            return answer(facts, args, entry)
        out = func(*args, **kwargs)
        if self._execution.task is None and replay is None:
            _keep(self._execution, key, facts, args, out)
        return out


def _next_key(execution: Execution, func: Any) -> Any:
    """Tell one collective of a region from another: by op, by the module that calls it, and by number."""
    caller = (id(func), calling_module())
    counts = execution.num_collectives = execution.num_collectives or {}
    number = counts[caller] = counts.get(caller, -1) + 1
    return caller, number


def _keep(execution: Execution, key: Any, facts: OpFacts, args: Any, out: Any) -> None:
    """Keep a result for the recomputation."""
    assert execution.frame is not None
    entry = _entry(facts, args, out)
    segment = open_segment(execution.frame)
    segment.items.append(entry)
    segment.store.entries[key] = weakref.ref(entry)


def _entry(facts: OpFacts, args: Any, out: Any) -> Entry:
    """Copy a result, since the program may go on to change it in place, where nobody sees that.

    That takes waiting for it. Where the program itself does not wait, as with messages that ranks send each other
    crosswise, it is kept without a copy: whether it was changed is seen by its version when it is needed.
    """
    if not facts.mutates or facts.updates_in_place:
        for tensor in tensors_of(out):
            torch.ops._c10d_functional.wait_tensor(tensor)
        return Entry(without_handles(out), OnMutation.COPY, is_written=True)
    kept = ([args[i] for i in facts.mutates if i < len(args)], without_handles(out))
    if not _is_waited_for(facts.op, args):
        return Entry(kept, OnMutation.RAISE)
    for part in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(part, torch.ScriptObject):
            wait_for(part)
    return Entry(kept, OnMutation.COPY, is_written=True)


def _is_waited_for(op: Any, args: Any) -> bool:
    """True for a collective in place whose caller waits for it at once."""
    names = [argument.name for argument in op._schema.arguments]
    position = names.index("async_op") if "async_op" in names else len(args)
    return position < len(args) and not args[position]
