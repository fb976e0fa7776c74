"""`remat.name`: call a value something, so that policies and dumps can speak of it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from .eager.naming import note_name
from .passes.errors import OptionError

T = TypeVar("T", bound=torch.Tensor)


def name(x: T, label: str) -> T:
    """Return `x` itself, named: `h = remat.name(h, "attn_out")`.

    The policy of the region around is asked about it as `fn(ctx, op, x, "attn_out")`, where `op` is
    `remat.passes.name_op.name_op()`, and what it answers holds for the value, whatever it said of the op that made it.
    PREFER_RECOMPUTE is what policies say of what they do not know, and changes nothing.
    """
    if torch.compiler.is_dynamo_compiling():
        return x
    _check(x, label)
    return note_name(x, label)


def _check(x: Any, label: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise OptionError(f"remat.name names a tensor, not {type(x).__name__}")
    if not isinstance(label, str) or not label:
        raise OptionError(f'remat.name(x, {label!r}): a name is a text that is not empty, such as "attn_out"')
