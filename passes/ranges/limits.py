"""Budgets in bytes as limits on peaks, which are expressions of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..budgets import Budget
from ..memory import Memory, PeakTerms, Shares
from ..sizes import Sizes

Counts = Callable[[Memory], bool] | None


@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """A bound in bytes on what the whole step, or one region, has alive."""

    num_bytes: int
    counts: Counts
    """Which memory counts; None for all of it."""


def byte_limits(graph_shares: Shares, budget: Budget | None) -> tuple[Limit, ...]:
    """The budgets that are stated in bytes; a fraction is one at any size."""
    found = [] if budget is None or budget.num_bytes is None else [Limit(budget.num_bytes, None)]
    for region, bound in enumerate(graph_shares.budgets):
        if bound.num_bytes is not None:
            found.append(Limit(bound.num_bytes, _counts_for(graph_shares, region)))
    return tuple(found)


def _counts_for(shares: Shares, region: int) -> Callable[[Memory], bool]:
    """Say which memory counts for a region's budget."""
    return lambda memory: region in shares.regions_at[memory.node]


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """A schedule's peak under one limit."""

    peak: PeakTerms
    limit_bytes: int

    def fits(self, sizes: Sizes) -> bool:
        """Does the schedule keep within the limit at some sizes?"""
        return self.peak.at(sizes) <= self.limit_bytes

    def level(self, sizes: Sizes) -> int:
        """How often the limit must be doubled to be no less than the peak."""
        return max(0, (max(self.peak.at(sizes) - 1, 0) // max(self.limit_bytes, 1)).bit_length())
