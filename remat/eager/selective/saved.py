"""What a policy saved of one op: its result, or a copy of it elsewhere, and how an op is answered from that."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from remat.passes.torch_private import alias_of, completed_work, tree_leaves, tree_map

from ..offload import Away, offload
from ..state import version_of
from ..types import CheckpointError, OpFacts, SavedValue, storage_id


class OnMutation(Enum):
    """What to do when a value that was saved is changed in place."""

    COPY = "keep a copy of the value from before"
    RAISE = "raise when the value is needed"
    ALLOW = "hand out the changed value"


class Entry:
    """One op's saved output, as aliases without history: the real tensors would tie the graph into a knot."""

    __slots__ = ("__weakref__", "_is_copy", "_on_mutation", "_value", "_versions")

    def __init__(self, value: Any, on_mutation: OnMutation, is_written: bool = False, is_pending: bool = False) -> None:
        self._on_mutation = on_mutation
        if type(value) is torch.Tensor and not is_written:
            self._is_copy = False
            self._value: Any = alias_of(value)
            self._versions = [version_of(value)]
            return
        # What an in-place op wrote to may be anything, a buffer say, that others write to later. What a collective is
        # still writing to cannot be copied yet.
        self._is_copy = is_written and not is_pending and on_mutation is OnMutation.COPY
        self._value = map_tensors(torch.clone if self._is_copy else alias_of, value)
        # An in-place op's own change is counted only after the mode has returned its output.
        self._versions = [version_of(t) + is_written for t in tensors_of(self._value)]

    @property
    def val(self) -> Any:
        """The value itself."""
        return self._value

    @property
    def is_changed(self) -> bool:
        """True if the value, kept without a copy, was changed in place."""
        pairs = zip(tensors_of(self._value), self._versions, strict=True)
        return not self._is_copy and any(version_of(tensor) > version for tensor, version in pairs)

    def before_mutation(self, storages: set[int]) -> None:
        """Take a copy if one of the storages is about to be changed."""
        if self._on_mutation is OnMutation.COPY and not self._is_copy:
            tensors = tensors_of(self._value)
            if any(storage_id(t) in storages for t in tensors):
                self._value = map_tensors(torch.clone, self._value)
                self._is_copy = True

    def take(self) -> Any:
        """Return the value as the op would have returned it: new tensors without history."""
        value = self._value
        if type(value) is torch.Tensor and not self._is_copy and version_of(value) <= self._versions[0]:
            return value.detach()
        if self._is_copy:
            return map_tensors(torch.clone, value)  # the op after it will change it again
        if self._on_mutation is not OnMutation.ALLOW:
            for tensor, version in zip(tensors_of(self._value), self._versions, strict=True):
                if version_of(tensor) > version:
                    raise CheckpointError(
                        "Tensor cached during selective activation checkpoint has been mutated: its shape is "
                        f"{tuple(tensor.shape)}. Save the value before the in-place op changes it by other "
                        f"means, "
                        "let the policy recompute it, or use a region's own `policy=`, which keeps a copy."
                    )
        return map_tensors(torch.Tensor.detach, self._value)


class OffloadedEntry:
    """One op's output, kept in host memory or in a file in a folder."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: Any, folder: str | None = None) -> None:
        self._value = map_tensors(lambda tensor: offload(tensor, folder), value)

    is_changed = False

    @property
    def val(self) -> Any:
        """The value, brought back."""
        return self.take()

    def before_mutation(self, storages: set[int]) -> None:
        """Do nothing: this is a copy anyway."""

    def take(self) -> Any:
        """Bring the value back to its device."""
        return tree_map(lambda x: x.load() if isinstance(x, Away) else x, self._value)

    def prefetch(self) -> None:
        """Start bringing the value back, where that can overlap with other work."""
        for leaf in tree_leaves(self._value):
            if isinstance(leaf, Away):
                leaf.prefetch()


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor of a pytree."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return every tensor of a pytree."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Handle:
    """Stands for the handle of a collective, which keeps its tensors alive and may not be waited for twice."""


def without_handles(value: Any) -> Any:
    """Leave the handles out of what a collective returned."""
    return tree_map(lambda x: _Handle() if isinstance(x, torch.ScriptObject) else x, value)


def answer(facts: OpFacts, args: Any, entry: SavedValue) -> Any:
    """Return what an op returned in forward, and give its arguments what it wrote to them."""
    value = entry.take()
    if facts.is_pending:
        value = tree_map(lambda x: completed_work() if isinstance(x, _Handle) else x, value)
    return _write_again(facts, args, value) if facts.mutates else value


def _write_again(facts: OpFacts, args: Any, value: Any) -> Any:
    """Give an op's arguments what the op wrote to them in forward, and return what it returned."""
    if facts.updates_in_place:
        return args[0].copy_(value)
    written, out = value
    targets = [t for i in facts.mutates if i < len(args) for t in tensors_of(args[i])]
    with torch.no_grad():
        for target, source in zip(targets, tensors_of(written), strict=True):
            target.copy_(source)
    # Tensors that such an op returns are those that it wrote to, in their order.
    return_values = iter(targets)
    return map_tensors(lambda tensor: next(return_values, tensor), out)
