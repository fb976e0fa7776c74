"""What a step really did: ops that ran, bytes that were alive, beside what was predicted.

Imports: passes, eager, regions, compiled, report.data, report.forms, report.frontier
"""

from __future__ import annotations

from .observation import Observation, observe

__all__ = [
    "Observation",
    "observe",
]
