"""Expressions of sizes as text: what sympy says is written, and evaluates to what sympy evaluates to."""

from __future__ import annotations

import random

import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, Where

from remat.passes.sizes.expressions import NotExpressible, evaluate, is_true, symbols_in, to_sympy, write

S0, S1, U0 = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1", "u0"))


def random_expression(rng: random.Random, depth: int) -> sympy.Expr:
    if depth == 0:
        return rng.choice([S0, S1, U0, sympy.Integer(rng.randint(-5, 9))])
    a, b = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    divisor = sympy.Integer(rng.randint(1, 7))
    makers = [
        lambda: a + b,
        lambda: a - b,
        lambda: a * b,
        lambda: a**2,
        lambda: FloorDiv(a, divisor),
        lambda: CeilDiv(a, divisor),
        lambda: Mod(a**2, divisor),
        lambda: Max(a, b),
        lambda: Min(a, b),
        lambda: -a,
    ]
    return rng.choice(makers)()


@pytest.mark.parametrize("seed", range(150))
def test_text_evaluates_to_what_sympy_evaluates_to(seed: int) -> None:
    rng = random.Random(seed)
    expression = sympy.sympify(random_expression(rng, rng.randint(1, 3)))
    text = write(expression)
    for _ in range(3):
        values = {"s0": rng.randint(1, 50), "s1": rng.randint(1, 50), "u0": rng.randint(1, 50)}
        expected = expression.xreplace({s: sympy.Integer(values[s.name]) for s in (S0, S1, U0)})
        assert evaluate(text, values) == int(expected), text


def test_symbols_of_a_text_are_named_in_order() -> None:
    assert symbols_in("Max(4*s1*s0 + 12, u0**2)") == ("s0", "s1", "u0")


def test_what_has_no_words_is_not_written() -> None:
    with pytest.raises(NotExpressible):
        write(Where(S0 > 3, S0, S1))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "s0.real",
        "[s0]",
        "s0 if s0 else 1",
        "9**9**9",
        "s0 +",
        "Max()",
        "True",
        "1.5",
        "'a'",
        "s0//0",
    ],
)
def test_text_that_is_no_expression_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|size"):
        evaluate(text, {"s0": 3})


def test_missing_symbol_is_named() -> None:
    with pytest.raises(ValueError, match="nothing is said of s1"):
        evaluate("s0*s1", {"s0": 2})


@pytest.mark.parametrize("seed", range(40))
def test_relation_is_read_back_as_it_was_written(seed: int) -> None:
    rng = random.Random(seed)
    expression = sympy.sympify(random_expression(rng, 3))
    symbols = {s.name: s for s in (S0, S1, U0)}
    values = {name: rng.randint(1, 50) for name in symbols}
    number = evaluate(write(expression), values)
    for bound in (number - 1, number, number + 1):
        text = f"{write(expression)} <= {bound}"
        found = to_sympy(text, symbols)
        replaced = (
            found
            if found in (True, False)
            else found.xreplace({s: sympy.Integer(values[s.name]) for s in symbols.values()})
        )
        assert is_true(text, values) == bool(replaced) == (number <= bound)
