"""What runs on this thread: the forward or the recomputation of a region, and how deep in recomputations it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.eager.recompute.frames import Frame
    from remat.eager.selective.saved import Store


class Execution:
    """A running forward or recomputation of a region on this thread."""

    # What most have nothing of is said once, for the class: setting it up for each takes time.
    frame: Frame | None
    is_recomputing = False
    mode: Any = None
    num_children = 0
    num_collectives: dict[Any, int] | None = None
    """Seen so far, by op and module."""
    replay: Store | None = None
    """What the forward of this very call saved, when that is being run again."""
    task: Any = None
    """The backward pass that this is a recomputation for; None in a forward."""
    watched: list[Any]
    """What a recomputation has saved so far: tensor, its version then, holder."""

    def __init__(self, frame: Frame, outer: Execution | None) -> None:
        self.frame = frame
        if outer is not None and outer.is_recomputing:
            self.is_recomputing = True

    @staticmethod
    def again(frame: Frame, task: Any, watched: list[Any]) -> Execution:
        """Return one for a recomputation of a frame."""
        execution = Execution(frame, None)
        execution.is_recomputing, execution.task, execution.watched = True, task, watched
        execution.replay = frame.store
        return execution


class _Local(threading.local):
    execution: Execution | None = None
    reentrant_depth: int = 0  # recomputations of the reentrant kind, which are no executions


local = _Local()


def is_recomputing() -> bool:
    """True while a region's forward is being run again for backward, on this thread."""
    execution = local.execution
    return local.reentrant_depth > 0 or (execution is not None and execution.is_recomputing)


def is_in_region() -> bool:
    """True while a region runs on this thread, for the first time or again."""
    return local.reentrant_depth > 0 or local.execution is not None


@contextmanager
def all_of(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    """Run a block under several contexts, the first one outermost."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
