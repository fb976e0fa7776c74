"""What runs on this thread: the forward or the recomputation of a region, and how deep in recomputations it is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from remat.eager.types.store import Sink, Store


class RegionCall(Sink, Protocol):
    """One call of a region, as far as others know it."""

    children: dict[int, weakref.ref[RegionCall]] | None
    """Inner regions, by number of their call."""

    @property
    def label(self) -> str:
        """The region's name for a message, with the regions around it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the regions around this one, and its own."""

    def can_be_refilled(self, task: Any) -> bool:
        """True if a run inside the recomputation of an outer region can serve this one's backward."""

    def refill(self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: Execution) -> Any:
        """Run the region inside the recomputation of an outer one; return its result."""


class Execution:
    """A running forward or recomputation of a region on this thread."""

    # What most have nothing of is said once, for the class: setting it up for each takes time.
    frame: RegionCall | None
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

    def __init__(self, frame: RegionCall, outer: Execution | None) -> None:
        self.frame = frame
        if outer is not None and outer.is_recomputing:
            self.is_recomputing = True

    @staticmethod
    def again(frame: RegionCall, task: Any, watched: list[Any]) -> Execution:
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
