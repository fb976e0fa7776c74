"""What one forward of a region saved, in a chain of segments that lives as long as somebody can ask for it.

A holder that autograd owns keeps alive what was saved before it, so every value dies as soon as no living part of the
graph can ask for a recomputation that passes it, and lives as long as one can, however many backwards there are.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

OpKey = tuple[Any, int]
"""An op, and how often it ran before in the same forward."""


class SavedValue(Protocol):
    """What an op returned, wherever it waits."""

    @property
    def is_changed(self) -> bool:
        """True if the value, kept without a copy, was changed in place."""

    def before_mutation(self, storages: set[int]) -> None:
        """Be told that storages are about to be changed."""

    def take(self) -> Any:
        """Return the value as the op would have returned it."""


class RandomState(Protocol):
    """The state of a generator at one moment."""

    def restore(self) -> None:
        """Let the next draw start from here."""


class Store:
    """What one forward of a region saved: counts for matching, values known weakly."""

    __slots__ = (
        "children",
        "counts",
        "entries",
        "has_offloaded",
        "kept",
        "rng_after",
        "rng_before_children",
        "rng_states",
    )

    def __init__(self) -> None:
        self.counts: defaultdict[Any, int] = defaultdict(int)
        self.entries: dict[OpKey, weakref.ref[SavedValue]] = {}
        self.rng_states: dict[OpKey, RandomState] = {}
        self.kept: set[Any] = set()  # ops of which something is in one of the two, in some call
        self.has_offloaded = False
        self.rng_after: Sequence[RandomState] = ()
        self.rng_before_children: dict[int, Sequence[RandomState]] = {}
        self.children: dict[int, weakref.ref[Segment]] = {}

    def entry(self, key: OpKey) -> SavedValue | None:
        """Return what was saved of one call of an op, if anything was and is still there."""
        reference = self.entries.get(key)
        return reference() if reference is not None else None

    def restore_rng_after(self) -> None:
        """Leave the random state as the forward did, though saved random ops were not drawn again."""
        for state in self.rng_after:
            state.restore()


class Segment:
    """A part of what a forward saved, with all parts before it."""

    __slots__ = ("__weakref__", "is_taken", "items", "previous", "store")

    def __init__(self, previous: Segment | None, store: Store) -> None:
        self.previous = previous
        self.store = store
        self.items: list[Any] = []
        self.is_taken = False  # by a holder; what is saved from now on must not live as long as that


class Sink(Protocol):
    """Where values are put that a running forward keeps: a frame, or a stand-in when no frame of ours is there."""

    segment: Segment | None
    store: Store | None


def open_segment(sink: Sink) -> Segment:
    """Return the segment that new values go to."""
    if sink.store is None:
        sink.store = Store()
    segment = sink.segment
    if segment is None or segment.is_taken:
        segment = sink.segment = Segment(segment, sink.store)
    return segment


def adopt_child(sink: Sink, index: int, child: Segment) -> None:
    """Keep what an inner region saved as long as the outer one may be run again past it."""
    segment = open_segment(sink)
    segment.items.append(child)
    assert sink.store is not None
    sink.store.children[index] = weakref.ref(child)
