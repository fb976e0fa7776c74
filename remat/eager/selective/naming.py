"""Names in eager code: `remat.name(x, "attn_out")` lets the policy of the running region speak about a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from remat.eager.selective.recorder import Recorder

from ..types import local

T = TypeVar("T", bound=torch.Tensor)

_watchers: list[Callable[[torch.Tensor, str], None]] = []


@contextmanager
def watched_names(watch: Callable[[torch.Tensor, str], None]) -> Iterator[None]:
    """Tell somebody of every value that is named in eager code, in a region or not."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def note_name(tensor: T, name: str) -> T:
    """Tell the policy of the region whose forward is running that a value has a name; return the value itself.

    Save, offload and MUST_RECOMPUTE hold for the value from then on, whatever the policy said of the op that made it:
    a saved value's op does not run again. Of several names for one value the last with such an answer holds. A name
    of a view is a name of what is viewed, only that MUST_RECOMPUTE of a part does not drop the whole. A name
    has no effect on an argument of the region, which is kept anyway, on what an inner region returned, whose own
    policy holds, nor in a region without a policy; during a recomputation the forward's answers stand.
    """
    for watch in _watchers:
        watch(tensor, name)
    execution = local.execution
    if execution is not None:
        mode = execution.mode
        if isinstance(mode, Recorder):
            mode.note_name(tensor, name)
    return tensor
