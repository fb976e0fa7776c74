"""The recomputation that backward asks for: what a forward saved, running it again, and the checks that it is the same.

Imports: passes, eager.types, eager.state, eager.offload, eager.selective
"""

from __future__ import annotations

from . import collectives
from .debug import DebugLogs
from .determinism import MetadataFunction, default_metadata, find_determinism_check, noted, register_determinism_check
from .forward import Forward
from .holders import Holder, Overwritten
from .rerun import Recomputation, settle

__all__ = [
    "DebugLogs",
    "Forward",
    "Holder",
    "MetadataFunction",
    "Overwritten",
    "Recomputation",
    "collectives",
    "default_metadata",
    "find_determinism_check",
    "noted",
    "register_determinism_check",
    "settle",
]
