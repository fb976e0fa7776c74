"""Tensors that wait in a file: one file per process and folder, cut into ranges, mapped into memory when read.

The file has no name once it is open, so nothing is left behind however the process ends, and processes that share a
folder never see each other's. Bytes are written past the process's own memory and mapped privately for reading: a
tensor that is read back is the file's pages themselves, and writing to it changes a copy of the page, not the file.
"""

from __future__ import annotations

import atexit
import bisect
import ctypes
import functools
import mmap
import os
import sys
import tempfile
import threading
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..shared import OffloadError

MIN_BYTES = mmap.PAGESIZE
"""Smaller tensors stay where they are: a range of a file takes whole pages."""

_GRAIN = mmap.ALLOCATIONGRANULARITY
_IN_MEMORY = ("tmpfs", "ramfs")
# Otherwise every mapping takes a file handle of its own.
_OPTIONS: dict[str, Any] = {"trackfd": False} if os.name == "posix" and sys.version_info >= (3, 13) else {}


class Arena:
    """The file of this process in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._released: deque[tuple[int, int]] = deque()
        self._free: list[tuple[int, int]] = []  # ranges of the file, in order, none next to another
        self._end = 0
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix="remat_", buffering=0)  # noqa: SIM115 - until exit
        except OSError as error:
            raise OffloadError(
                f"offload to disk: no file can be made in {folder} ({error.strerror}). Give an offload_folder that "
                "this process may write to."
            ) from error
        atexit.register(self._file.close)
        _warn_if_in_memory(folder)

    @property
    def file_bytes(self) -> int:
        """How long the file is: what was alive at once, unless that is all gone."""
        return self._end

    def store(self, source: memoryview) -> Range:
        """Write bytes and return where they are."""
        num_bytes = len(source)
        length = -(-num_bytes // _GRAIN) * _GRAIN
        with self._lock:
            self._take_back()
            start = self._allocate(length)
            try:
                self._write(start, source)
            except OSError as error:
                self._put_back(start, length)
                raise self._no_room(num_bytes, error) from error
        self._drain()
        return Range(self, start, num_bytes, length)

    def _write(self, start: int, source: memoryview) -> None:
        self._file.seek(start)
        while source:
            source = source[self._file.write(source) :]  # the system takes at most 2 GiB at a time

    def map(self, start: int, length: int) -> _Mapping:
        """Map a range privately."""
        try:
            return _Mapping(self._file.fileno(), length, access=mmap.ACCESS_COPY, offset=start, **_OPTIONS)
        except OSError as error:
            raise OffloadError(
                f"offload to disk: {length} bytes of the file in {self.folder} cannot be mapped ({error.strerror}). "
                "If the limit of open files or of mappings is reached, raise it (`ulimit -n`, vm.max_map_count)."
            ) from error

    def expect(self, start: int, length: int) -> None:
        """Let the system read a range ahead of its use."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), start, length, os.POSIX_FADV_WILLNEED)

    def release(self, start: int, length: int) -> None:
        """Take a range back. Called from finalizers, so at any moment, even while this thread holds the lock."""
        if os.getpid() == self._owner:  # a forked child has no say in its parent's file
            self._released.append((start, length))
            self._drain()

    def _drain(self) -> None:
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._released:
            self._put_back(*self._released.popleft())

    def _allocate(self, length: int) -> int:
        """The smallest free range that is long enough, or the end of the file."""
        found = min(((end - start, start, end) for start, end in self._free if end - start >= length), default=None)
        if found is None:
            self._end += length
            return self._end - length
        _, start, end = found
        index = bisect.bisect_left(self._free, (start, end))
        self._free[index : index + 1] = [(start + length, end)] if start + length < end else []
        return start

    def _put_back(self, start: int, length: int) -> None:
        end = start + length
        index = bisect.bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        if end < self._end:
            self._free.insert(index, (start, end))
            return
        self._end = start
        if os.name == "posix":  # elsewhere a file that is mapped anywhere keeps its length
            self._file.truncate(start)  # nothing is mapped behind a range that is alive

    def _no_room(self, num_bytes: int, error: OSError) -> OffloadError:
        held = self._end - sum(end - start for start, end in self._free)
        return OffloadError(
            f"offload to disk: {num_bytes} bytes could not be written to {self.folder} ({error.strerror}), where this "
            f"process holds {held} bytes. Free room there, give another offload_folder, or offload less."
        )


class Range:
    """Bytes of an arena's file, free for others once nobody knows this object."""

    __slots__ = ("__weakref__", "_arena", "_num_bytes", "_start")

    def __init__(self, arena: Arena, start: int, num_bytes: int, length: int) -> None:
        self._arena, self._start, self._num_bytes = arena, start, num_bytes
        weakref.finalize(self, arena.release, start, length).atexit = False

    def read(self) -> torch.Tensor:
        """The bytes as a tensor over memory that the system fills from the file; it keeps the range."""
        mapping = self._arena.map(self._start, self._num_bytes)
        mapping.range = self
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def expect(self) -> None:
        """Say that the bytes will be read soon."""
        self._arena.expect(self._start, self._num_bytes)


class _Mapping(mmap.mmap):
    """A mapped range, which stays allocated as long as a tensor is made from it."""

    range: Range


_arenas: dict[tuple[int, str], Arena] = {}
_arenas_lock = threading.Lock()


def arena_of(folder: str) -> Arena:
    """The arena of this process in a folder; a forked child has its own."""
    key = os.getpid(), os.path.realpath(folder)
    with _arenas_lock:
        if key not in _arenas:
            _arenas[key] = Arena(folder)
        return _arenas[key]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor's elements lie in memory, from the first to the last."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_compact: bool
    """Stored without the gaps between its elements, which would take more room than they do."""


class DiskTensor:
    """One tensor in a file. Reading it gives a new tensor over the file's pages, with the same strides."""

    __slots__ = ("__weakref__", "_layout", "_range")

    def __init__(self, tensor: torch.Tensor, folder: str) -> None:
        tensor = tensor.detach()
        is_conj = tensor.is_conj()
        tensor = tensor.conj() if is_conj else tensor
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        is_compact = tensor.is_neg() or (span > 2 * tensor.numel() and _are_apart(tensor))
        self._layout = _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, is_conj, is_compact)
        if is_compact:
            flat = tensor.resolve_neg().contiguous().cpu()
        else:
            flat = tensor.as_strided((span,), (1,), tensor.storage_offset()).cpu()
        self._range = arena_of(folder).store(_bytes_of(flat))

    def read(self) -> torch.Tensor:
        """The tensor in host memory."""
        layout = self._layout
        flat = self._range.read().view(layout.dtype)
        if layout.is_compact:
            tensor = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype)
            tensor.copy_(flat.view(layout.shape))
        else:
            tensor = flat.as_strided(layout.shape, layout.strides)
        return tensor.conj() if layout.is_conj else tensor

    def expect(self) -> None:
        """Say that the tensor will be read soon."""
        self._range.expect()


def _are_apart(tensor: torch.Tensor) -> bool:
    """True if no two elements can share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, not copied; valid as long as the tensor is."""
    num_bytes = flat.numel() * flat.element_size()
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(flat.data_ptr())).cast("B")


def goes_to_disk(tensor: torch.Tensor) -> bool:
    """True for a plain tensor that is large enough; subclasses and sparse tensors are left where they are."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.device.type == "meta" or tensor.is_quantized or tensor.is_nested:
        return False
    # Autograd's own zeros have a size but no memory.
    return tensor.numel() * tensor.element_size() >= MIN_BYTES and tensor.data_ptr() != 0


@functools.cache
def _warn_if_in_memory(folder: str) -> None:
    """Say so if a folder is no place outside of memory at all."""
    kind = _file_system_of(os.path.realpath(folder))
    if kind in _IN_MEMORY:
        warnings.warn(
            f"offload to disk: {folder} lies on a {kind}, which is memory itself, so nothing is gained. Give an "
            "offload_folder on a disk.",
            stacklevel=2,
        )


def _file_system_of(path: str) -> str:
    """The kind of file system that a path is on; empty where the system does not tell."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return ""
    above = [(len(at), kind) for at, kind in mounts if path == at or path.startswith(at.rstrip("/") + "/")]
    return max(above, default=(0, ""))[1]
