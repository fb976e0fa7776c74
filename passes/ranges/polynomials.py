"""Polynomials along one symbol, and what is certain of them on a whole range of its values.

On a range a polynomial lies between the least and the largest of its Bernstein coefficients there (Farouki, "The
Bernstein polynomial basis: a centennial retrospective", 2012): a sign that all of them have is a proof. Where they
differ, the halves of the range say more, down to two neighbouring whole numbers, which are looked at themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import comb
from typing import TYPE_CHECKING, Any

from ..sizes.symbols import Sizes

if TYPE_CHECKING:
    from .price_expressions import Polynomial

Coefficients = tuple[float, ...]
"""Of a polynomial in one symbol, the constant first."""


class NotPolynomial(Exception):
    """Something is no polynomial of a symbol."""


class Line:
    """All values of one symbol, the others being what they were; sizes that it bounds move with it."""

    def __init__(self, sizes: Sizes, symbol: Any) -> None:
        self.sizes, self.symbol = sizes, symbol
        self._others = {s: n for s, n in sizes.values.items() if s != symbol and s not in sizes.bounds}
        self._known: dict[Any, Coefficients] = {}

    def at(self, value: int) -> Sizes:
        """The sizes at one of its values."""
        return self.sizes.at({self.symbol: value})

    def monomial(self, monomial: Any) -> Coefficients:
        """A monomial of all symbols as a polynomial of this one."""
        found = self._known.get(monomial)
        if found is None:
            found = self._known[monomial] = self._coefficients(monomial)
        return found

    def _coefficients(self, monomial: Any) -> Coefficients:
        import sympy

        moving = monomial.xreplace(self.sizes.bounds).xreplace({s: sympy.Integer(n) for s, n in self._others.items()})
        if not moving.is_polynomial(self.symbol) or moving.free_symbols - {self.symbol}:
            raise NotPolynomial(str(monomial))
        found = sympy.Poly(moving, self.symbol).all_coeffs() if moving.free_symbols else [moving]
        return tuple(float(c) for c in reversed(found))

    def polynomial(self, terms: Polynomial | Sequence[tuple[Any, float]]) -> Coefficients:
        """A polynomial of all symbols as one of this one."""
        total: list[float] = [0.0]
        for monomial, factor in terms:
            own = self.monomial(monomial)
            total += [0.0] * (len(own) - len(total))
            for power, coefficient in enumerate(own):
                total[power] += factor * coefficient
        return tuple(total)


def value_at(coefficients: Coefficients, x: float) -> float:
    """The value of a polynomial."""
    total = 0.0
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


def bernstein(coefficients: Coefficients, low: int, high: int, degree: int) -> Coefficients:
    """The Bernstein coefficients of a polynomial on a range; the first and last are its values at the ends."""
    rows = _powers(low, high, degree)
    return tuple(
        sum(c * row[power] for power, c in enumerate(coefficients)) for row in (rows[k] for k in range(degree + 1))
    )


@lru_cache(maxsize=256)
def _powers(low: int, high: int, degree: int) -> tuple[Coefficients, ...]:
    """Per Bernstein coefficient, what the powers of the symbol contribute to it."""
    return tuple(
        tuple(
            sum(
                comb(k, i) * comb(degree - k, j - i) * high**i * low ** (j - i)
                for i in range(max(0, j + k - degree), 1 + min(k, j))
            )
            / comb(degree, j)
            for j in range(degree + 1)
        )
        for k in range(degree + 1)
    )


def changes_of_sign(coefficients: Coefficients, low: int, high: int) -> Iterator[int]:
    """The whole numbers after which a polynomial may have another sign, in rising order."""
    found = bernstein(coefficients, low, high, max(len(coefficients) - 1, 1))
    if min(found) >= 0 or max(found) <= 0:
        return
    if high - low <= 1:
        yield low
        return
    middle = (low + high) // 2
    yield from changes_of_sign(coefficients, low, middle)
    if value_at(coefficients, middle) * value_at(coefficients, middle + 1) <= 0:  # it may be zero at a whole number
        yield middle
    yield from changes_of_sign(coefficients, middle + 1, high)
