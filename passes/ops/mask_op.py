"""The op that draws the mask of a dropout: `remat::bernoulli_like(x, p)`, as the kernel of dropout draws it.

The mask lies in memory like what it is for, and its numbers are drawn in that order, whatever the order is. Torch's own
op for such masks draws them row by row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def bernoulli_like_op() -> Any:
    """Return the op, registered when it is first needed."""
    library: Any = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("bernoulli_like(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("bernoulli_like", _drawn, "CompositeExplicitAutograd")
    torch.library.register_fake("remat::bernoulli_like", _like, lib=library)
    _libraries.append(library)
    return torch.ops.remat.bernoulli_like.default


def _drawn(x: torch.Tensor, p: float) -> torch.Tensor:
    return _like(x, p).bernoulli_(p)


def _like(x: torch.Tensor, p: float) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(x, dtype=torch.bool)


_libraries: list[Any] = []  # an op lives as long as the library object that registered it
