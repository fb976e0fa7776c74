"""Looking for the place in a row of plans where they cease to fit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from remat.passes.search.ladder import End, narrow

GUESSES = 4


@dataclass(frozen=True)
class Plan:
    place: int
    peak_bytes: int


def plans(peaks: list[int | None], budget_bytes: int, close_bytes: int | None = None) -> list[Plan]:
    """Look between the ends of a row, of which the first is known to fit and the last not to."""

    def plan_at(place: int) -> Plan | None:
        peak = peaks[place]
        return None if peak is None else Plan(place, peak)

    first, last = peaks[0], peaks[-1]
    assert first is not None
    assert last is not None
    ends = End(0, first), End(len(peaks) - 1, last)
    return list(narrow(plan_at, *ends, budget_bytes, close_bytes, GUESSES))


@pytest.mark.parametrize("budget_bytes", [100, 150, 1000, 3170, 9899])
@pytest.mark.parametrize("power", [1, 2])
def test_halving_finds_the_last_that_fits(budget_bytes: int, power: int) -> None:
    peaks: list[int | None] = [100 + place**power for place in range(101)]
    peaks[-1] = 10_000
    fitting = [place for place, peak in enumerate(peaks) if peak is not None and peak <= budget_bytes]
    found = [plan.place for plan in plans(peaks, budget_bytes) if plan.peak_bytes <= budget_bytes]
    assert max(found, default=0) == fitting[-1]


def test_row_in_the_other_direction() -> None:
    peaks = [1000 - 10 * place for place in range(100)]
    found = list(narrow(lambda k: Plan(k, peaks[k]), End(99, peaks[99]), End(0, peaks[0]), 505, None, GUESSES))
    assert max((p for p in found if p.peak_bytes <= 505), key=lambda p: p.peak_bytes).place == 50


def test_proportion_is_close_at_once() -> None:
    peaks: list[int | None] = [1000 + 7 * place for place in range(1000)]
    found = plans(peaks, 4444, close_bytes=4400)
    assert len(found) == 1
    assert 4400 <= found[0].peak_bytes <= 4444


def test_uneven_row_is_halved_after_a_few_guesses() -> None:
    peaks: list[int | None] = [*[1] * 900, *[10**9] * 100]
    found = plans(peaks, 1000, close_bytes=999)
    assert max(plan.place for plan in found if plan.peak_bytes <= 1000) == 899
    assert len(found) <= GUESSES + 10


def test_plans_that_are_too_long_take_too_little() -> None:
    peaks = [10, *[None] * 49, *range(500, 1000, 10)]
    found = plans(peaks, 700)
    assert max(plan.peak_bytes for plan in found if plan.peak_bytes <= 700) == 700
    assert all(plan.place >= 50 for plan in found)
