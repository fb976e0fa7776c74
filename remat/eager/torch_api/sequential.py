"""A chain of functions cut into segments, all but the last one a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def run_chain(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return a function that applies others one after the other."""

    def chain(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return chain


def split_in_segments(
    functions: nn.Sequential | Sequence[Any], segments: int
) -> tuple[list[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return the regions and what runs after them: equal lengths, the remainder goes to the last one.

    More segments than functions means one function each.
    """
    chain: list[Any] = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if segments < 1:
        raise ValueError(f"segments must be at least 1, got {segments}")
    length = max(1, len(chain) // segments)
    num_regions = min(segments, len(chain)) - 1
    regions = [run_chain(chain[i * length : (i + 1) * length]) for i in range(num_regions)]
    return regions, run_chain(chain[max(num_regions, 0) * length :])
