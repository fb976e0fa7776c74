"""A region's arguments between forward and recomputation, and the error if one was changed in the meantime."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat.eager.state.state import read_version, version_of
from remat.passes.torch_private import SavedTensor, make_saved_tensor, top_saved_tensors_hooks

from ..types import CheckpointError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class SavedArguments:
    """A region's arguments, with the versions of its tensors; hidden from an outer region if there is one."""

    __slots__ = ("_args", "_kwargs", "_versions")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if top_saved_tensors_hooks(True) is not None:  # an outer region, or a user's own hooks
            self._versions: list[int | None] | None = None
            self._args: tuple[Any, ...] = tuple([_pack_argument(value) for value in args])
            self._kwargs = {name: _pack_argument(value) for name, value in kwargs.items()}
            return
        self._args, self._kwargs = args, kwargs
        self._versions = self._read_versions()

    def _read_versions(self) -> list[int | None]:
        """Return the version of each argument, None for what is no tensor."""
        values = (*self._args, *self._kwargs.values()) if self._kwargs else self._args
        try:
            return list(map(read_version, values))  # tensors only, as mostly: the quickest way
        except (RuntimeError, AttributeError):
            return [version_of(value) if isinstance(value, Tensor) else None for value in values]

    def tensors(self) -> list[Tensor]:
        """Return those that are kept themselves, not by way of somebody's hooks, which may give out new ones."""
        return [value for value in (*self._args, *self._kwargs.values()) if isinstance(value, Tensor)]

    @property
    def num_positional(self) -> int:
        """How many of the arguments were passed by position."""
        return len(self._args)

    def keyword(self, position: int) -> str:
        """Return the name of a keyword argument."""
        return list(self._kwargs)[position]

    def unpack(self, name_of: Callable[[int], str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments; raise, naming it, if one was changed in place since the forward."""
        if self._versions is not None:
            now = self._read_versions()
            if now != self._versions:
                changed = (i for i, before in enumerate(self._versions) if now[i] != before)
                raise CheckpointError(changed_in_place(name_of(next(changed))))
            return self._args, self._kwargs
        values, index = [*self._args, *self._kwargs.values()], 0
        try:
            # Without functions of its own: what a region around has saved is recomputed from here, region by region.
            for index, value in enumerate(values):
                if type(value) is SavedTensor:
                    values[index] = value.unpack()
        except CheckpointError:
            raise
        except RuntimeError as error:  # torch's own version check knows no name
            if "modified by an inplace operation" not in str(error):
                raise
            raise CheckpointError(changed_in_place(name_of(index))) from error
        num_positional = len(self._args)
        return tuple(values[:num_positional]), dict(zip(self._kwargs, values[num_positional:], strict=True))


def _pack_argument(value: Any) -> Any:
    return make_saved_tensor(value, is_output=False) if isinstance(value, torch.Tensor) else value


def changed_in_place(name: str) -> str:
    """Return the message for a tensor that is no longer what the forward read."""
    return (
        f"{name} has been modified by an inplace operation between the forward of a checkpointed region "
        f"and its "
        "recomputation, which would give silently wrong gradients. Change it after backward, or give the "
        "region a "
        "clone of it."
    )


def argument_name(function: Any, index: int, arguments: SavedArguments) -> str:
    """Return the name a function gives to its index-th argument, or its position."""
    position = index - arguments.num_positional
    if position >= 0:
        return f"`{arguments.keyword(position)}`"
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        names = [p.name for p in inspect.signature(target).parameters.values() if p.kind in _POSITIONAL]
    except (TypeError, ValueError):
        names = []
    return f"`{names[index]}`" if index < len(names) else f"number {index}"
