"""The joint graph as planning sees it: equal computations merged, roles for nodes, what may be done with each value.

Decides which values may be kept, which may be recomputed, and gives a reason where one may not. Comes in: the FX graph
that AOTAutograd has traced. Goes out: `JointGraph` and `Constraints`.

Imports: torch_private, shared, ops
"""

from __future__ import annotations

from .constraints import (
    Constraint,
    Constraints,
    Reason,
    base_is_viewed,
    base_of,
    explain_policy,
    find_constraints,
    is_offloaded,
    split_closing_writes,
    written_arguments,
)
from .joint_graph import (
    FORWARD_SIDE,
    PARTITIONER_TAG,
    JointGraph,
    Role,
    backward_inputs,
    describe_graph,
    describe_value,
    forward_inputs,
    is_backward_state,
    is_tagged_backward,
    leaves,
    output_descriptors,
    tensor_of,
)
from .layouts import is_certain, is_laid_out_by_itself
from .overwrite import hides_sharing, overwritable, overwritten_by, plain_call, write_over
from .region_tag import (
    NAME_TAG,
    PORT_TAG,
    RegionBudget,
    RegionTag,
    budgets_around,
    is_port,
    policy_of,
    preserves_rng_state,
    region_fields,
    region_of,
    region_of_formula,
    repair_tags,
    tag,
    untag,
    views,
    whole_views,
)

__all__ = [
    "FORWARD_SIDE",
    "NAME_TAG",
    "PARTITIONER_TAG",
    "PORT_TAG",
    "Constraint",
    "Constraints",
    "JointGraph",
    "Reason",
    "RegionBudget",
    "RegionTag",
    "Role",
    "backward_inputs",
    "base_is_viewed",
    "base_of",
    "budgets_around",
    "describe_graph",
    "describe_value",
    "explain_policy",
    "find_constraints",
    "forward_inputs",
    "hides_sharing",
    "is_backward_state",
    "is_certain",
    "is_laid_out_by_itself",
    "is_offloaded",
    "is_port",
    "is_tagged_backward",
    "leaves",
    "output_descriptors",
    "overwritable",
    "overwritten_by",
    "plain_call",
    "policy_of",
    "preserves_rng_state",
    "region_fields",
    "region_of",
    "region_of_formula",
    "repair_tags",
    "split_closing_writes",
    "tag",
    "tensor_of",
    "untag",
    "views",
    "whole_views",
    "write_over",
    "written_arguments",
]
