"""The errors of the eager engine."""

from __future__ import annotations

from remat.passes.shared.errors import RematError


class CheckpointError(RematError, RuntimeError):
    """A region's recomputation cannot stand in for its forward."""


class Differs(CheckpointError):
    """A recomputation saves other tensors than its forward did."""
