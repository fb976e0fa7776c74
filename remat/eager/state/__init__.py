"""What a forward reads and changes beside its arguments, put back for its recomputation: tensors, generators, modes.

Imports: passes, eager.types
"""

from __future__ import annotations

from . import rng
from .ambient import Ambient, is_in_force, restored
from .arguments import SavedArguments, argument_name, changed_in_place
from .reach import Reached, generators_of, name_text, reach
from .renorm import RenormReplay, renormed_twice
from .rng import DefaultDeviceType, OpRngState, RngSnapshot, get_device_states, set_device_states
from .state import ReadGuard, WatchedState, version_of
from .swap import Copies, replayed
from .write_guard import Clearance, WriteGuard, changed_twice

__all__ = [
    "Ambient",
    "Clearance",
    "Copies",
    "DefaultDeviceType",
    "OpRngState",
    "Reached",
    "ReadGuard",
    "RenormReplay",
    "RngSnapshot",
    "SavedArguments",
    "WatchedState",
    "WriteGuard",
    "argument_name",
    "changed_in_place",
    "changed_twice",
    "generators_of",
    "get_device_states",
    "is_in_force",
    "name_text",
    "reach",
    "renormed_twice",
    "replayed",
    "restored",
    "rng",
    "set_device_states",
    "version_of",
]
