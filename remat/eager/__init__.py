"""The eager engine: regions and policies without a compiler."""

from __future__ import annotations

from remat.eager.determinism import register_determinism_check as register_determinism_check
from remat.eager.engine import RegionSpec as RegionSpec
from remat.eager.engine import cached_spec as cached_spec
from remat.eager.engine import noop_context_fn as noop_context_fn
from remat.eager.engine import run_region as run_region
from remat.eager.errors import CheckpointError as CheckpointError
from remat.eager.execution import is_in_region as is_in_region
from remat.eager.execution import is_recomputing as is_recomputing
from remat.eager.selective import Selective as Selective
