"""Policies in eager code: which results of ops are kept, recorded in forward and found again in recomputation.

Imports: passes, eager.types, eager.state, eager.offload
"""

from __future__ import annotations

from .naming import note_name, watched_names
from .recorder import Recorder
from .replayer import Replayer
from .saved import Entry, OnMutation, answer, tensors_of, without_handles
from .selective import Selective

__all__ = [
    "Entry",
    "OnMutation",
    "Recorder",
    "Replayer",
    "Selective",
    "answer",
    "note_name",
    "tensors_of",
    "watched_names",
    "without_handles",
]
