"""Copies that lie in memory like what they are copies of: `remat::copy_alike(x)` in graphs, `copied_alike` elsewhere.

A copy as torch makes it has no gaps, and elements that an expanded tensor reads again and again it has several times.
What is computed from it is rounded in another order: the sum of every other column is not, to the last bit, that of the
same columns side by side. What waits for backward as a copy is therefore one of all memory between its first and its
last element, wherever the usual copy lies in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def copied_alike(tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> torch.Tensor:
    """A copy with the same strides; `copy` makes it, maybe on another device. Subclasses have copies of their own."""
    made = copy(tensor)
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or made.stride() == tensor.stride():
        return made
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.numel():
        return torch.empty_strided(shape, strides, dtype=made.dtype, device=made.device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return copy(tensor.as_strided((span,), (1,), tensor.storage_offset())).as_strided(shape, strides)


@cache
def copy_alike_op() -> Any:
    """Return the op, registered when it is first needed. It takes what `aten._to_copy` is told of another device."""
    library: Any = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
    options = "Device? device=None, bool non_blocking=False, bool pin_memory=False"
    library.define(f"copy_alike(Tensor x, *, {options}) -> Tensor")
    library.impl("copy_alike", _copy_alike, "CompositeExplicitAutograd")
    for lazy in ("Conjugate", "Negative"):  # which would be resolved before, into a copy that lies in another way
        library.impl("copy_alike", torch.library.fallthrough_kernel, lazy)
    torch.library.register_fake("remat::copy_alike", _like, lib=library)
    _libraries.append(library)
    return torch.ops.remat.copy_alike.default


def is_copy_alike(op: Any) -> bool:
    """True for the op, whoever asks."""
    return str(op) == "remat.copy_alike.default"


def _copy_alike(x: torch.Tensor, *, device: Any = None, **options: Any) -> torch.Tensor:
    if device is None:
        return copied_alike(x)
    return copied_alike(x, lambda tensor: torch.ops.aten._to_copy.default(tensor, device=device, **options))


def _like(x: torch.Tensor, *, device: Any = None, **options: Any) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)


_libraries: list[Any] = []  # an op lives as long as the library object that registered it
