"""The errors of the eager engine."""

from __future__ import annotations

from ...passes.shared import RematError


class CheckpointError(RematError, RuntimeError):
    """A region's recomputation cannot stand in for its forward."""


class Differs(CheckpointError):
    """A recomputation saves other tensors than its forward did."""
