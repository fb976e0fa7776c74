"""What it costs to keep a value, and to compute it again, in ticks of time.

Comes in: the joint graph, sizes, a cost model and the constants of machines. Goes out: `Costs`, one pair per node.

Imports: torch_private, shared, ops, graph, sizes
"""

from __future__ import annotations

from .cost import (
    ARITHMETIC,
    DEFAULT_MACHINE,
    TICKS_PER_SECOND,
    Callback,
    CostModel,
    Costs,
    Flops,
    Formulas,
    Machine,
    Roofline,
    price,
)
from .op_call import UNKNOWN_USE, OpCall, Use, call_of

__all__ = [
    "ARITHMETIC",
    "DEFAULT_MACHINE",
    "TICKS_PER_SECOND",
    "UNKNOWN_USE",
    "Callback",
    "CostModel",
    "Costs",
    "Flops",
    "Formulas",
    "Machine",
    "OpCall",
    "Roofline",
    "Use",
    "call_of",
    "price",
]
