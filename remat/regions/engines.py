"""Who runs the calls of a region outside of torch.compile: the eager engine, or for a budget the one that plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..eager import run_region
from .region_options import RegionOptions

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function with arguments as a region."""


Planning = Callable[[RegionOptions, Runner], Runner]
"""Makes what runs a region by plans for its budget; it is given what runs it without, for traces of somebody else's."""

_planning: list[Planning] = []
"""The engine that plans. It compiles, so its room is further down than this one, and it is handed in from above."""


def plan_with(planning: Planning) -> None:
    """Say which engine runs regions with a budget."""
    _planning[:] = [planning]


def runner_of(region: RegionOptions) -> Runner:
    """What runs a region's calls outside of torch.compile."""
    run = functools.partial(run_region, spec=region.eager_spec())  # which is no step on Python's stack
    if region.budget is None:
        return run
    (planning,) = _planning
    return planning(region, run)


def untraceable(region: RegionOptions, line: str, reason: str) -> str:
    """Say that a region cannot be planned for, and what to do about it."""
    return (
        f"region {region.name} has memory_budget={region.memory_budget!r}, and a budget is planned for on a graph of "
        f"the whole region, but {line or 'a line of it'} cannot be captured: {reason.rstrip('.') or 'unknown'}. "
        "Move that code out of the region, or leave out memory_budget and say by a policy what is kept."
    )
