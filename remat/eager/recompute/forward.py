"""One call of a region as its forward leaves it: what must be known to run it again, and to speak of it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from remat.eager.recompute.determinism import MetadataFunction
from remat.eager.recompute.holders import Save

from ..selective import Replayer
from ..state import Ambient, Clearance, Reached, RngSnapshot, SavedArguments, WatchedState, name_text
from ..types import Store


class Forward:
    """What a forward saved, and how a recomputation is to be run and compared with it."""

    # What most calls have nothing of is said once, for the class: setting it up in every call takes time.
    ambient: Ambient
    arguments: SavedArguments
    clearance: Clearance | None = None
    copies_by_op = False  # cut recomputed tensors off their history by an op, which costs more
    forward_done = False
    make_replayer: type[Replayer] | None = None  # in a region with a policy
    outer_names: tuple[str, ...] = ()  # of the regions around this call
    policy: Any = None
    recompute_context: AbstractContextManager[Any] | None = None
    rng: RngSnapshot | None = None
    state: WatchedState | None = None
    store: Store | None = None  # what a policy saved, known weakly
    training: Sequence[tuple[Any, weakref.ref[Any], bool]] = ()

    def __init__(self, function: Any, name: str | None, early_stop: bool, check: MetadataFunction | None) -> None:
        self.function = function
        self.name = name
        self.early_stop = early_stop
        self.check = check
        self.saves: list[Save] = []

    @property
    def label(self) -> str:
        """Name the region for a message, with the regions around it."""
        return f"region {'/'.join(self.names)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the regions around this one, and its own."""
        name = self.name or getattr(self.function, "__qualname__", None) or type(self.function).__name__
        return (*self.outer_names, name)

    def note_training(self, reached: Reached) -> None:
        """Remember whether the modules at the top were in train mode, for an error's guess at the cause."""
        self.training = [(name, weakref.ref(m), m.training) for name, m in reached.modules]

    def training_then_and_now(self) -> list[tuple[str, bool, bool]]:
        """Return the modules at the top, and whether they were and are in train mode."""
        found = [(name, module(), before) for name, module, before in self.training]
        return [(name_text(n), before, module.training) for n, module, before in found if module is not None]

    def forget(self, task: Any) -> None:
        """Drop what was recomputed for a backward pass."""
        for reference, *_ in self.saves:
            holder = reference()
            if holder is not None:
                holder.take(task)
