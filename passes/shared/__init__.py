"""Words that both engines use: errors, policies, lines of source, what will run a graph.

Comes in: single operators, tensors, texts. Goes out: what is known of them, and exceptions that say what to do.

Imports: torch_private
"""

from __future__ import annotations

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
from .module_path import current_module_path, ends_match, matches, path_of_node
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
    "NODE_BY_NODE",
    "NOT_STORED",
    "OFFLOADS",
    "PREFERENCES",
    "RECOMPUTES",
    "CheckpointPolicy",
    "Damaged",
    "Executor",
    "InfeasibleBudget",
    "InfeasibleCut",
    "KnownAnswers",
    "OffloadError",
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
    "causes_of",
    "checked_answer",
    "current_module_path",
    "duration",
    "ends_match",
    "exact_size",
    "fingerprint",
    "folders_of",
    "form_of",
    "is_out_of_memory",
    "is_users",
    "is_users_module",
    "matches",
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
    "whose",
]
