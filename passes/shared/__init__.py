"""Words that both engines use: errors, policies, facts about operators, lines of source, values on disk.

Comes in: single operators, tensors, texts. Goes out: what is known of them, and exceptions that say what to do.

Imports: torch_private
"""

from __future__ import annotations

from .copy_op import copied_alike, copy_alike_op, is_copy_alike
from .disk import DiskTensor, goes_to_disk
from .disk_op import is_to_disk, to_disk_op
from .errors import (
    InfeasibleBudget,
    InfeasibleCut,
    OffloadError,
    OptionError,
    PlanMismatch,
    RankMismatch,
    RematError,
    VerificationError,
    causes_of,
)
from .executor import NODE_BY_NODE, Executor
from .fields import NOT_STORED, Damaged, read, refused, shown, stored
from .files import form_of, parsed_file, replace_file
from .fingerprint import fingerprint
from .mask_op import bernoulli_like_op
from .module_path import current_module_path, ends_match, matches, path_of_node
from .name_op import name_op
from .op_facts import (
    COLLECTIVE_NAMESPACES,
    FUSED_KINDS,
    INLINED_KINDS,
    Kind,
    OpFacts,
    facts_of,
    facts_of_call,
    is_matmul,
)
from .out_of_memory import add_advice, advising, is_out_of_memory
from .policy import (
    OFFLOADS,
    PREFERENCES,
    RECOMPUTES,
    CheckpointPolicy,
    KnownAnswers,
    Policy,
    PolicyError,
    PolicyFunction,
    SaveOps,
    SelectiveCheckpointContext,
    checked_answer,
    normalise_policy,
    policy_name,
)
from .readable import duration, exact_size, size, size_unit, time_unit
from .source import running_line, source_line
from .whose import Whose, folders_of, is_users, is_users_module, whose

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "FUSED_KINDS",
    "INLINED_KINDS",
    "NODE_BY_NODE",
    "NOT_STORED",
    "OFFLOADS",
    "PREFERENCES",
    "RECOMPUTES",
    "CheckpointPolicy",
    "Damaged",
    "DiskTensor",
    "Executor",
    "InfeasibleBudget",
    "InfeasibleCut",
    "Kind",
    "KnownAnswers",
    "OffloadError",
    "OpFacts",
    "OptionError",
    "PlanMismatch",
    "Policy",
    "PolicyError",
    "PolicyFunction",
    "RankMismatch",
    "RematError",
    "SaveOps",
    "SelectiveCheckpointContext",
    "VerificationError",
    "Whose",
    "add_advice",
    "advising",
    "bernoulli_like_op",
    "causes_of",
    "checked_answer",
    "copied_alike",
    "copy_alike_op",
    "current_module_path",
    "duration",
    "ends_match",
    "exact_size",
    "facts_of",
    "facts_of_call",
    "fingerprint",
    "folders_of",
    "form_of",
    "goes_to_disk",
    "is_copy_alike",
    "is_matmul",
    "is_out_of_memory",
    "is_to_disk",
    "is_users",
    "is_users_module",
    "matches",
    "name_op",
    "normalise_policy",
    "parsed_file",
    "path_of_node",
    "policy_name",
    "read",
    "refused",
    "replace_file",
    "running_line",
    "shown",
    "size",
    "size_unit",
    "source_line",
    "stored",
    "time_unit",
    "to_disk_op",
    "whose",
]
