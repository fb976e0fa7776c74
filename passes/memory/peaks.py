"""The activation peak as an expression: per moment the polynomial of what is alive, and of these the ones that matter.

What is alive when does not depend on the sizes, so the peak at any sizes is the largest of one polynomial per moment.
A moment is left out if another one is known to be no less: if it has at least the same coefficients when sizes are
written as their least value plus something that is not negative.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..sizes import NotExpressible, Sizes, Terms, largest_of, write
from ..torch_private import symbol_bounds
from .simulate import Memory, Simulation

Row = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PeakTerms:
    """The largest of some polynomials."""

    monomials: tuple[Any, ...]
    """Sympy expressions."""
    rows: tuple[Row, ...]
    """Per polynomial, its coefficients; none for what allocates nothing."""

    def at(self, sizes: Sizes) -> int:
        """The value at given sizes."""
        values = [sizes.value_of(monomial) for monomial in self.monomials]
        return max((_dot(row, values) for row in self.rows), default=0)

    @property
    def expressions(self) -> tuple[Any, ...]:
        """The polynomials in sympy's form."""
        return tuple(sum((c * m for c, m in zip(row, self.monomials, strict=True)), start=0) for row in self.rows)

    def text(self) -> str:
        """The peak as text; empty if it cannot be written down."""
        try:
            return largest_of([write(_sympy(expression)) for expression in self.expressions]) if self.rows else "0"
        except NotExpressible:
            return ""

    def grows_with(self, symbol: Any) -> bool:
        """True if it is certain that a larger size never gives a smaller peak, the others staying as they are."""
        used = [m for k, m in enumerate(self.monomials) if symbol in m.free_symbols and any(r[k] for r in self.rows)]
        columns = [k for k, m in enumerate(self.monomials) if symbol in m.free_symbols]
        return all(_is_product(m) for m in used) and all(row[k] >= 0 for row in self.rows for k in columns)


def terms_text(terms: Terms) -> str:
    """A polynomial as text; empty if it is a number, or cannot be written down."""
    whole = sum((coefficient * monomial for monomial, coefficient in terms), start=0)
    if isinstance(whole, int) or whole.is_Integer:
        return ""
    try:
        return write(whole)
    except NotExpressible:
        return ""


def peak_terms(simulation: Simulation, sizes: Sizes, counts: Callable[[Memory], bool] | None = None) -> PeakTerms:
    """The peak of a simulated step as an expression, of all memory or of what `counts`."""
    memory = [m for m in simulation.memory if counts is None or counts(m)]
    monomials = list(dict.fromkeys(monomial for m in memory for monomial, _ in sizes.table[m.size]))
    column = {monomial: k for k, monomial in enumerate(monomials)}
    changes: dict[int, list[int]] = {}
    for m in memory:
        _add(changes, m.first, sizes.table[m.size], column, 1)
        _add(changes, m.last + 1, sizes.table[m.size], column, -1)
    rows = _running_sums(changes, len(monomials))
    return PeakTerms(tuple(monomials), _largest(rows, _above_least(monomials, sizes)))


def _add(changes: dict[int, list[int]], moment: int, terms: Terms, column: Mapping[Any, int], sign: int) -> None:
    row = changes.get(moment)
    if row is None:
        row = changes[moment] = [0] * len(column)
    for monomial, coefficient in terms:
        row[column[monomial]] += sign * coefficient


def _running_sums(changes: Mapping[int, Sequence[int]], width: int) -> Iterable[Row]:
    """What is alive after each change that adds something, unless the next one only adds to it."""
    ordered = [changes[moment] for moment in sorted(changes) if any(changes[moment])]
    total = [0] * width
    rows: dict[Row, None] = {}
    for change, following in pairwise([*ordered, [-1]]):
        total = list(map(operator.add, total, change))
        if max(change) > 0 and min(following) < 0:
            rows[tuple(total)] = None
    return rows


def _above_least(monomials: Sequence[Any], sizes: Sizes) -> list[dict[int, int]]:
    """Per monomial, its coefficients if each symbol is written as its least value plus another symbol."""
    import sympy

    least = {symbol: max(symbol_bounds(sizes.shape_env, symbol)[0] or 0, 0) for symbol in sizes.symbols}
    shifted = {symbol: symbol + low for symbol, low in least.items() if low}
    column: dict[Any, int] = {}
    found = []
    for monomial in monomials:
        plain = all(f.is_Symbol or (f.is_Pow and f.base.is_Symbol) or f.is_Integer for f in _factors(monomial))
        expanded = sympy.expand(monomial.xreplace(shifted)) if plain else monomial
        terms = expanded.as_coefficients_dict().items()
        found.append({column.setdefault(m, len(column)): int(c) for m, c in terms})
    return found


def _largest(rows: Iterable[Row], above_least: Sequence[Mapping[int, int]]) -> tuple[Row, ...]:
    """The rows that no other one dominates, in a stable order."""
    width = 1 + max((k for column in above_least for k in column), default=-1)
    kept: list[tuple[Row, Row]] = []
    for row in sorted(rows, key=lambda row: (-sum(row), row)):
        shifted = [0] * width
        for coefficient, column in zip(row, above_least, strict=True):
            for k, factor in column.items() if coefficient else ():
                shifted[k] += coefficient * factor
        if any(row) and not any(all(map(operator.ge, other, shifted)) for _, other in kept):
            kept = [(r, s) for r, s in kept if not all(map(operator.ge, shifted, s))]
            kept.append((row, tuple(shifted)))
    return tuple(row for row, _ in kept)


def _dot(row: Row, values: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(row, values, strict=True))


def _is_product(monomial: Any) -> bool:
    """True for a product of symbols and of what grows with them."""
    return all(_grows(factor) for factor in _factors(monomial))


def _factors(monomial: Any) -> Sequence[Any]:
    return monomial.args if monomial.is_Mul else (monomial,)


def _grows(factor: Any) -> bool:
    if factor.is_Pow:
        return bool(factor.exp.is_Integer and factor.exp > 0) and _grows(factor.base)
    if type(factor).__name__ in ("FloorDiv", "CleanDiv", "CeilDiv"):
        return bool(factor.args[1].is_Integer and factor.args[1] > 0) and sum_grows(factor.args[0])
    if type(factor).__name__ in ("Max", "Min"):
        return all(sum_grows(arg) for arg in factor.args)
    return bool(factor.is_Symbol or (factor.is_Integer and factor >= 0))


def sum_grows(expression: Any) -> bool:
    """True for a sum whose terms grow; constants may be negative."""
    return all(term.is_Integer or _is_product(term) for term in expression.as_ordered_terms())


def _sympy(expression: Any) -> Any:
    import sympy

    return sympy.sympify(expression)
