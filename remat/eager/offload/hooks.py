"""What autograd saves while a block runs, moved out of device memory until backward asks for it.

The hooks hand autograd a `Packed` for each tensor. What is moved is a copy, so it would survive a change in place of
the original; the program would still fail without offloading, so it fails with it: the version counter is watched
without keeping the memory that it belongs to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from remat.eager.offload.copies import Away, offload
from remat.passes.torch_private import DisableTorchDispatch, alias_of, skip_code

from ...passes.ops import goes_to_disk
from ..state import version_of
from ..types import CheckpointError, storage_id

_NUM_AHEAD = 2  # values that are brought back while the one before is in use


class Packed:
    """What autograd keeps in place of a tensor: the tensor itself, or what brings it back."""

    __slots__ = ("__weakref__", "_away", "_counter", "_number", "_shape", "_version", "_waiting")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape = tuple(tensor.shape)
        self._version = version_of(tensor)
        self._counter = tensor
        self._away: Away | None = None
        self._number = 0
        self._waiting: list[weakref.ref[Packed]] = []

    def move(self, folder: str | None, waiting: list[weakref.ref[Packed]]) -> None:
        """Let go of the tensor, which is copied elsewhere."""
        tensor = self._counter
        self._away = offload(tensor, folder)
        with DisableTorchDispatch():
            self._counter = alias_of(tensor)
            self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the counter alone is left
        self._number, self._waiting = len(waiting), waiting
        waiting.append(weakref.ref(self))

    def __iter__(self) -> Iterator[Any]:
        """Give device and host tensor, the pair that torch's own hooks pack: what looks into a graph expects it."""
        away = self._away
        yield from (self._counter.device, self._counter if away is None else away.host)

    def unpack(self) -> torch.Tensor:
        """Return the tensor as it was when it was saved; raise if it was changed in place since."""
        version = version_of(self._counter)
        if version != self._version:
            raise CheckpointError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {self._shape} was saved at version {self._version} and is at version {version} now. "
                "It fails alike without offloading. Use the op that is not in place, or clone the tensor first."
            )
        if self._away is None:
            return self._counter
        for reference in reversed(self._waiting[max(0, self._number - _NUM_AHEAD) : self._number]):
            earlier = reference()  # backward asks for the last one first
            if earlier is not None and earlier._away is not None:
                earlier._away.prefetch()
        return self._away.load()


class OffloadHooks(saved_tensors_hooks):
    """While this is entered, tensors that autograd saves wait in host memory or in a file; `kept` ones do not."""

    def __init__(self, kept: Iterable[torch.Tensor], folder: str | None) -> None:
        kept_storages = {storage_id(tensor) for tensor in kept}
        waiting: list[weakref.ref[Packed]] = []
        known: dict[int, _Known] = {}

        def pack(tensor: torch.Tensor) -> Packed:
            if not _is_movable(tensor, folder) or _is_parameter(tensor) or storage_id(tensor) in kept_storages:
                return Packed(_without_history(tensor))
            before = known.get(id(tensor))  # one tensor is often saved by several ops
            packed = None if before is None else before.packed_for(tensor)
            if packed is None:
                packed = Packed(tensor)
                known[id(tensor)] = _Known(tensor, packed)
                packed.move(folder, waiting)
            return packed

        super().__init__(pack, Packed.unpack)


class _Known:
    """A tensor that was packed before, known weakly."""

    __slots__ = ("_address", "_packed", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, packed: Packed) -> None:
        self._tensor, self._packed = weakref.ref(tensor), weakref.ref(packed)
        self._version, self._address = version_of(tensor), tensor.data_ptr()

    def packed_for(self, tensor: torch.Tensor) -> Packed | None:
        """What stands for a tensor if it is the very same one with the same content, and still needed."""
        is_same = self._tensor() is tensor and self._version == version_of(tensor)
        return self._packed() if is_same and self._address == tensor.data_ptr() else None


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias that does not lead to the node which saves the tensor: the two would keep each other alive."""
    if tensor.grad_fn is None:
        return tensor
    if type(tensor) is not torch.Tensor:
        return tensor.detach()
    with DisableTorchDispatch():
        return alias_of(tensor)


def _is_movable(tensor: torch.Tensor, folder: str | None) -> bool:
    """True for what another memory has room for: on the CPU only a file is another memory."""
    if folder is not None and goes_to_disk(tensor):
        return True
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.device.type not in ("cpu", "meta")


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _keep_compiler_out() -> None:
    """Keep Dynamo from compiling the hooks when compiled code inside the block calls them."""
    constants = OffloadHooks.__init__.__code__.co_consts
    for code in (Packed.unpack.__code__, *(c for c in constants if isinstance(c, CodeType))):
        skip_code(code)


_keep_compiler_out()
