"""What runs on this thread: the forward or the recomputation of a region, and how deep in recomputations it is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.eager.frames import Frame
    from remat.eager.saved import Store


class Execution:
    """A running forward or recomputation of a region on this thread."""

    __slots__ = ("frame", "is_recomputing", "mode", "num_children", "num_collectives", "replay", "task", "watched")

    def __init__(self, frame: Frame | None, outer: Execution | None, task: Any = None) -> None:
        self.frame = frame
        self.replay: Store | None = None  # what the forward of this very call saved, when that is being run again
        self.task = task  # the backward pass that this is a recomputation for; None in a forward
        self.mode: Any = None
        self.num_children = 0
        self.num_collectives: dict[Any, int] | None = None  # seen so far, by op and module
        self.is_recomputing: bool = task is not None or (outer is not None and outer.is_recomputing)
        self.watched: list[Any] = []  # what a recomputation has saved so far: tensor, its version then, holder


class _Local(threading.local):
    execution: Execution | None = None
    reentrant_depth: int = 0  # recomputations of the reentrant kind, which are no executions


local = _Local()


def is_recomputing() -> bool:
    """True while a region's forward is being run again for backward, on this thread."""
    execution = local.execution
    return local.reentrant_depth > 0 or (execution is not None and execution.is_recomputing)
