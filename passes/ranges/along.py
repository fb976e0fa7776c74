"""How far something holds along the values of one size, found by bisection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..sizes import Sizes
from ..torch_private import symbol_bounds

LARGEST_SIZE = 2**40
"""No size is larger: where a search for the end of a range stops."""


def largest_where(holds: Callable[[int], bool], sizes: Sizes, symbol: Any) -> int | None:
    """The largest value of a symbol at which something holds that ends somewhere; None if it never ends."""
    _, high = symbol_bounds(sizes.shape_env, symbol)
    low: int = sizes.values[symbol]
    above = LARGEST_SIZE if high is None else high
    if holds(above):
        return None
    return last_where(holds, low, next((n for n in _doubled(low, above) if not holds(n)), above))


def smallest_where(holds: Callable[[int], bool], sizes: Sizes, symbol: Any) -> int:
    """The smallest value of a symbol at which something holds that holds from some size on."""
    least, _ = symbol_bounds(sizes.shape_env, symbol)
    below = max(least or 0, 0)
    high: int = sizes.values[symbol]
    return below if holds(below) else last_where(holds, high, below)


def last_where(holds: Callable[[int], bool], inside: int, outside: int) -> int:
    """On the way from a value at which something holds to one at which it does not, the last one at which it does."""
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside


def _doubled(start: int, end: int) -> Iterator[int]:
    while start < end:
        start = max(2 * start, 1)
        yield min(start, end)
