"""Where a range of sizes begins and ends, as conditions in sympy's form: outside of them one plans again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..memory import sum_grows
from ..sizes import NotExpressible, Sizes, integers, write
from ..torch_private import sympy_functions
from .along import largest_where, smallest_where
from .limits import Bounded


@dataclass(frozen=True, slots=True, eq=False)
class Guards:
    """Says of peaks where they are within their limits."""

    base: Sizes
    """Where a plan has to fit in any case."""
    open: Sequence[Any]
    """The symbols whose sizes may change."""
    fixed: frozenset[Any]
    """Symbols of which the user wants one graph for all sizes."""

    def upper(self, bounded: Sequence[Bounded]) -> tuple[Any, ...]:
        """Conditions on sizes under which peaks keep within their limits."""
        import sympy

        symbol = self._only(bounded)
        if symbol is not None:
            high = largest_where(lambda n: all(b.fits(self.base.at({symbol: n})) for b in bounded), self.base, symbol)
            return () if high is None else (sympy.Le(symbol, high),)
        return tuple(sympy.Le(self._backed(e), b.limit_bytes) for b in bounded for e in b.peak.expressions)

    def lower(self, bounded: Sequence[Bounded], level: int) -> tuple[Any, ...]:
        """A condition on sizes under which the peaks stay above half of what they may be at this level."""
        import sympy

        def exceeds(sizes: Sizes) -> bool:
            return max(b.level(sizes) for b in bounded) >= level

        symbol = self._only(bounded)
        if symbol is not None:
            low = smallest_where(lambda n: exceeds(self.base.at({symbol: n})), self.base, symbol)
            return (sympy.Ge(symbol, low),)
        most = max(bounded, key=lambda b: b.level(self.base))
        threshold = most.limit_bytes * 2 ** (level - 1)
        rows = [self._backed(row) for row in most.peak.expressions]
        peak = rows[0] if len(rows) == 1 else sympy_functions()["Max"](*rows)
        return (sympy.Gt(peak, threshold),) if self.base.value_of(peak) > threshold else ()

    def _only(self, bounded: Sequence[Bounded]) -> Any:
        """The one symbol whose size may change, if peaks are certain to grow with it."""
        changing = [*self.open, *(s for s, bound in self.base.bounds.items() if bound.free_symbols)]
        if len(self.open) != 1 or not all(sum_grows(bound) for bound in self.base.bounds.values()):
            return None
        return self.open[0] if all(b.peak.grows_with(s) for b in bounded for s in changing) else None

    def _backed(self, expression: Any) -> Any:
        """An expression of sizes of inputs alone: others are replaced by what they cannot exceed."""
        others = {s: n for s, n in self.base.values.items() if s not in self.base.backed or s in self.fixed}
        return expression.xreplace(self.base.bounds).xreplace(integers(others))

    def may_be(self, condition: Any) -> bool:
        """Can a condition be one for the graph?"""
        # Without a symbol it is true, or it is false at all sizes: a plan that exceeds the budget is all there is.
        return bool(condition.free_symbols) and not condition.free_symbols & self.fixed


def relation_text(relation: Any) -> str:
    """A condition as plans state it."""
    try:
        return f"{write(relation.lhs)} {relation.rel_op} {write(relation.rhs)}"
    except NotExpressible:
        return str(relation)
