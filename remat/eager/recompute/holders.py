"""Where recomputed values are put that autograd asks for: one holder for each tensor that a forward saved."""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any

import torch

from remat.eager.recompute.determinism import Metadata, default_metadata, describe_metadata

from ..types import CheckpointError, Segment


class Holder:
    """What autograd keeps in place of a tensor: room for its recomputed value, per backward pass.

    There is one per saved tensor, so making and filling one must be quick: slots, set by who makes it, and a dictionary
    only for the rare case of two backward passes at a time.
    """

    __slots__ = ("__weakref__", "others", "segment", "task", "value")

    others: dict[Any, Recomputed] | None
    """Values for other backward passes than `task`."""
    segment: Segment
    """Keeps alive what a policy saved before this point, and nothing saved after it; not set without a policy."""
    task: Any
    """The backward pass that `value` is for; None if there is none."""
    value: Recomputed | None

    def put(self, task: Any, value: Recomputed) -> None:
        """Keep a value for a backward pass."""
        if self.task is None or self.task == task:
            self.task, self.value = task, value
            return
        if self.others is None:
            self.others = {}
        self.others[task] = value

    def peek(self, task: Any) -> Recomputed | None:
        """Return the value for a backward pass, if there is one."""
        if self.task is not None and self.task == task:
            return self.value
        return self.others.get(task) if self.others is not None else None

    def take(self, task: Any) -> Recomputed | None:
        """Return the value for a backward pass, if there is one, and forget it."""
        if self.task is not None and self.task == task:
            value, self.task, self.value = self.value, None, None
            return value
        return self.others.pop(task, None) if self.others is not None else None


class Overwritten:
    """Stands where a recomputed value was that the region itself has changed in place since autograd saved it."""

    def __init__(self, label: str, tensor: torch.Tensor) -> None:
        self._label, self._what = label, describe_metadata(default_metadata(tensor))

    def refuse(self) -> CheckpointError:
        """Return the error for a backward that wants the value."""
        return CheckpointError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{self._label} saves a tensor for backward ({self._what}) and changes it in place afterwards. "
            "The same code fails without a region, too. Use the op that is not in place, or clone the tensor first."
        )


Recomputed = torch.Tensor | Overwritten

Save = tuple["weakref.ref[Holder]", CodeType, int, Metadata]
"""One tensor that autograd saved in forward: its holder, the code and instruction that saved it, what a check noted."""
