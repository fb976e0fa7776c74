"""Marked code: `@checkpoint_region`, policies, names and wrappers, and how a region gets into a traced graph.

Comes in: functions and modules with options. Goes out: calls of the eager engine, or while torch traces, an operator
of ours with region, policy and name on each node.

Imports: passes, eager
"""

from __future__ import annotations

from . import policies
from .applied import Applied, Target, apply, remove
from .carrier import inside_broken_regions, operator_of
from .engines import Runner, plan_with, untraceable
from .naming import name
from .policies import (
    by_module,
    bytes_above,
    bytes_below,
    every_nth,
    first_of,
    flops_above,
    offload_all,
    offload_names,
    recompute_all,
    save_all,
    save_all_but_names,
    save_matmuls,
    save_names,
    save_ops,
)
from .region import RegionCall, RegionOptions, checkpoint_region, is_recomputing, region_options
from .wrappers import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
    unwrap,
)

__all__ = [
    "ActivationWrapper",
    "Applied",
    "CheckpointImpl",
    "CheckpointWrapper",
    "OffloadWrapper",
    "RegionCall",
    "RegionOptions",
    "Runner",
    "Target",
    "apply",
    "apply_activation_checkpointing",
    "by_module",
    "bytes_above",
    "bytes_below",
    "checkpoint_region",
    "checkpoint_wrapper",
    "every_nth",
    "first_of",
    "flops_above",
    "inside_broken_regions",
    "is_recomputing",
    "name",
    "offload_all",
    "offload_names",
    "offload_wrapper",
    "operator_of",
    "plan_with",
    "policies",
    "recompute_all",
    "region_options",
    "remove",
    "save_all",
    "save_all_but_names",
    "save_matmuls",
    "save_names",
    "save_ops",
    "untraceable",
    "unwrap",
]
