"""Calls of regions: the engine that runs them, and the frame that each call has until its backward is done.

Comes in: a function, its arguments, what was said about the region. Goes out: its results, and a frame that backward
asks for what it did not keep.

Imports: passes, eager.types, eager.state, eager.offload, eager.selective, eager.recompute
"""

from __future__ import annotations

from .engine import RegionSpec, cached_spec, noop_context_fn, run_region

__all__ = [
    "RegionSpec",
    "cached_spec",
    "noop_context_fn",
    "run_region",
]
