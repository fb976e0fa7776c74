"""Searches with less effort, for tests of what holds however good plans are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.passes.search import tuning


def search_less(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
    """Simulate at most so many nodes in one search."""
    for name in ("SMALL", "MIDDLE", "LARGE"):
        usual = getattr(tuning, name)
        least = min(num_nodes, usual.nodes_simulated)
        monkeypatch.setattr(tuning, name, replace(usual, nodes_simulated=least, nodes_in_region=num_nodes))
