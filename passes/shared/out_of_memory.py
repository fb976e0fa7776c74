"""Errors that say that memory ran out: how they look, and how advice is added to one without changing its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .readable import size

_PREFIX = "remat: "
_CPU_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory ran out, on an accelerator or on the CPU, which has no type of its own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)


def add_advice(error: BaseException, text: str) -> None:
    """Add a note to an error, once: whoever is nearest to its cause knows most."""
    if advice_of(error):
        return
    note = _PREFIX + text
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10 prints no notes
        error.args = (f"{error.args[0] if error.args else ''}\n{note}", *error.args[1:])


def advice_of(error: BaseException) -> str:
    """What was added to an error; empty if nothing was."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_PREFIX)]
    lines = notes or [line for line in str(error).splitlines() if line.startswith(_PREFIX)]
    return "\n".join(lines)


NEXT_FRACTION = 0.7
"""Of the planned peak: the budget to try next. A step that is sure to be felt, and mostly cheap in time."""


def advising(compiled: Callable[..., Any], where: str, peak_bytes: Callable[[], int | None]) -> Callable[..., Any]:
    """Call compiled code, and say which budget to try next if it runs out of memory."""

    def call(*args: Any) -> Any:
        try:
            return compiled(*args)
        except Exception as error:
            if is_out_of_memory(error):
                add_advice(error, _advice(where, peak_bytes()))
            raise

    if getattr(compiled, "_boxed_call", False):
        call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _advice(where: str, peak_bytes: int | None) -> str:
    if peak_bytes is None:
        planned, budget = "", '"memory_budget": 0.5'
    else:
        planned = f", planned for an activation peak of {size(peak_bytes)}"
        budget = f'"memory_budget": "{max(1, int(NEXT_FRACTION * peak_bytes) >> 10)}KiB"'
    return (
        f"out of memory in {where}{planned}. The next cheaper plan: options={{{budget}}}; remat.pareto(model, *inputs) "
        "lists what is reachable, and what each costs in time."
    )
