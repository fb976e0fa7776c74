"""The cut against brute force, its solvers against each other, and what it says when there is no answer."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from remat.passes.search.min_cut import (
    FORBIDDEN,
    Choice,
    Contradiction,
    Value,
    default_solver,
    fits_scipy,
    solve,
    solve_by_augmenting,
    solve_with_networkx,
    solve_with_scipy,
)


def random_problem(rng: random.Random, num_values: int) -> list[Value]:
    """A random DAG with random prices, some of them forbidden; small prices make many ties."""
    values = []
    for i in range(num_values):
        inputs = tuple(sorted(rng.sample(range(i), rng.randint(0, min(i, 3)))))
        values.append(
            Value(
                save_price=FORBIDDEN if rng.random() < 0.15 else rng.randint(0, 6),
                recompute_price=FORBIDDEN if rng.random() < 0.2 else rng.randint(0, 6),
                inputs=inputs,
                needed=rng.random() < 0.4,
            )
        )
    return values


def price_of(values: Sequence[Value], recomputed: Sequence[bool]) -> int | None:
    """The price of one choice of recomputed values: what they and backward read is saved; None if illegal."""
    price = 0
    wanted = {i for i, v in enumerate(values) if v.needed}
    for i in range(len(values) - 1, -1, -1):
        if i not in wanted:
            continue
        one = values[i].recompute_price if recomputed[i] else values[i].save_price
        if one is None:
            return None
        price += one
        if recomputed[i]:
            wanted |= set(values[i].inputs)
    return price


def cheapest(values: Sequence[Value]) -> int | None:
    """Try every choice."""
    prices = [price_of(values, choice) for choice in itertools.product([False, True], repeat=len(values))]
    return min((p for p in prices if p is not None), default=None)


@pytest.mark.parametrize("block", range(10))
def test_cut_costs_what_brute_force_finds(block: int) -> None:
    solved = infeasible = 0
    for seed in range(block * 250, (block + 1) * 250):
        rng = random.Random(seed)
        values = random_problem(rng, rng.randint(1, 10))
        best = cheapest(values)
        if best is None:
            with pytest.raises(Contradiction):
                solve(values)
            infeasible += 1
            continue
        cut = solve(values)
        assert cut.price == best, f"seed {seed}"
        recomputed = [choice is Choice.RECOMPUTE for choice in cut.choices]
        assert price_of(values, recomputed) == best, f"seed {seed}"
        solved += 1
    assert solved > 100
    assert infeasible > 5


@pytest.mark.parametrize("seed", range(60))
def test_shrinking_changes_nothing(seed: int) -> None:
    """The whole problem handed to a solver costs the same as what is left after shrinking."""
    values = random_problem(random.Random(seed), 60)
    try:
        cut = solve(values)
    except Contradiction:
        return
    whole = solve_with_networkx(values)
    assert price_of(values, whole) == cut.price


@pytest.mark.parametrize("solver", [solve_with_scipy, solve_by_augmenting])
@pytest.mark.parametrize("seed", range(60))
def test_every_solver_gives_the_same_cut(seed: int, solver: Any) -> None:
    rng = random.Random(1000 + seed)
    values = random_problem(rng, rng.choice([300, rng.randint(1, 300)]))
    try:
        by_networkx = solve(values, solve_with_networkx)
    except Contradiction:
        with pytest.raises(Contradiction):
            solve(values, solver)
        return
    assert solve(values, solver) == by_networkx


def test_compiled_solver_agrees_on_one_large_component() -> None:
    """A chain of values that only its end is needed of: nothing shrinks it."""
    rng = random.Random(3)
    values = [Value(rng.randint(50, 100), rng.randint(1, 49), (i - 1,) if i else (), needed=False) for i in range(2000)]
    values.append(Value(FORBIDDEN, 1, (1999, 1000, 17), needed=True))
    assert solve(values, solve_with_scipy) == solve(values, solve_with_networkx) == solve(values)
    assert solve(values, solve_by_augmenting) == solve(values)


def test_prices_too_large_for_scipy_are_left_to_solvers_that_take_them() -> None:
    large = [Value(2**40, 2**39, (i - 1,) if i else (), needed=i == 299) for i in range(300)]
    assert not fits_scipy(large)
    assert default_solver(large) == solve_with_networkx(large)


def test_ties_recompute_so_that_less_is_kept() -> None:
    cut = solve([Value(5, 5, (), needed=True)])
    assert cut.choices == (Choice.RECOMPUTE,)


def test_equal_problems_give_equal_cuts_whatever_the_solver() -> None:
    values = [Value(2, 2, (i - 1,) if i else (), needed=i % 5 == 4) for i in range(50)]
    assert solve(values, solve_with_networkx).choices == solve(values, solve_with_scipy).choices


def test_value_that_nobody_needs_is_left_alone() -> None:
    cut = solve([Value(1, 1, (), needed=False), Value(1, 9, (0,), needed=True)])
    assert cut.choices == (Choice.UNUSED, Choice.SAVE)


def test_equal_components_are_solved_once() -> None:
    calls = []

    def counting(component: Sequence[Value]) -> list[bool]:
        calls.append(component)
        return solve_with_networkx(component)

    # Forty blocks: an unneeded input of price 3, read by a needed value that is cheap to recompute.
    values = []
    for block in range(40):
        values.append(Value(3, FORBIDDEN, (), needed=False))
        values.append(Value(2, 1, (2 * block,), needed=True))
    solve(values, counting)
    assert len(calls) == 1


@pytest.mark.parametrize("seed", range(40))
def test_equal_components_get_the_answer_that_each_would_get_alone(seed: int) -> None:
    """Several copies of two problems in one: what is remembered of one copy is right for the others."""
    rng = random.Random(3000 + seed)
    parts = [random_problem(rng, 12), random_problem(rng, 12)]
    order = [rng.randrange(2) for _ in range(6)]
    values = [
        Value(v.save_price, v.recompute_price, tuple(12 * k + j for j in v.inputs), v.needed)
        for k, part in enumerate(order)
        for v in parts[part]
    ]
    try:
        alone = [solve(part) for part in parts]
    except Contradiction:
        return
    assert solve(values).choices == tuple(choice for part in order for choice in alone[part].choices)


def test_contradiction_names_the_value_and_its_readers() -> None:
    values = [
        Value(FORBIDDEN, FORBIDDEN, (), needed=False),
        Value(FORBIDDEN, 1, (0,), needed=False),
        Value(FORBIDDEN, 1, (1,), needed=True),
    ]
    with pytest.raises(Contradiction) as caught:
        solve(values)
    assert caught.value.value == 0
    assert caught.value.chain == (1, 2)


def test_hundred_thousand_values_are_cut_quickly() -> None:
    """A bound of seconds on something that takes a fraction of one: it fails if work becomes quadratic."""
    rng = random.Random(0)
    values = [
        Value(
            rng.randint(1, 9),
            rng.randint(1, 9),
            tuple(sorted({max(0, i - rng.randint(1, 20))})) if i else (),
            rng.random() < 0.5,
        )
        for i in range(100_000)
    ]
    start = time.perf_counter()
    cut = solve(values, solve_with_networkx)
    assert cut.price > 0
    assert time.perf_counter() - start < 60
