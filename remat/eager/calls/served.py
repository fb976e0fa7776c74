"""For which backward passes a call of a region has been recomputed: for each of them once."""

from __future__ import annotations

import weakref
from typing import Any

from ..types import CheckpointError

_MAX_TASKS = 15  # backward passes that are remembered besides the newest
_UNPACKED_TWICE = "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once."


class Served:
    """Backward passes, and groups of them that share one recomputation."""

    __slots__ = ("_groups", "_tasks")

    def __init__(self) -> None:
        self._tasks: tuple[int, ...] = ()
        self._groups: weakref.WeakSet[Any] | None = None

    def __contains__(self, task: Any) -> bool:
        return task in self._tasks or (self._groups is not None and task in self._groups)

    def add(self, task: Any) -> None:
        """Remember that the holders were filled for a backward pass."""
        if type(task) is int:
            self._tasks = (*self._tasks[-_MAX_TASKS:], task) if self._tasks else (task,)
        else:
            if self._groups is None:
                self._groups = weakref.WeakSet()
            self._groups.add(task)

    def discard(self, task: Any) -> None:
        """Serve a backward pass once more, whose values have been dropped."""
        self._tasks = tuple([done for done in self._tasks if done != task])
        if self._groups is not None:
            self._groups.discard(task)

    def refuse_second_time(self, task: Any) -> None:
        """Raise if the values for a backward pass were recomputed once and have been taken."""
        if task in self._tasks:
            raise CheckpointError(f"{_UNPACKED_TWICE} Read ctx.saved_tensors once in backward, and keep them.")
        if task in self:
            raise CheckpointError(
                f"{_UNPACKED_TWICE} Performing two backward calls that overlap is refused inside a GraphExecGroup, "
                "whose backwards share one recomputation of each activation. Run the second one outside of the group, "
                "or in its own."
            )
