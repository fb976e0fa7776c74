"""Sizes further and further from those at hand: all of them grown alike, or one of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..sizes import Sizes, integers
from ..torch_private import guards_of, symbol_bounds

FAR = 2**20
"""How many times the present sizes a search goes."""

PARTS_OF_ONE, PARTS_OF_SEVERAL = 2**20, 2**6
"""In how many parts the present sizes are grown. One size is, in parts so fine that a search for the end of a range
meets every value of it: a plan made for a little less would leave out what lies between. The end of a range of several
sizes is no size but a curve, of which a few points are looked at."""

TRIES_TO_ALIGN = 64
"""How many sizes below the wanted one are tried until what the graph takes for granted holds (multiples of 8, say)."""


class Growth:
    """The sizes that may change, grown from where a plan has to fit in any case."""

    def __init__(self, base: Sizes, changing: Sequence[Any]) -> None:
        self.base, self.open = base, changing
        self.whole = PARTS_OF_ONE if len(changing) == 1 else PARTS_OF_SEVERAL

    @property
    def far(self) -> Sizes:
        """Very large sizes."""
        return self.scaled(self.whole * FAR)

    def ends(self, holds: Callable[[Sizes], bool]) -> list[Sizes]:
        """The largest sizes at which something holds that ends somewhere: all grown alike, then each by itself."""
        if not holds(self.base):
            return []
        found = [self._furthest(holds, self.scaled)]
        if len(self.open) > 1:
            found += [self._furthest(holds, partial(self._stretched, symbol)) for symbol in self.open]
        return [sizes for sizes in found if sizes is not None]

    def _furthest(self, holds: Callable[[Sizes], bool], grown: Callable[[int], Sizes]) -> Sizes | None:
        """The largest sizes on a line at which something holds; None if it does not at its beginning."""
        if not holds(grown(self.whole)):
            return None
        low, high = self.whole, 2 * self.whole
        while high < self.whole * FAR and holds(grown(high)):
            low, high = high, 2 * high
        while high - low > 1 and grown(low).values != grown(high).values:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(grown(middle)) else (low, middle)
        return self._allowed(grown(low))

    def scaled(self, num_parts: int) -> Sizes:
        """The present sizes, all of them grown to so many parts of what they are."""
        return self.base.at({symbol: self._grown(symbol, num_parts) for symbol in self.open})

    def _stretched(self, symbol: Any, num_parts: int) -> Sizes:
        """One size grown, the others as small as they get."""
        least = {s: max(symbol_bounds(self.base.shape_env, s)[0] or 0, 1) for s in self.open}
        return self.base.at({**least, symbol: self._grown(symbol, num_parts)})

    def _grown(self, symbol: Any, num_parts: int) -> int:
        _, high = symbol_bounds(self.base.shape_env, symbol)
        grown: int = self.base.values[symbol] * num_parts // self.whole
        return grown if high is None else min(grown, high)

    def _allowed(self, sizes: Sizes) -> Sizes | None:
        """The nearest smaller sizes for which all holds that the graph takes for granted."""
        conditions = guards_of(sizes.shape_env)
        for step in range(TRIES_TO_ALIGN):
            lowered = {s: max(sizes.values[s] - step, min(self.base.values[s], sizes.values[s])) for s in self.open}
            candidate = sizes.at(lowered)
            if all(condition.xreplace(integers(candidate.values)) != False for condition in conditions):  # noqa: E712
                return candidate
        return None
