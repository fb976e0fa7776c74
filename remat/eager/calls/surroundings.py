"""What a forward must be run under once more to find all as it was: settings, state, a policy's mode, guards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from ..recompute import Forward
from ..state import (
    Copies,
    ReadGuard,
    RenormReplay,
    WatchedState,
    WriteGuard,
    changed_in_place,
    changed_twice,
    is_in_force,
    renormed_twice,
    replayed,
    restored,
)
from ..types import CheckpointError


def surroundings(forward: Forward, *, is_guarded: bool) -> tuple[list[AbstractContextManager[Any]], ReadGuard | None]:
    """Return the contexts, outermost first and usually none, and the guard among them that is shown what is saved."""
    found: list[AbstractContextManager[Any]] = []
    guard: ReadGuard | None = None
    if not is_in_force(forward.ambient):
        found.append(restored(forward.ambient))
    state = forward.state
    copies = state.buffers.copies() if state is not None and state.buffers is not None else []
    if is_guarded:
        found.append(_write_guard(forward, copies))
    if state is not None:
        if copies:
            found.append(replayed(copies))
        guard = _read_guard(forward, state)
        if guard is not None:
            found.append(guard)
        if state.renormed:
            found.append(RenormReplay(state.renormed, lambda what: f"{forward.label}: {renormed_twice(what)}"))
    own = context_of(forward)
    if own is not None:
        found.append(own)
    return found, guard


def context_of(forward: Forward) -> AbstractContextManager[Any] | None:
    """Return the context that belongs to the region itself: its policy's mode, or what `context_fn` has returned."""
    if forward.make_replayer is not None:
        return forward.make_replayer(forward.store)
    return None if forward.recompute_context is None else _fresh(forward.recompute_context)


def _write_guard(forward: Forward, copies: Copies) -> WriteGuard:
    outliving = forward.arguments.tensors() + (forward.state.tensors() if forward.state is not None else [])
    guard = WriteGuard(lambda what: changed_twice(forward.label, what), forward.rng, forward.label, outliving)
    allowed: Iterable[Any] = (copy for _, _, copy in copies)
    guard.allow(allowed)
    return guard


def _read_guard(forward: Forward, state: WatchedState) -> ReadGuard | None:
    """Return what raises where a tensor is read that is no longer what the forward read, if there is one."""
    replaced = state.replaced()
    if replaced is not None:
        raise CheckpointError(
            f"{forward.label}: {replaced} is another tensor than it was in forward, so the recomputation in backward "
            "would use the wrong one. torch.func.functional_call, for one, puts tensors into a module only while "
            "it is called: make the call itself a region, remat.checkpoint(functional_call, module, tensors, x)."
        )
    moved = state.moved()
    return ReadGuard(moved, lambda what: f"{forward.label}: {changed_in_place(what)}") if moved else None


def _fresh(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context that can be entered once more, even of the kind that can be entered only once."""
    recreate = getattr(context, "_recreate_cm", None)  # generators behind `contextlib.contextmanager`
    return recreate() if recreate is not None else context
