"""The eager engine: regions and policies without a compiler.

Decides what a call of a region keeps and what its backward computes again, op by op. Its rooms, each of which imports
only those above it:

    types       what runs on this thread, errors, and the protocols of frame and store
    state       what a forward reads and changes beside its arguments, put back for its recomputation
    offload     tensors that wait in host memory or on disk
    selective   policies: which results of ops are kept, and how they are found again
    recompute   the recomputation that backward asks for, and the checks that it is the same
    calls       the engine, and the frame of each call
    torch_api   every name of torch.utils.checkpoint, over this engine

Imports: passes
"""

from __future__ import annotations

from .calls import RegionSpec, cached_spec, noop_context_fn, run_region
from .offload import OffloadHooks
from .recompute import find_determinism_check, register_determinism_check
from .selective import Selective, note_name, watched_names
from .torch_api import (
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)
from .types import SAC_IGNORED_OPS, CheckpointError, is_cached_cast, is_in_region, is_recomputing, local

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "OffloadHooks",
    "RegionSpec",
    "Selective",
    "SelectiveCheckpointContext",
    "cached_spec",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "find_determinism_check",
    "get_device_states",
    "is_cached_cast",
    "is_in_region",
    "is_recomputing",
    "local",
    "noop_context_fn",
    "note_name",
    "register_determinism_check",
    "run_region",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "watched_names",
]
