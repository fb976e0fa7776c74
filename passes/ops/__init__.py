"""Operators: what is known of each, and those of our own that graphs call.

Comes in: an operator, or a call of one with its arguments. Goes out: its kind, whether it is a view, draws, writes or
runs once; names, masks, copies and files as operators.

Imports: torch_private, shared
"""

from __future__ import annotations

from .copy_op import copied_alike, copy_alike_op, is_copy_alike
from .disk import DiskTensor, goes_to_disk
from .disk_op import is_to_disk, to_disk_op
from .mask_op import bernoulli_like_op
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

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "FUSED_KINDS",
    "INLINED_KINDS",
    "DiskTensor",
    "Kind",
    "OpFacts",
    "bernoulli_like_op",
    "copied_alike",
    "copy_alike_op",
    "facts_of",
    "facts_of_call",
    "goes_to_disk",
    "is_copy_alike",
    "is_matmul",
    "is_to_disk",
    "name_op",
    "to_disk_op",
]
