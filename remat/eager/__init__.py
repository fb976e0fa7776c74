"""The eager engine: regions and policies without a compiler."""

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
