"""remat: decide what a training step keeps, recomputes or moves off the device, and see why."""

from typing import TYPE_CHECKING, Any

from .eager.torch_api import checkpoint as compat
from .eager.torch_api.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential
from .passes.plans.plan import Action, Decision, Plan
from .passes.prices.op_call import OpCall
from .passes.shared.errors import (
    InfeasibleBudget,
    InfeasibleCut,
    OffloadError,
    OptionError,
    PlanMismatch,
    RankMismatch,
    RematError,
    VerificationError,
)
from .regions import policies, wrappers
from .regions.applied import Applied, apply, remove
from .regions.naming import name
from .regions.region import checkpoint_region, is_recomputing
from .version import __version__

if TYPE_CHECKING:
    from .compiled.partitioner import partitioner
    from .report import Report, explain, observe
    from .report.frontier.frontier import pareto

__all__ = [
    "Action",
    "Applied",
    "CheckpointPolicy",
    "Decision",
    "InfeasibleBudget",
    "InfeasibleCut",
    "OffloadError",
    "OpCall",
    "OptionError",
    "Pareto",
    "Plan",
    "PlanMismatch",
    "RankMismatch",
    "RematError",
    "Report",
    "VerificationError",
    "__version__",
    "apply",
    "checkpoint",
    "checkpoint_region",
    "checkpoint_sequential",
    "compat",
    "explain",
    "is_recomputing",
    "name",
    "observe",
    "pareto",
    "partitioner",
    "policies",
    "remove",
    "wrappers",
]


def __getattr__(name: str) -> Any:
    """Load what needs the compilers when it is first used: they take longer to import than torch itself."""
    if name == "partitioner":
        from .compiled.partitioner import partitioner

        return partitioner
    if name in ("pareto", "Pareto"):
        from .report.frontier import frontier

        return getattr(frontier, name)
    if name in ("explain", "observe", "Report"):
        from . import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
