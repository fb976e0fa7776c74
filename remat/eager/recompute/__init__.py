"""Frames of running regions, what they saved, and the recomputation that backward asks for.

Imports: passes, eager.types, eager.state, eager.offload, eager.selective
"""

from __future__ import annotations

from .determinism import find_determinism_check, register_determinism_check
from .engine import RegionSpec, cached_spec, noop_context_fn, run_region

__all__ = [
    "RegionSpec",
    "cached_spec",
    "find_determinism_check",
    "noop_context_fn",
    "register_determinism_check",
    "run_region",
]
