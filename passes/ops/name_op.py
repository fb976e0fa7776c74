"""The op by which policies see a named value: `remat::named(x, "attn_out")`, an identity. It never runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def name_op() -> Any:
    """Return the op, registered when it is first needed."""
    library: Any = torch.library.Library("remat", "FRAGMENT")  # type: ignore[no-untyped-call]
    # Not `name`: `torch.ops.remat.name` is what the namespace itself is called.
    library.define("named(Tensor x, str name) -> Tensor")
    _libraries.append(library)
    return torch.ops.remat.named.default


_libraries: list[Any] = []  # an op lives as long as the library object that registered it
