"""remat: decide what a training step keeps, recomputes or moves off the device, and see why."""

from .partitioner import partitioner
from .passes.errors import InfeasibleCut, OptionError, RematError, VerificationError
from .passes.op_call import OpCall
from .passes.plan import Action, Decision, Plan
from .version import __version__

__all__ = [
    "Action",
    "Decision",
    "InfeasibleCut",
    "OpCall",
    "OptionError",
    "Plan",
    "RematError",
    "VerificationError",
    "__version__",
    "partitioner",
]
