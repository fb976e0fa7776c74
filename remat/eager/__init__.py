"""The eager engine: regions and policies without a compiler.

Decides what a call of a region keeps and what its backward computes again, op by op. Its rooms, each of which imports
only those above it:

    types       what runs on this thread, errors, and the protocols of frame and store
    state       what a forward reads and changes beside its arguments, put back for its recomputation
    offload     tensors that wait in host memory or on disk
    selective   policies: which results of ops are kept, and how they are found again
    recompute   frames of running regions, what they saved, and the recomputation for backward
    torch_api   every name of torch.utils.checkpoint, over this engine

Imports: passes
"""

from __future__ import annotations

from remat.eager.recompute.determinism import register_determinism_check as register_determinism_check
from remat.eager.recompute.engine import RegionSpec as RegionSpec
from remat.eager.recompute.engine import cached_spec as cached_spec
from remat.eager.recompute.engine import noop_context_fn as noop_context_fn
from remat.eager.recompute.engine import run_region as run_region
from remat.eager.selective.selective import Selective as Selective
from remat.eager.types.errors import CheckpointError as CheckpointError
from remat.eager.types.execution import is_in_region as is_in_region
from remat.eager.types.execution import is_recomputing as is_recomputing
