"""Regions with a budget of their own: which memory is a region's share, and how large that gets in a schedule.

A region's share is what is alive at a moment and was allocated by a node of that region call: its forward ops, those of
regions inside it, copies that backward recomputes, and the backward formulas of these ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..graph import JointGraph, RegionBudget, budgets_around
from .simulate import Simulation
from .storage import Storages


@dataclass(frozen=True, slots=True)
class SharePeak:
    """The largest share of one region."""

    num_bytes: int
    moment: int
    """When it is reached first."""


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """The budgeted regions of a graph, known by their position here, and the nodes that each of them holds."""

    budgets: tuple[RegionBudget, ...]
    """In the order in which the graph enters the regions."""
    regions_at: tuple[tuple[int, ...], ...]
    """Per node, the budgeted regions around it."""

    @staticmethod
    def find(graph: JointGraph) -> Shares:
        """Find the budgeted regions of a graph."""
        numbers: dict[RegionBudget, int] = {}
        regions_at = tuple(
            tuple(numbers.setdefault(budget, len(numbers)) for budget in budgets_around(node)) for node in graph.nodes
        )
        return Shares(tuple(numbers), regions_at)

    def profiles(self, simulation: Simulation) -> list[list[tuple[int, int]]]:
        """Per region, the moments at which its share changes, and the bytes from there on."""
        changes: list[dict[int, int]] = [{} for _ in self.budgets]
        for memory in simulation.memory:
            for region in self.regions_at[memory.node]:
                change = changes[region]
                change[memory.first] = change.get(memory.first, 0) + memory.num_bytes
                change[memory.last + 1] = change.get(memory.last + 1, 0) - memory.num_bytes
        return [_running_sums(change) for change in changes]

    def peaks(self, simulation: Simulation) -> tuple[SharePeak, ...]:
        """Per region, its largest share."""
        return tuple(_peak(profile) for profile in self.profiles(simulation))

    def masked(self, storages: Storages, region: int) -> Storages:
        """The same storages as if only one region's nodes took memory."""
        own_bytes = tuple(
            sizes if region in regions else (0,) * len(sizes)
            for sizes, regions in zip(storages.own_bytes, self.regions_at, strict=True)
        )
        workspace = {i: taken for i, taken in storages.workspace.items() if region in self.regions_at[i]}
        return replace(storages, own_bytes=own_bytes, workspace=workspace)


NO_SHARES = Shares((), ())
"""Of a graph in which no region has a budget."""


def _running_sums(changes: dict[int, int]) -> list[tuple[int, int]]:
    total, sums = 0, []
    for moment in sorted(changes):
        total += changes[moment]
        sums.append((moment, total))
    return sums


def _peak(profile: Sequence[tuple[int, int]]) -> SharePeak:
    moment, num_bytes = max(profile, key=lambda step: step[1], default=(0, 0))
    return SharePeak(num_bytes, moment)


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What each budgeted region may take, in bytes."""

    shares: Shares
    num_bytes: tuple[int, ...]
    whole_bytes: tuple[int, ...]
    """What they take if nothing is recomputed."""

    @staticmethod
    def resolve(shares: Shares, without_recompute: Simulation) -> Limits:
        """Turn fractions into bytes: they are parts of a region's share if nothing is recomputed."""
        peaks = shares.peaks(without_recompute)
        rows = zip(shares.budgets, peaks, strict=True)
        limits = tuple(_limit(budget, peak.num_bytes) for budget, peak in rows)
        return Limits(shares, limits, tuple(peak.num_bytes for peak in peaks))

    def exceeded(self, peaks: Sequence[SharePeak]) -> list[int]:
        """The regions whose share is too large."""
        rows = enumerate(zip(peaks, self.num_bytes, strict=True))
        return [region for region, (peak, limit) in rows if peak.num_bytes > limit]

    def scaled(self, simulation: Simulation, unit_bytes: int, *, counts_whole: bool) -> Simulation:
        """Restate every limit as one of `unit_bytes`, so that one number says whether all of them hold.

        What is alive at a moment becomes the largest of the shares, each stretched as its limit is to the unit, and of
        the whole graph's bytes if those are limited too.
        """
        live = list(simulation.live_bytes) if counts_whole else [0] * len(simulation.live_bytes)
        for profile, limit in zip(self.shares.profiles(simulation), self.num_bytes, strict=True):
            for moment, num_bytes in profile:
                if moment < len(live):
                    # Rounded up: what exceeds a limit exceeds the unit, however large the one and small the other.
                    live[moment] = max(live[moment], -(-num_bytes * unit_bytes // max(limit, 1)))
        return replace(simulation, live_bytes=tuple(live))


def _limit(budget: RegionBudget, without_recompute_bytes: int) -> int:
    if budget.num_bytes is not None:
        return budget.num_bytes
    assert budget.fraction is not None
    return int(budget.fraction * without_recompute_bytes)
