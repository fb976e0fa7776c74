"""What one forward keeps for its recomputation: put into the store of its frame, and taken out of it again."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from remat.eager.selective.saved import Entry, OffloadedEntry, OnMutation, tensors_of, without_handles
from remat.passes.torch_private import tree_leaves, wait_for

from ..state import OpRngState, RngSnapshot
from ..types import OpFacts, OpKey, SavedValue, Segment, Sink, Store, known_facts, open_segment, storage_id


class RegionSink(Sink, Protocol):
    """A sink of which the random state is known that a recomputation starts from."""

    rng: RngSnapshot | None
    """None where a recomputation draws on from where it begins."""

    @property
    def label(self) -> str:
        """The region's name for messages; empty if it has none."""


class LooseSink:
    """A sink of its own, for contexts that are entered by somebody else's checkpoint."""

    __slots__ = ("rng", "segment", "store")
    label = ""

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.store: Store | None = None
        self.rng: RngSnapshot | None = None  # somebody else keeps it


class Keeper:
    """Keeps results of ops, and where random ops start that a recomputation may not come to by itself."""

    __slots__ = (
        "_folder",
        "_may_drop",
        "_on_mutation",
        "_ran_a_random_op",
        "_saved_a_random_op",
        "_sink",
        "_views",
        "store",
    )

    def __init__(self, sink: RegionSink, on_mutation: OnMutation, folder: str | None, *, may_drop: bool) -> None:
        self._sink, self._on_mutation, self._folder = sink, on_mutation, folder
        self._may_drop = may_drop  # what was kept may be dropped later, and the other way round
        self._ran_a_random_op = self._saved_a_random_op = False
        self._views: dict[int, list[OpKey]] = {}  # kept ones, by the memory that they show
        store = sink.store
        if store is None:
            store = sink.store = Store()
        self.store = store

    # ------------------------------------------------------------------------------------------------- results

    def keep(self, key: OpKey, facts: OpFacts, out: Any, args: Any, *, is_offloaded: bool) -> None:
        """Keep what an op has returned or written."""
        if facts.mutates and not facts.updates_in_place:
            out = ([args[i] for i in facts.mutates if i < len(args)], out)
        if facts.is_pending:
            if "reduce_scatter" in facts.op._schema.name:
                _wait_for_handles(out)  # gloo writes the result in the wait, by ops that a recomputation does not run
            out = without_handles(out)
        if is_offloaded and not facts.is_pending:
            self._add(key, OffloadedEntry(out, self._folder), out)
        else:
            self._add(key, Entry(out, self._on_mutation, facts.updates_in_place, facts.is_pending), out)
        self._saved_a_random_op |= facts.is_random

    def keep_plain(self, key: OpKey, out: Any) -> None:
        """Keep the result of an op that needs no care."""
        self._add(key, Entry(out, self._on_mutation), out)

    def keep_instead(self, key: OpKey, facts: OpFacts, out: Any, *, is_offloaded: bool) -> None:
        """Keep a value as the result of an op that has run before, whatever was kept of it until now."""
        self.drop(key)
        is_copied = bool(facts.mutates) and self._on_mutation is OnMutation.COPY
        entry = OffloadedEntry(out, self._folder) if is_offloaded else Entry(out, self._on_mutation, is_copied)
        self._add(key, entry, out)
        self._saved_a_random_op |= facts.is_random

    def _add(self, key: OpKey, entry: SavedValue, out: Any) -> None:
        segment = self._sink.segment
        if segment is None or segment.is_taken:
            segment = open_segment(self._sink)
        segment.items.append(entry)
        store = self.store
        store.entries[key] = weakref.ref(entry)
        store.kept.add(key[0])
        if type(entry) is OffloadedEntry:
            store.has_offloaded = True
        facts = known_facts.get(key[0])
        if facts is not None and facts.is_view:
            for tensor in tensors_of(out):
                self._views.setdefault(storage_id(tensor), []).append(key)

    def drop(self, key: OpKey) -> None:
        """Keep an op's result no longer."""
        entry = self.store.entry(key)
        self.store.entries.pop(key, None)
        segment = self._sink.segment
        while entry is not None and segment is not None:
            if any(item is entry for item in segment.items):
                segment.items = [item for item in segment.items if item is not entry]
                return
            segment = segment.previous

    def before_mutation(self, facts: OpFacts, args: Any) -> None:
        """See to it that an op in place changes nothing that is kept."""
        if not self.store.entries:
            return
        storages = {storage_id(t) for i in facts.mutates if i < len(args) for t in tensors_of(args[i])}
        for storage in storages & self._views.keys():
            for key in self._views.pop(storage):
                self.drop(key)  # a copy would not show the change, nor pass on one that is made through it
        for reference in self.store.entries.values():
            entry = reference()
            if entry is not None:
                entry.before_mutation(storages)

    # -------------------------------------------------------------------------------------------- random numbers

    @property
    def _may_skip_draws(self) -> bool:
        """True if the replay of what ran so far may draw fewer random numbers; a name may have an op kept later."""
        return self._saved_a_random_op or (self._ran_a_random_op and self._may_drop)

    def before_random(self, args: Any, kwargs: dict[str, Any]) -> OpRngState | None:
        """Return where a random op starts, if replaying the ops before it will not lead there."""
        generator, snapshot = kwargs.get("generator"), self._sink.rng
        if generator is not None and snapshot is not None:
            snapshot.add_generator(generator)
        may_skip, self._ran_a_random_op = self._may_skip_draws, True
        if not may_skip or (snapshot is None and type(self._sink) is not LooseSink):
            return None
        if generator is not None:
            return OpRngState.capture_generator(generator)
        return OpRngState.capture(_device_of(args, kwargs))

    def keep_rng_state(self, key: OpKey, state: OpRngState | None, *, is_recomputed: bool) -> None:
        """Keep where a random op started that will, or may after all, be run again."""
        if state is not None and (is_recomputed or self._may_drop):
            self.store.rng_states[key] = state
            self.store.kept.add(key[0])

    def before_child(self, number: int) -> None:
        """Note where an inner region starts to draw, if replaying the ops before it will not lead there."""
        if self._may_skip_draws:
            self.store.rng_before_children[number] = self._rng_now()

    def after(self) -> None:
        """Note the random state at the end, if replaying this forward will not lead there."""
        if self._saved_a_random_op:
            self.store.rng_after = self._rng_now()

    def _rng_now(self) -> list[OpRngState]:
        """Return the state of the generators that a replay of this region puts back; of none if it does not."""
        snapshot = self._sink.rng
        if snapshot is None:
            return []
        devices = [torch.device("cpu"), *(device for device, _ in snapshot.devices)]
        generators = [OpRngState.capture_generator(g) for g, _ in snapshot.generators]
        return [OpRngState.capture(device) for device in devices] + generators


def _wait_for_handles(out: Any) -> None:
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.ScriptObject):
            wait_for(leaf)


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    tensors = tensors_of((args, kwargs))
    device = kwargs.get("device")
    return tensors[0].device if tensors else torch.device(device if device is not None else "cpu")
