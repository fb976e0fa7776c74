"""For which values of a symbol is a plan still the best one: of all legal choices, or of the plans that were found?

The plain cut is the best of all legal choices. With prices that are polynomials, the prices at which it is the cheapest
are a convex cone, so a range of sizes is in it if the control points of the prices' Bezier curve on that range are: as
many minimum cuts as the degree has coefficients prove it for the whole range. Where a price is the larger of two
polynomials, ranges end at the sizes at which another one of them is the larger.

A plan for a budget comes from a search, and all that can be said of it is how it compares with the other plans that
were found: it is the fastest one that fits. Times and peaks are polynomials, whose Bernstein coefficients prove it.

What is no polynomial, or would take too long, is looked at for some sizes by others, and said to be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..memory.peaks import PeakTerms
from ..prices.cost import Costs
from ..search.problem import FlowProblem
from ..sizes.symbols import Sizes
from .polynomials import Coefficients, Line, NotPolynomial, bernstein, changes_of_sign, value_at
from .price_expressions import Price, Prices

LARGEST_PRICE_SUM = 2**30
"""What all prices of a cut add up to when they are made whole: a compiled solver counts in 32 bits."""

SLACK_TICKS = 1.0
"""A plan that is slower by no more than this, beside what rounding prices to whole ticks has cost it where it was made,
is still the best one."""

VALUES_CUT = 60_000
"""The effort for one symbol: minimum cuts times their values. A value takes some ten microseconds."""

MOST_HALVINGS = 4_000
"""How many ranges are looked at to compare plans."""


class TooLong(Exception):
    """A proof takes longer than a report should."""


# -------------------------------------------------------------------------------------------------- the plain cut


class CutProof:
    """Is a cut the cheapest legal choice on a range of one symbol's values?"""

    def __init__(self, problem: FlowProblem, prices: Prices, line: Line) -> None:
        self.problem, self.line = problem, line
        self.cut = problem.cut()
        self.effort_left = VALUES_CUT
        distinct = dict.fromkeys((*prices.save, *prices.recompute))
        self.number = {price: k for k, price in enumerate(distinct)}
        self.polynomials = [_along(price, line) for price in distinct]
        self.degree = max(1, *(len(p) - 1 for row in self.polynomials for p in row))
        self.save = [self.number[price] for price in prices.save]
        self.recompute = [self.number[price] for price in prices.recompute]
        self._known: dict[tuple[float, ...], float] = {}
        self.slack = SLACK_TICKS
        self.slack += max(self.gap_at(line.sizes.values[line.symbol]), 0.0)

    def holds_at(self, value: int) -> bool:
        """Is the cut the cheapest choice at one size?"""
        return self.gap_at(value) <= self.slack

    def gap_at(self, value: int) -> float:
        """What the cut costs more than the cheapest choice at one size."""
        return self._gap([max(value_at(p, value) for p in row) for row in self.polynomials])

    def holds_on(self, low: int, high: int) -> bool:
        """Is it proved to be the cheapest choice at all sizes of a range?"""
        ends = {end for row in self.polynomials for end in self._changes(row, low, high)}
        starts = [low, *(end + 1 for end in sorted(ends))]
        return all(self._holds_on_piece(a, b) for a, b in zip(starts, [*sorted(ends), high], strict=True))

    def _changes(self, row: Sequence[Coefficients], low: int, high: int) -> set[int]:
        """After which sizes another one of a price's polynomials is the largest."""
        found: set[int] = set()
        for k, first in enumerate(row):
            for second in row[:k]:
                found.update(changes_of_sign(_difference(first, second), low, high))
        return found

    def _holds_on_piece(self, low: int, high: int) -> bool:
        points = [bernstein(self._largest(row, low, high), low, high, self.degree) for row in self.polynomials]
        if all(min(p) >= 0 for p in points) and all(
            self._gap([p[k] for p in points]) <= self.slack for k in range(self.degree + 1)
        ):
            return True
        if high - low <= 1:
            return self.holds_at(low) and self.holds_at(high)
        middle = (low + high) // 2
        return self._holds_on_piece(low, middle) and self._holds_on_piece(middle + 1, high)

    def _largest(self, row: Sequence[Coefficients], low: int, high: int) -> Coefficients:
        """The one of a price's polynomials that is the largest on a range on which that does not change."""
        return max(row, key=lambda p: value_at(p, low) + value_at(p, (low + high) // 2) + value_at(p, high))

    def _gap(self, amounts: Sequence[float]) -> float:
        """What the cut costs more than the cheapest choice at given prices, in ticks."""
        key = tuple(amounts)
        if key not in self._known:
            self.effort_left -= len(self.problem.bases)
            if self.effort_left < 0:
                raise TooLong
            self._known[key] = self._solved_gap(amounts)
        return self._known[key]

    def _solved_gap(self, amounts: Sequence[float]) -> float:
        whole = sum(amounts[self.save[i]] + amounts[self.recompute[i]] for i in self.problem.bases)
        if not whole:
            return 0.0
        scale = LARGEST_PRICE_SUM / (8 * whole)  # a policy's preference multiplies some prices
        costs = Costs(
            save_ticks=tuple(round(scale * amounts[k]) for k in self.save),
            recompute_ticks=tuple(round(scale * amounts[k]) for k in self.recompute),
            num_bytes=self.problem.costs.num_bytes,
            run_ticks=self.problem.costs.run_ticks,
        )
        priced = replace(self.problem, costs=costs)
        excess = priced.price_of(self.cut) - priced.cut().price
        return max(0, excess - 2 * len(self.problem.bases)) / scale if excess else 0.0


def _along(price: Price | None, line: Line) -> list[Coefficients]:
    if price is None:
        raise NotPolynomial("a price is known at the sizes of the example only")
    return [line.polynomial(polynomial) for polynomial in price.alternatives]


def _difference(first: Coefficients, second: Coefficients) -> Coefficients:
    width = max(len(first), len(second))
    padded = [(*p, *[0.0] * (width - len(p))) for p in (first, second)]
    return tuple(a - b for a, b in zip(*padded, strict=True))


# -------------------------------------------------------------------------------------------------- plans found


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a schedule takes at any sizes."""

    ticks: Mapping[Price, int]
    """How often each price is paid."""
    peaks: tuple[PeakTerms, ...]
    """Per limit, what counts for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A part of so many bytes, or of another peak."""

    num_bytes: int = 0
    part: float = 1.0
    whole: PeakTerms | None = None

    def at(self, sizes: Sizes) -> int:
        """The limit at given sizes."""
        return int(self.part * (self.num_bytes if self.whole is None else self.whole.at(sizes)))

    def rows(self, line: Line) -> list[Coefficients]:
        """The limit as the largest of some polynomials."""
        if self.whole is None:
            return [(self.part * self.num_bytes,)]
        return [tuple(self.part * c for c in row) for row in _peak_rows(self.whole, line)]


class PoolProof:
    """Is a plan the fastest of those found that keep within the limits, on a range of one symbol's values?"""

    def __init__(self, own: Measured, rivals: Sequence[Measured], bounds: Sequence[Bound], line: Line) -> None:
        self.line = line
        self.bounds = [bound.rows(line) for bound in bounds]
        self.own_peaks = [_peak_rows(peak, line) for peak in own.peaks]
        self.rivals = [(_saved_ticks(own, rival, line), [_peak_rows(p, line) for p in rival.peaks]) for rival in rivals]
        self.halvings_left = MOST_HALVINGS

    def holds_at(self, value: int) -> bool:
        """Is it at one size?"""
        return self.holds_on(value, value)

    def holds_on(self, low: int, high: int) -> bool:
        """Is it proved to be at all sizes of a range?"""
        if not self._on(low, high, lambda a, b: _fits(self.own_peaks, self.bounds, a, b)):
            return False
        return all(self._on(low, high, self._beats(rival)) for rival in self.rivals)

    def _beats(self, rival: tuple[Any, Any]) -> Callable[[int, int], bool]:
        extra, peaks = rival
        return lambda low, high: _is_slower(extra, low, high) or _exceeds(peaks, self.bounds, low, high)

    def _on(self, low: int, high: int, is_certain: Callable[[int, int], bool]) -> bool:
        """Prove something for a range, or for the parts that it takes."""
        if is_certain(low, high):
            return True
        self.halvings_left -= 1
        if self.halvings_left < 0:
            raise TooLong
        if low == high or not (is_certain(low, low) and is_certain(high, high)):
            return False
        middle = (low + high) // 2
        return self._on(low, middle, is_certain) and self._on(middle + 1, high, is_certain)


def _saved_ticks(own: Measured, rival: Measured, line: Line) -> list[tuple[int, list[Coefficients]]]:
    """What a rival pays more, price by price; negative where it pays less."""
    counts = {price: rival.ticks.get(price, 0) - own.ticks.get(price, 0) for price in {**own.ticks, **rival.ticks}}
    return [(count, _along(price, line)) for price, count in counts.items() if count]


def _is_slower(extra: Sequence[tuple[int, list[Coefficients]]], low: int, high: int) -> bool:
    """Is it certain that a rival is no faster on a range? Prices that are paid more often are bounded from below."""
    degree = max((len(p) for _, row in extra for p in row), default=1)
    total, rounding = [0.0] * (degree + 1), SLACK_TICKS
    for count, row in extra:
        points = [bernstein(p, low, high, degree) for p in row]
        bound = max(points, key=sum) if count > 0 else tuple(max(column) for column in zip(*points, strict=True))
        total = [t + count * b for t, b in zip(total, bound, strict=True)]
        rounding += abs(count)
    return min(total) >= -rounding


def _fits(peaks: Sequence[list[Coefficients]], bounds: Sequence[list[Coefficients]], low: int, high: int) -> bool:
    """Is it certain that peaks keep within their bounds on a range?"""
    pairs = zip(peaks, bounds, strict=True)
    return all(
        any(_is_positive(bound, row, low, high) for bound in bounds_of) for rows, bounds_of in pairs for row in rows
    )


def _exceeds(peaks: Sequence[list[Coefficients]], bounds: Sequence[list[Coefficients]], low: int, high: int) -> bool:
    """Is it certain that one of the peaks exceeds its bound all over a range?"""
    pairs = zip(peaks, bounds, strict=True)
    return any(
        any(all(_is_positive(row, bound, low, high, by=1e-6) for bound in bounds_of) for row in rows)
        for rows, bounds_of in pairs
    )


def _is_positive(first: Coefficients, second: Coefficients, low: int, high: int, by: float = 0.0) -> bool:
    difference = _difference(first, second)
    return min(bernstein(difference, low, high, max(1, len(difference) - 1))) >= by


def _peak_rows(peak: PeakTerms, line: Line) -> list[Coefficients]:
    rows = [line.polynomial(list(zip(peak.monomials, row, strict=True))) for row in peak.rows]
    return list(dict.fromkeys(rows)) or [(0.0,)]


def widest(holds_at: Callable[[int], bool], value: int, low: int, high: int, coarseness: int = 0) -> tuple[int, int]:
    """How far around a value something holds wherever it was looked at: each step goes twice as far.

    The ends are found by bisection, exactly or to one part in `coarseness`.
    """
    return _end(holds_at, value, low, coarseness), _end(holds_at, value, high, coarseness)


def _end(holds_at: Callable[[int], bool], value: int, limit: int, coarseness: int) -> int:
    inside, step = value, max(1, value // 4)
    while inside != limit:
        outside = max(limit, value - step) if limit < value else min(limit, value + step)
        if not holds_at(outside):
            break
        inside, step = outside, 2 * step
    if inside == limit:
        return limit
    while abs(outside - inside) > max(1, inside // coarseness if coarseness else 1):
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if holds_at(middle) else (inside, middle)
    return inside
