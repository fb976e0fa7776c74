"""The reentrant variant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remat import compat


def reentrant(function, *args, **kwargs):
    return compat.checkpoint(function, *args, use_reentrant=True, **kwargs)


def test_gradients_equal_those_without_a_region():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(0)
    model(x).sum().backward()
    expected = [x.grad.clone()] + [p.grad.clone() for p in model.parameters()]
    x.grad = None
    model.zero_grad()
    torch.manual_seed(0)
    reentrant(model, x).sum().backward()
    found = [x.grad] + [p.grad for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_non_tensor_arguments_and_several_outputs():
    def function(x, scale, flag):
        return x * scale, x.sin() if flag else x, "text"

    x = torch.randn(3, requires_grad=True)
    a, b, text = reentrant(function, x, 3.0, True)
    (a + b).sum().backward()
    assert torch.equal(x.grad, 3.0 + x.detach().cos())
    assert text == "text"


def test_partial_backward_is_refused_and_leaves_the_engine_usable():
    x = torch.randn(2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"torch.utils.checkpoint is incompatible with .grad\(\)"):
        torch.autograd.grad(reentrant(torch.exp, x).sum(), x)
    reentrant(torch.exp, x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_a_region_whose_outputs_need_no_grad_is_refused_in_backward():
    x = torch.randn(2, requires_grad=True)

    def function(x):
        with torch.no_grad():
            return x * 2

    with pytest.raises(
        RuntimeError, match=r"none of output has requires_grad=True, this checkpoint\(\) is not necessary"
    ):
        reentrant(function, x).sum().backward()


def test_inputs_without_grad_warn():
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        reentrant(torch.exp, torch.ones(2))


def test_autocast_of_the_forward_is_in_force_in_the_replay():
    seen = []
    layer = nn.Linear(4, 4)

    def function(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return layer(x)

    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = reentrant(function, x)
    out.sum().backward()
    assert seen == [True, True]


def test_batchnorm_statistics_move_once():
    layer, reference = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    for _ in range(2):
        x = torch.randn(8, 4, requires_grad=True)
        reentrant(layer, x).sum().backward()
        reference(x)
    assert torch.equal(layer.running_mean, reference.running_mean)
    assert layer.num_batches_tracked == 2


def test_random_numbers_are_fresh_without_preserve_rng_state():
    masks = []

    def function(x):
        masks.append(torch.rand(64))
        return x * masks[-1]

    x = torch.randn(64, requires_grad=True)
    reentrant(function, x, preserve_rng_state=False).sum().backward()
    assert not torch.equal(*masks)
