"""What runs on this thread, what goes wrong, and the protocols by which the engine's parts know each other.

Imports: passes
"""

from __future__ import annotations

from .errors import CheckpointError, Differs
from .execution import Execution, RegionCall, all_of, is_in_region, is_recomputing, local
from .hooks import calling_module, ends_search, is_called_by_fsdp, may_be_sharded
from .memory import storage_id
from .mode import EngineMode, support_compiled_code
from .ops import CAST, RENORM, SAC_IGNORED_OPS, OpFacts, is_cached_cast, known_facts, op_facts, op_key
from .settings import Overrides, overrides, set_checkpoint_debug_enabled, set_checkpoint_early_stop
from .store import OpKey, SavedValue, Segment, Sink, Store, adopt_child, open_segment

__all__ = [
    "CAST",
    "RENORM",
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "Differs",
    "EngineMode",
    "Execution",
    "OpFacts",
    "OpKey",
    "Overrides",
    "RegionCall",
    "SavedValue",
    "Segment",
    "Sink",
    "Store",
    "adopt_child",
    "all_of",
    "calling_module",
    "ends_search",
    "is_cached_cast",
    "is_called_by_fsdp",
    "is_in_region",
    "is_recomputing",
    "known_facts",
    "local",
    "may_be_sharded",
    "op_facts",
    "op_key",
    "open_segment",
    "overrides",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "storage_id",
    "support_compiled_code",
]
