"""The recomputation of a selective region: ops that its forward kept are answered, the others run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from remat.eager.selective.recorder import Recorder
from remat.eager.selective.saved import OffloadedEntry, answer

from ...passes.shared import current_module_path, running_line
from ..types import (
    CAST,
    SAC_IGNORED_OPS,
    CheckpointError,
    EngineMode,
    Store,
    is_cached_cast,
    is_called_by_fsdp,
    local,
    may_be_sharded,
    op_facts,
    op_key,
)

_CAST = id(CAST)


class Replayer(EngineMode):  # type: ignore[no-untyped-call]
    """Answer the ops of a recomputation from what their forward kept, and run the others."""

    def __init__(self, store: Store | None, owner: Recorder | None = None) -> None:
        self._owner = owner  # keeps the values alive where no frame does
        if owner is None:
            self._use(store if store is not None else Store())

    def _use(self, store: Store) -> None:
        self.has_fsdp = may_be_sharded()
        self._store = store
        self._counts: dict[Any, int] = defaultdict(int)
        # Ops of which nothing was kept need only be counted; casts of weights are not even that.
        self._kept = kept = store.kept
        self._limits = limits = store.counts.copy()
        for key in kept:
            limits.pop(key, None)
        if _CAST in store.counts:
            limits.pop(_CAST, None)
            self._kept = kept - {_CAST}

    def __enter__(self) -> Replayer:
        if self._owner is not None:
            self._use(self._owner.store)
        if self._store.has_offloaded:
            self._prefetch()
        super().__enter__()
        return self

    def _prefetch(self) -> None:
        for reference in self._store.entries.values():
            entry = reference()
            if isinstance(entry, OffloadedEntry):
                entry.prefetch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op of the recomputation, or return what its forward returned."""
        if self.has_fsdp and is_called_by_fsdp():
            return func(*args, **kwargs) if kwargs else func(*args)
        key: Any = id(func)
        if not self.num_suspensions:
            limit = self._limits.get(key)
            if limit:
                self._limits[key] = limit - 1
                return func._op(*args, **kwargs) if kwargs else func._op(*args)
            if key in self._kept:
                return self._answer(func, key, args, kwargs)
        if self.num_suspensions or func in SAC_IGNORED_OPS or is_cached_cast(func, args):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._answer(func, op_key(func, args), args, kwargs)

    def _answer(self, func: Any, key: Any, args: Any, kwargs: Any) -> Any:
        """Return what this call of an op returned in forward, or run it if that was not kept."""
        store = self._store
        number = self._counts[key]
        self._counts[key] = number + 1
        entry = store.entry((key, number))
        if entry is not None:
            facts = op_facts(func)
            return entry.take() if facts.is_plain else answer(facts, args, entry)
        if key in self._limits or number >= store.counts.get(key, 0):
            self._raise_surplus(func, key)
        state = store.rng_states.get((key, number))
        if state is not None:
            state.restore()
        return func(*args, **kwargs) if kwargs else func(*args)

    def _raise_surplus(self, func: Any, key: Any) -> None:
        """Raise for an op that the forward did not run."""
        count = self._store.counts.get(key, 0)
        running = local.execution
        frame = running.frame if running is not None else None
        region = frame.label if frame is not None else "this region"
        path = current_module_path()
        what = f"{func} invocation index {count}" if count else f"{func}"
        raise CheckpointError(
            f"{what} encountered during backward but not found in storage: the forward of {region} ran it "
            f"{count} time(s), and the recomputation runs it once more, {running_line()}"
            f"{f' in module {path}' if path else ''}. Likely cause: a cache that grew, control flow on data, "
            "train and eval mode, or other state that changed in between."
        )
