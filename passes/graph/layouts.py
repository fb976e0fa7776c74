"""Where a result lies in memory, and whether tracing can be believed about it.

Stand-ins for fake tensors are not always right about strides: some kernels lay out what they compute row by row, or in
the order of another input, where tracing says otherwise. Nothing may depend on that being right (see `checked_forms`),
but a simulation of memory should know where it is not: `is_certain` is what a sweep over all ops has found
(`pytest -m slow tests/test_layouts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from ..ops import Kind, OpFacts, is_matmul
from ..torch_private import statically_equal

_aten = torch.ops.aten

_FOLLOWING = frozenset({Kind.FREE, Kind.POINTWISE, Kind.TRANSCENDENTAL, Kind.SLOW_TRANSCENDENTAL, Kind.EXP_REDUCTION})
"""What is computed by these lies in memory like its inputs, as tracing says."""


def is_row_major(value: torch.Tensor) -> bool:
    """True for a tensor whose elements lie in memory in order and without gaps."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_equal(stride, expected):
            return False
        expected = expected * size
    return True


def has_no_gaps(value: torch.Tensor) -> bool:
    """True for a tensor of known sizes whose elements lie in memory one by one, in some order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if stride != expected:
            return False
        expected *= size
    return True


def is_in_order_of(values: Sequence[torch.Tensor], result: torch.Tensor) -> bool:
    """Does the first of the inputs that puts two dimensions in an order put them in the result's?

    That is how kernels that compute element by element decide the order, if no dimension has size 1.
    """
    strides = [_strides_in(value, result) for value in values]
    for i, j in combinations(range(result.dim()), 2):
        first = next((s for s in strides if s[i] and s[j] and s[i] != s[j]), None)
        if first is not None and (first[i] < first[j]) != (result.stride(i) < result.stride(j)):
            return False
    return True


def _strides_in(value: torch.Tensor, result: torch.Tensor) -> list[int]:
    """An input's strides along the dimensions of a result; 0 where it is read again and again."""
    own = [0 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True)]
    return [0] * (result.dim() - value.dim()) + own


def is_laid_out_by_itself(op: Any, facts: OpFacts, kwargs: Mapping[str, Any]) -> bool:
    """Does an op's result lie row by row, or where it is traced, however its inputs lie?"""
    is_copied = op is _aten.clone.default and kwargs.get("memory_format") is torch.contiguous_format
    return is_copied or (is_matmul(op) and not facts.is_convolution)


def is_certain(facts: OpFacts, values: Sequence[torch.Tensor]) -> bool:
    """Does an op's result lie in memory as it is traced, if its inputs do?"""
    if facts.is_view or all(map(is_row_major, values)):
        return True
    if facts.lays_out_anew or facts.kind not in _FOLLOWING:
        return False
    return not any(map(_is_expanded, values)) or all(is_row_major(v) for v in values if not _is_expanded(v))


def _is_expanded(value: torch.Tensor) -> bool:
    """True for a tensor that has an element at several places."""
    return any(statically_equal(stride, 0) for stride in value.stride())
