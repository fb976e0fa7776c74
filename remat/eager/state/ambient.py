"""The settings around a region that its ops depend on: autocast, default dtype, default device.

Captured at entry as plain values, compared with what is in force when the region is recomputed, and set only
where they differ; entering torch's own context managers unconditionally costs more than a small region.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import float32, get_default_dtype, is_autocast_cache_enabled

from remat.passes.torch_private import (
    DeviceContext,
    get_function_mode_stack,
    is_any_autocast_enabled,
    len_torch_function_stack,
)

_accelerator: list[str | None] = []


def autocast_device_types() -> tuple[str, ...]:
    """Return the device types whose autocast state a region may see."""
    if not _accelerator:
        found = torch.accelerator.current_accelerator(check_available=True)
        _accelerator.append(found.type if found is not None else None)
    name = _accelerator[0]
    return ("cpu",) if name is None or not torch.amp.is_autocast_available(name) else ("cpu", name)


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast's state: (device type, enabled, dtype) for each device type."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def current() -> Autocast:
        """Read the state in force."""
        types = autocast_device_types()
        return Autocast(tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types))

    def set(self) -> None:
        """Put the state in force."""
        for device_type, enabled, dtype in self.devices:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


@dataclass(frozen=True, slots=True)
class Ambient:
    """What was in force at a region's entry. `autocast` is None where no device had it enabled."""

    autocast: Autocast | None
    autocast_cache: bool
    default_dtype: torch.dtype
    default_device: Any

    @staticmethod
    def current() -> Ambient:
        """Read what is in force, sharing one object for the usual settings."""
        # As `_is_plain` asks, without the call: by far the most common, and found without building anything.
        if (
            not is_any_autocast_enabled()
            and is_autocast_cache_enabled()
            and get_default_dtype() is float32
            and len_torch_function_stack() == 0
        ):
            return PLAIN
        if _is_plain():
            return PLAIN
        autocast = Autocast.current() if is_any_autocast_enabled() else None
        device = current_device_context() if len_torch_function_stack() else None
        return Ambient(autocast, torch.is_autocast_cache_enabled(), torch.get_default_dtype(), device)


def _is_plain() -> bool:
    """True if the usual settings are in force."""
    return (
        not is_any_autocast_enabled()
        and is_autocast_cache_enabled()
        and get_default_dtype() is float32
        and not (len_torch_function_stack() and current_device_context() is not None)
    )


PLAIN = Ambient(None, True, torch.float32, None)


def current_device_context() -> Any:
    """Return the innermost `torch.device` context (or default device) in force, or None."""
    for mode in reversed(get_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return mode
    return None


def is_in_force(ambient: Ambient) -> bool:
    """True if nothing needs to be set for code that ran under these settings."""
    if ambient is PLAIN:
        return _is_plain()
    # An autocast region keeps its own nesting level, so that weights cast for it are dropped with it.
    return ambient.autocast is None and Ambient.current() == ambient


@contextmanager
def restored(ambient: Ambient) -> Iterator[None]:
    """Run a block under captured settings, then put the surrounding ones back."""
    dtype, cache = torch.get_default_dtype(), torch.is_autocast_cache_enabled()
    autocast = Autocast.current()
    wanted = ambient.autocast or Autocast(tuple((t, False, d) for t, _, d in autocast.devices))
    wanted.set()
    torch.set_autocast_cache_enabled(ambient.autocast_cache)
    torch.autocast_increment_nesting()
    torch.set_default_dtype(ambient.default_dtype)
    try:
        with _device_context(ambient.default_device):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cache)
        autocast.set()


@contextmanager
def _device_context(wanted: Any) -> Iterator[None]:
    """Run a block under the default device that the forward had."""
    current = current_device_context()
    if wanted is None and current is not None:
        # The mode below cannot be taken off the stack from here; one on top that names the CPU has its
        # effect.
        wanted = DeviceContext(torch.device("cpu"))
    if wanted is None or wanted is current:
        yield
        return
    with DeviceContext(wanted.device):
        yield
