"""What runs on this thread: the forward or the recomputation of a region, and how deep in recomputations it is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.eager.frames import Frame
    from remat.eager.saved import Store


class Execution:
    """A running forward or recomputation of a region on this thread."""

    __slots__ = ("frame", "mode", "num_children", "num_collectives", "replay", "task")

    def __init__(self, frame: Frame | None, replay: Store | None, task: Any = None) -> None:
        self.frame = frame
        self.replay = replay  # what the forward of this very call saved, when that forward is being run again
        self.task = task  # the backward pass that this is a recomputation for; None in a forward
        self.mode: Any = None
        self.num_children = 0
        self.num_collectives: dict[Any, int] | None = None  # seen so far, by op and module


class _Local(threading.local):
    execution: Execution | None = None
    recompute_depth: int = 0
    watched: list[Any] | None = None  # what a running recomputation has saved so far: tensor, its version then, holder


local = _Local()


def is_recomputing() -> bool:
    """True while a region's forward is being run again for backward, on this thread."""
    return local.recompute_depth > 0
