"""Cuts at rising prices per byte: they are the corners of the convex hull, and unpriced values stay out of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from support.instances import instance

from remat.passes.search.ladder import Rung, ladder
from remat.passes.search.min_cut import Choice
from remat.passes.search.tuning import MIDDLE

SEEDS = range(12)


def at(rung: Rung, ticks_per_byte: float) -> float:
    return rung.ticks + ticks_per_byte * rung.priced_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_rungs_keep_less_and_cost_more_at_a_rising_rate(seed: int) -> None:
    rungs = ladder(instance(seed).problem, MIDDLE)
    steps = [(more.priced_bytes - less.priced_bytes, less.ticks - more.ticks) for more, less in pairwise(rungs)]
    assert all(num_bytes >= 0 and ticks >= 0 for num_bytes, ticks in steps)
    rates = [ticks / num_bytes for num_bytes, ticks in steps if num_bytes]
    assert all(later >= earlier * (1 - 1e-6) for earlier, later in pairwise(rates))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_cut_lies_below_the_rungs(seed: int) -> None:
    problem = instance(seed).problem
    rungs = ladder(problem, replace(MIDDLE, num_cuts=1000, smallest_gap=0.0))
    assert len(rungs) > 2
    for more, less in pairwise(rungs):
        if more.priced_bytes > less.priced_bytes:
            slope = (less.ticks - more.ticks) / (more.priced_bytes - less.priced_bytes)
            rounding = len(problem.bases)
            assert problem.cut(slope).price >= min(at(rung, slope) for rung in rungs) - rounding


@pytest.mark.parametrize("seed", SEEDS)
def test_what_has_no_price_is_kept_as_if_memory_were_free(seed: int) -> None:
    problem = instance(seed).problem
    everything = frozenset(range(len(problem.bases)))
    free = problem.cut()
    for rung in ladder(problem, MIDDLE, unpriced=everything):
        assert rung.priced_bytes == 0
        assert rung.saved == tuple(v for v, choice in enumerate(free.choices) if choice is Choice.SAVE)


def test_half_of_the_values_without_a_price_leaves_the_other_half_to_choose_from() -> None:
    problem = instance(3).problem
    unpriced = frozenset(range(0, len(problem.bases), 2))
    first, *_, last = ladder(problem, MIDDLE, unpriced=unpriced)
    assert last.priced_bytes < first.priced_bytes == sum(problem.num_bytes(v) for v in first.saved if v not in unpriced)
    assert set(last.saved) & unpriced
