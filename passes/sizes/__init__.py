"""Sizes that are symbols: the numbers they stand for while one plans, and what depends on them as expressions.

Comes in: nodes with symbolic shapes. Goes out: `Sizes`, which knows a number for every size, and texts for reports.

Imports: torch_private, shared, ops, graph
"""

from __future__ import annotations

from .expressions import (
    NotExpressible,
    evaluate,
    evaluate_real,
    is_true,
    largest,
    largest_of,
    rounded,
    to_sympy,
    weighted_sum,
    write,
)
from .symbols import NO_SIZE, Origin, SizeNumber, Sizes, SizeSymbol, Terms, describe, integers, terms_of
from .tensor_specs import TensorSpec, hint_of, spec_of
from .unknown_sizes import require_known

__all__ = [
    "NO_SIZE",
    "NotExpressible",
    "Origin",
    "SizeNumber",
    "SizeSymbol",
    "Sizes",
    "TensorSpec",
    "Terms",
    "describe",
    "evaluate",
    "evaluate_real",
    "hint_of",
    "integers",
    "is_true",
    "largest",
    "largest_of",
    "require_known",
    "rounded",
    "spec_of",
    "terms_of",
    "to_sympy",
    "weighted_sum",
    "write",
]
