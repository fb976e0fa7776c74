"""remat: decide what a training step keeps, recomputes or moves off the device, and see why."""

from typing import TYPE_CHECKING, Any

from . import compat, policies, wiring, wrappers
from .compat import CheckpointPolicy, checkpoint, checkpoint_sequential
from .passes.prices import OpCall
from .passes.shared import (
    InfeasibleBudget,
    InfeasibleCut,
    OffloadError,
    OptionError,
    PlanMismatch,
    RankMismatch,
    RematError,
    VerificationError,
)
from .regions import Applied, apply, checkpoint_region, is_recomputing, name, plan_with, remove
from .version import __version__
from .wiring import partitioner

if TYPE_CHECKING:
    from .passes.plans import Action, Decision, Plan
    from .report import Report, explain, observe, pareto

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

plan_with(wiring.run_planned)


def __getattr__(name: str) -> Any:
    """Load what needs the compilers when it is first used: they take longer to import than torch itself."""
    if name == "partitioner":
        return partitioner
    if name in ("Action", "Decision", "Plan"):
        from .passes import plans

        return getattr(plans, name)
    if name in ("pareto", "Pareto"):
        from .report import frontier

        return getattr(frontier, name)
    if name in ("explain", "observe", "Report"):
        from . import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
