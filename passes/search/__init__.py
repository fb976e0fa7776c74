"""From prices and memory to schedules. Proposers propose, the simulator disposes.

Comes in: the planning problem and its storages. Goes out: offers, each a schedule with its simulation and its time.

Imports: torch_private, shared, ops, graph, sizes, rewrites, prices, memory
"""

from __future__ import annotations

from .bench import Bench, Offer, by_peak, by_time, extra_ticks
from .chain import chain_offers, follow, offers_within, tell
from .improve import Improver
from .moves import Candidate
from .planner import Planner
from .problem import FlowProblem

__all__ = [
    "Bench",
    "Candidate",
    "FlowProblem",
    "Improver",
    "Offer",
    "Planner",
    "by_peak",
    "by_time",
    "chain_offers",
    "extra_ticks",
    "follow",
    "offers_within",
    "tell",
]
