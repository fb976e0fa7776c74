"""The op that moves a value of a compiled graph to a file: `remat::to_disk(x, folder)`, a copy outside of memory.

Its result is an ordinary tensor on the CPU whose memory is the file's pages, so there is no op for the way back: who
reads it makes the system read the file, and when it is gone its part of the file is free.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .copy_op import copied_alike
from .disk import DiskTensor, goes_to_disk


@cache
def to_disk_op() -> Any:
    """Return the op, registered when it is first needed."""
    library: Any = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("to_disk(Tensor x, str folder) -> Tensor")
    library.impl("to_disk", _to_disk, "CompositeExplicitAutograd")
    for lazy in ("Conjugate", "Negative"):  # which would be resolved before, into a copy that lies in another way
        library.impl("to_disk", torch.library.fallthrough_kernel, lazy)
    torch.library.register_fake("remat::to_disk", _like_on_host, lib=library)
    _libraries.append(library)
    return torch.ops.remat.to_disk.default


def is_to_disk(op: Any) -> bool:
    """True for the op, whoever asks."""
    return str(op) == "remat.to_disk.default"


def _to_disk(x: torch.Tensor, folder: str) -> torch.Tensor:
    if not goes_to_disk(x):
        return copied_alike(x, lambda tensor: tensor.to("cpu", copy=True))
    return DiskTensor(x, folder).read()


def _like_on_host(x: torch.Tensor, folder: str) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


_libraries: list[Any] = []  # an op lives as long as the library object that registered it
