"""Tensors that wait for backward in host memory or on disk, and the hooks that send them there.

Imports: passes, eager.types, eager.state
"""

from __future__ import annotations

from .copies import Away, offload
from .hooks import OffloadHooks

__all__ = [
    "Away",
    "OffloadHooks",
    "offload",
]
