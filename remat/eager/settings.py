"""Overrides that a `with` block puts on every region called inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Context variables, not globals: a block on one thread must not leak into regions on another.
early_stop_override: ContextVar[bool | None] = ContextVar("remat_early_stop", default=None)
debug_override: ContextVar[bool | None] = ContextVar("remat_debug", default=None)


@contextmanager
def _overridden(variable: ContextVar[bool | None], value: bool | None) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Decide for every region whose forward runs inside whether its recomputation may stop early."""
    with _overridden(early_stop_override, enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Force debug mode on or off for every region called inside; None leaves the choice to each call."""
    with _overridden(debug_override, enabled):
        yield
