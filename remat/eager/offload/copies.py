"""Values that wait for backward outside of their device's memory: in host memory, or in a file.

With an accelerator the copy to the host goes to pinned memory on a stream of its own, in the order of the forward, and
comes back ahead of its use. On the CPU there is nothing to overlap, and it is a plain copy. Files are for people whose
host memory is short; they are written at once and read through the system's own cache.
"""

from __future__ import annotations

from typing import Any

import torch

from remat.passes.torch_private import DisableTorchDispatch

from ...passes.ops import DiskTensor, copied_alike, goes_to_disk

_COPIED_PLAINLY = ("cpu", "meta")
"""Devices without streams; tensors on `meta` have no memory to move."""

_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    """Return the stream on which all copies of one device run, one after the other."""
    if device not in _streams:
        _streams[device] = torch.Stream(device=device)
    return _streams[device]


class Offloaded:
    """One tensor in host memory."""

    __slots__ = ("__weakref__", "_device", "_host", "_is_ready", "_loaded")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        self._loaded: torch.Tensor | None = None
        self._is_ready: Any = None
        if tensor.device.type in _COPIED_PLAINLY:
            self._host = copied_alike(tensor.detach())
        else:
            self._host = self._copy_out(tensor.detach())

    def _copy_out(self, tensor: torch.Tensor) -> torch.Tensor:
        stream, current = _stream(tensor.device), torch.accelerator.current_stream(tensor.device)
        stream.wait_stream(current)
        with stream:
            host = copied_alike(tensor, _to_pinned)
        tensor.record_stream(stream)
        return host

    @property
    def host(self) -> torch.Tensor:
        """The tensor where it waits."""
        return self._host

    def prefetch(self) -> None:
        """Start copying back, in the order in which this is asked."""
        if self._device.type in _COPIED_PLAINLY or self._loaded is not None:
            return
        stream = _stream(self._device)
        with stream:
            self._loaded = copied_alike(self._host, lambda host: host.to(self._device, non_blocking=True))
            self._is_ready = stream.record_event()

    def load(self) -> torch.Tensor:
        """Return the tensor on its device; it is not kept there."""
        if self._device.type in _COPIED_PLAINLY:
            return copied_alike(self._host)
        self.prefetch()
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(self._is_ready)
        loaded.record_stream(current)
        return loaded


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to pinned memory without waiting; the strides are those that a copy on the device would have."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class OnDisk:
    """One tensor in a file."""

    __slots__ = ("__weakref__", "_device", "_stored")

    def __init__(self, tensor: torch.Tensor, folder: str) -> None:
        self._device = tensor.device
        with DisableTorchDispatch():  # to policies and counters this is no op of the user's
            self._stored = DiskTensor(tensor, folder)

    @property
    def host(self) -> torch.Tensor:
        """The tensor in host memory, over the file's pages."""
        with DisableTorchDispatch():
            return self._stored.read()

    def prefetch(self) -> None:
        """Let the system read the file ahead."""
        self._stored.expect()

    def load(self) -> torch.Tensor:
        """Return the tensor on its device. On the CPU it is the file's pages, and a write to it copies the page."""
        host = self.host
        return host if self._device.type == "cpu" else copied_alike(host, lambda x: x.to(self._device))


Away = Offloaded | OnDisk


def offload(tensor: torch.Tensor, folder: str | None = None) -> Away:
    """Copy a tensor to host memory, or to a file in a folder if it is of a kind and size for that."""
    if folder is not None and goes_to_disk(tensor):
        return OnDisk(tensor, folder)
    return Offloaded(tensor)
