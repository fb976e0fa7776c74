"""Entry values of buffers in a recomputation, while other threads may be in the forward of the same modules.

The usual way is to put copies into the modules and take them out at the end. For that long, other threads would find
them there. So their forwards wait where they begin; and where one has begun already, nothing is put into modules:
a mode of this thread alone hands the copies to the ops that ask for the buffers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.passes.torch_private import tree_map

from ..types import CheckpointError, EngineMode, storage_id, support_compiled_code

MAX_WAIT_SECONDS = 600.0
"""How long a forward waits for a recomputation on another thread; two threads that wait for each other never end."""

_one_replay = threading.RLock()  # held by the one thread that replays a forward with entry values
_turn = threading.Condition()  # guards the two tables below
_num_forwards: Counter[tuple[int, int]] = Counter()  # that are running, by module and thread
_swapped: dict[int, int] = {}  # modules with copies in them, and the thread that has put them there

Copies = list[tuple[nn.Module, str, torch.Tensor]]


def begin_forward(modules: Iterable[nn.Module]) -> None:
    """Wait until the modules have their own buffers, and see to it that they keep them."""
    thread, ids = threading.get_ident(), [id(module) for module in modules]
    with _turn:
        is_free = _turn.wait_for(lambda: all(_swapped.get(m, thread) == thread for m in ids), MAX_WAIT_SECONDS)
        if not is_free:
            raise CheckpointError(
                f"a region waited {MAX_WAIT_SECONDS} seconds for the recomputation of another one, on another thread, "
                "over a module whose buffers both change. If that waits for this thread, give each thread its "
                "own module."
            )
        for module in ids:
            _num_forwards[module, thread] += 1


def end_forward(modules: Iterable[nn.Module]) -> None:
    """Say that a forward has ended, also by an error; on the thread that it began on."""
    thread = threading.get_ident()
    with _turn:
        for module in modules:
            _num_forwards[id(module), thread] -= 1
            if _num_forwards[id(module), thread] <= 0:
                del _num_forwards[id(module), thread]


@contextmanager
def replayed(copies: Copies) -> Iterator[None]:
    """Run a block with copies in place of buffers; what the block does to them is dropped."""
    thread, ids = threading.get_ident(), {id(module) for module, _, _ in copies}
    with _one_replay:
        with _turn:
            is_shared = any(module in ids and other != thread for module, other in _num_forwards)
            mine = [module for module in ids if not is_shared and module not in _swapped]
            _swapped.update(dict.fromkeys(mine, thread))
        try:
            with _redirected(copies) if is_shared else _put_in(copies):
                yield
        finally:
            with _turn:
                for module in mine:
                    del _swapped[module]
                _turn.notify_all()


@contextmanager
def _put_in(copies: Copies) -> Iterator[None]:
    current = [(module, name, module._buffers.get(name)) for module, name, _ in copies]
    for module, name, copy in copies:
        module._buffers[name] = copy
    try:
        yield
    finally:
        for module, name, value in current:
            module._buffers[name] = value


@contextmanager
def _redirected(copies: Copies) -> Iterator[None]:
    live = [(module, name, module._buffers.get(name), copy) for module, name, copy in copies]
    with _Redirect([(value, copy) for _, _, value, copy in live if value is not None]):
        yield
    for module, name, value, _ in live:
        if module._buffers.get(name) is not value:
            raise CheckpointError(
                f"the buffer `{name}` of a {type(module).__name__} was replaced while a region over that module was "
                "recomputed on one thread and run on another. Change it in place, or give each thread its own module."
            )


class _Redirect(EngineMode):  # type: ignore[no-untyped-call]
    """Hand copies to the ops of this thread that ask for some buffers."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        support_compiled_code()
        self._pairs = {storage_id(value): (value, copy) for value, copy in pairs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on the copies."""
        args, kwargs = tree_map(self._copy_for, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _copy_for(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        buffer, copy = self._pairs.get(storage_id(value), (None, None))
        if buffer is None or copy is None:
            return value
        layout = value.size(), value.stride(), value.storage_offset()
        if layout == (buffer.size(), buffer.stride(), buffer.storage_offset()):
            return copy
        return copy.as_strided(layout[0], layout[1], layout[2] - buffer.storage_offset())
