"""Overrides that a `with` block puts on every region called inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Overrides:
    """What `with` blocks around a region say; None leaves the choice to the region."""

    early_stop: bool | None = None
    debug: bool | None = None


NO_OVERRIDES = Overrides()
# A context variable, not a global: a block on one thread must not leak into regions on another.
overrides: ContextVar[Overrides] = ContextVar("remat_overrides", default=NO_OVERRIDES)


@contextmanager
def _overridden(value: Overrides) -> Iterator[None]:
    token = overrides.set(value)
    try:
        yield
    finally:
        overrides.reset(token)


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Decide for every region whose forward runs inside whether its recomputation may stop early."""
    with _overridden(replace(overrides.get(), early_stop=enable)):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Force debug mode on or off for every region called inside; None leaves the choice to each call."""
    with _overridden(replace(overrides.get(), debug=enabled)):
        yield
