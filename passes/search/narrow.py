"""Look for the place in a row of plans, from little memory to much, where they cease to fit a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar

GUESSES = 4
"""How often one guesses by proportion where the budget is met, before one halves what is left."""


class HasPeak(Protocol):
    """A plan that was simulated."""

    @property
    def peak_bytes(self) -> int:
        """Its activation peak."""


P = TypeVar("P", bound=HasPeak)


class End(NamedTuple):
    """A place in the row, and what the plan there takes."""

    place: int
    peak_bytes: int


def narrow(
    plan_at: Callable[[int], P | None], fitting: End, exceeding: End, budget_bytes: int, close_bytes: int | None
) -> Iterator[P]:
    """Try plans between one that fits and one that does not, until neighbours are found of which one does.

    With `close_bytes` that many bytes are near enough to the budget, and peaks are taken to grow in proportion at
    first. A plan that is None, because it would be too long, counts as one that takes too little.
    """
    guesses = 0 if close_bytes is None else GUESSES
    while abs(exceeding.place - fitting.place) > 1 and (close_bytes is None or fitting.peak_bytes < close_bytes):
        place = _guess(fitting, exceeding, budget_bytes) if guesses > 0 else (fitting.place + exceeding.place) // 2
        guesses -= 1
        plan = plan_at(place)
        if plan is not None:
            yield plan
        if plan is None:
            fitting = End(place, fitting.peak_bytes)
        elif plan.peak_bytes <= budget_bytes:
            fitting = End(place, plan.peak_bytes)
        else:
            exceeding = End(place, plan.peak_bytes)


def _guess(fitting: End, exceeding: End, budget_bytes: int) -> int:
    """Where the budget is met if peaks grow in proportion; between the ends in any case."""
    growth = max(1, exceeding.peak_bytes - fitting.peak_bytes)
    part = (budget_bytes - fitting.peak_bytes) / growth
    way = exceeding.place - fitting.place
    step = max(1, min(abs(way) - 1, int(part * abs(way))))
    return fitting.place + (step if way > 0 else -step)
