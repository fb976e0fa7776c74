"""A budget on the activation peak: what the user promises to be content with. Reading one loads no planner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..memory import Storages
    from ..search import Planner

SMALLEST_BYTES = 1024
"""A smaller whole number is more likely a slip than a size: 1 is neither 1.0 nor one byte."""

LOWEST_PLAN_OPTION = 'on_infeasible="minimum"'
"""What a compiled program can ask for instead of an error; a region outside of one has no such option."""

FUSION_MARGIN = 0.07
"""What is left free of a budget where a compiler fuses and nobody compares its kernels with the budget, or only at one
of many sizes: peaks were measured up to 7 % above the simulated ones (most are within 1 %)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on the activation peak, as the user stated it."""

    text: str
    """The user's words, for messages."""
    fraction: float | None = None
    """Of the peak without recomputation."""
    num_bytes: int | None = None
    take_minimum: bool = False
    """Where the bound cannot be met, warn and take the lowest plan instead of raising an error."""
    margin: float = 0.0
    """The part of it that is left free for what a compiler adds to the simulated peak."""
    is_for_lowest: bool = False
    """Take the lowest plan in any case, to see what a compiler makes of that."""

    def margin_in(self, storages: Storages) -> float:
        """What part of the bound is left free in one graph."""
        return max(self.margin, least_margin(storages))

    def safe_bytes(self, storages: Storages, budget_bytes: int) -> int:
        """The bound that a simulated peak has to keep within."""
        return int((1 - self.margin_in(storages)) * budget_bytes)

    def promised_bytes(self, storages: Storages, peak_bytes: int) -> int:
        """The smallest bound that a schedule with a simulated peak keeps within for certain."""
        return math.ceil(peak_bytes / (1 - self.margin_in(storages)))

    def resolve(self, planner: Planner) -> int:
        """The bound in bytes for one graph."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.fraction is not None
        return int(self.fraction * planner.without_recompute.peak_bytes)


def least_margin(storages: Storages) -> float:
    """What is left free whatever the budget: where sizes are symbols, kernels are seen at one size only."""
    return FUSION_MARGIN if storages.executor.fuses and storages.sizes.symbols else 0.0


@dataclass(frozen=True, slots=True)
class RegionShare:
    """What one call of a region with a budget has allocated at its worst moment."""

    path: str
    budget_bytes: int
    predicted_bytes: int
