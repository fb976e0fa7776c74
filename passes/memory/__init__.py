"""What is alive when. Schedules of nodes, whose memory each result takes, and the simulator that judges every plan.

Comes in: the joint graph and what a plan keeps. Goes out: `Schedule`, `Storages`, `Simulation` with its peak.

Imports: torch_private, shared, ops, graph, sizes, rewrites
"""

from __future__ import annotations

from .backward_order import roots
from .legal import verify_schedule
from .moments import COPY_TAG, MOMENT_TAG, Moment, moments_of
from .peaks import PeakTerms, peak_terms, sum_grows, terms_text
from .schedule import Schedule, Scheduler
from .shares import NO_SHARES, Limits, SharePeak, Shares
from .simulate import Memory, Simulation, Simulator, simulate
from .storage import Storages, find_storages, storages_at

__all__ = [
    "COPY_TAG",
    "MOMENT_TAG",
    "NO_SHARES",
    "Limits",
    "Memory",
    "Moment",
    "PeakTerms",
    "Schedule",
    "Scheduler",
    "SharePeak",
    "Shares",
    "Simulation",
    "Simulator",
    "Storages",
    "find_storages",
    "moments_of",
    "peak_terms",
    "roots",
    "simulate",
    "storages_at",
    "sum_grows",
    "terms_text",
    "verify_schedule",
]
