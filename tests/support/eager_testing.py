"""Helpers of the eager engine's tests: ways to call a function as a region, and ways to watch it run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat import compat
from remat.regions.region import checkpoint_region

torch.set_num_threads(1)  # the tensors are tiny; threads would only wait for each other on a busy machine

MUST_SAVE = compat.CheckpointPolicy.MUST_SAVE
MUST_RECOMPUTE = compat.CheckpointPolicy.MUST_RECOMPUTE
PREFER_RECOMPUTE = compat.CheckpointPolicy.PREFER_RECOMPUTE
MUST_CPU_OFFLOAD = compat.CheckpointPolicy.MUST_CPU_OFFLOAD


def save_all(ctx, op, *args, **kwargs):
    return MUST_SAVE


def recompute_all(ctx, op, *args, **kwargs):
    return PREFER_RECOMPUTE


def offload_all(ctx, op, *args, **kwargs):
    return MUST_CPU_OFFLOAD


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as a bare region."""
    return compat.checkpoint(function, *args, use_reentrant=False, **kwargs)


def selective(policy: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as a region with a policy."""
    if isinstance(function, torch.nn.Module):
        function = function.__call__  # marking the module itself would last beyond this call
    return checkpoint_region(policy=policy)(function)(*args, **kwargs)


REGIONS = {
    "plain": plain,
    "save_all": functools.partial(selective, save_all),
    "recompute_all": functools.partial(selective, recompute_all),
    "save_matmuls": functools.partial(selective, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
    "offload_all": functools.partial(selective, offload_all),
}


class OpCounter(TorchDispatchMode):
    """Count the ops that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, op: str) -> int:
        return self.counts[op]


def grads_of(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return a function's output and the gradients of its inputs."""
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
    out = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return out.detach(), torch.autograd.grad(out.sum(), wanted)


def assert_same_grads(region: Callable[..., Any], function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Assert that a function gives the same bits with and without a region."""
    state = torch.get_rng_state()
    expected, expected_grads = grads_of(function, *inputs)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    out, grads = grads_of(lambda *args: region(function, *args), *inputs)
    assert torch.equal(out, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert torch.equal(grad, expected_grad)
    assert torch.equal(torch.get_rng_state(), after), "a region moves the random state as its function does"
