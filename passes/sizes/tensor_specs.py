"""What is known of a tensor without its values: shape, strides, type and device, in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..torch_private import symbol_hint

UNBACKED_SIZE = 4096
"""Stand-in for a size that only the data will tell (results of nonzero, item): large enough not to look free."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides, type and device of a tensor; symbolic sizes are replaced by their example values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that a dense tensor of this shape takes."""
        return self.numel * self.dtype.itemsize


def spec_of(tensor: torch.Tensor, size_of: Callable[[int | torch.SymInt], int] | None = None) -> TensorSpec:
    """Describe a tensor, without guarding on its symbolic sizes."""
    size_of = hint_of if size_of is None else size_of
    stride = _numbers(tensor.stride(), size_of) if tensor.layout is torch.strided else ()
    return TensorSpec(_numbers(tensor.shape, size_of), stride, tensor.dtype, tensor.device.type)


def hint_of(size: int | torch.SymInt) -> int:
    """An example value for a size."""
    if isinstance(size, int):
        return size
    hint = symbol_hint(size)
    return UNBACKED_SIZE if hint is None else hint


def _numbers(sizes: Sequence[int | torch.SymInt], size_of: Callable[[int | torch.SymInt], int]) -> tuple[int, ...]:
    return tuple([s if type(s) is int else size_of(s) for s in sizes])
