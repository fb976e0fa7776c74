"""Copies that wait for backward lie in memory like what they are copies of, where ops run one by one.

Extraction copies inputs that forward overwrites, and offloading copies what waits elsewhere. A compiler that fuses
decides itself in which layout it computes; kernels that run one by one compute in that of what they are given.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops import copy_alike_op
from .halves import NODE_TAG, Halves

_COPIES: frozenset[Any] = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})


def keep_layouts(halves: Halves) -> Halves:
    """Have every copy that was added to the program made with the strides of its original."""
    for half in (halves.forward, halves.backward):
        added = [node for op in _COPIES for node in half.graph.find_nodes(op="call_function", target=op)]
        for node in added:
            if NODE_TAG not in node.meta:
                node.target = copy_alike_op()
        half.recompile()
    return halves
