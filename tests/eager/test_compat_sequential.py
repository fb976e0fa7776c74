"""checkpoint_sequential."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat import compat


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("segments", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("as_list", [True, False])
def test_any_number_of_segments_gives_the_same_gradients(segments, use_reentrant, as_list):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(7)])
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()
    expected = [x.grad.clone()] + [p.grad.clone() for p in model.parameters()]
    x.grad = None
    model.zero_grad()
    functions = list(model) if as_list else model
    compat.checkpoint_sequential(functions, segments, x, use_reentrant=use_reentrant).sum().backward()
    found = [x.grad] + [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("num_functions", "segments", "expected"), [(6, 3, 4), (7, 3, 4), (3, 3, 2), (5, 1, 0), (2, 9, 1)]
)
def test_all_but_the_last_segment_run_twice(num_functions, segments, expected):
    calls = []

    def function(x):
        calls.append(1)
        return x.sin()

    x = torch.randn(2, requires_grad=True)
    compat.checkpoint_sequential([function] * num_functions, segments, x, use_reentrant=False).sum().backward()
    assert len(calls) - num_functions == expected


def test_unknown_keywords_and_bad_counts_are_rejected():
    x = torch.randn(2, requires_grad=True)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: wrong"):
        compat.checkpoint_sequential([torch.sin], 1, x, use_reentrant=False, wrong=1)
    with pytest.raises(ValueError, match="segments must be at least 1, got 0"):
        compat.checkpoint_sequential([torch.sin], 0, x, use_reentrant=False)
