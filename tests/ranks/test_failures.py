"""A rank that fails in mid-recompute makes the others fail, in time, with a clear error, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support import rank_programs as programs
from support.rank_processes import Failure, joined, ranks_for
from torch import nn

import remat
from remat.eager.types.execution import local
from remat.passes.torch_private import top_saved_tensors_hooks

GROUP_SECONDS = 6.0
"""Short, so that a rank that waits for one that is gone gives up soon."""


class Failing(nn.Module):
    """Fails on rank 1 when it is run again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x):
        if remat.is_recomputing() and dist.get_rank() == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("rank 1 fails in recompute")
        return x


def failing_model(how, strategy):
    """A model whose layers are regions, and whose first layer, the last to run again, fails when it is."""
    torch.manual_seed(0)
    model = programs.mark(programs.Model(), "bare")
    model.layers[0].norm = nn.Sequential(Failing(how), model.layers[0].norm)
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if strategy == "fsdp2":
        return programs.shard(model)
    region = remat.checkpoint_region(model.forward)  # communicates in the middle of a backward
    model.forward = lambda x: _Summed.apply(region(_Summed.apply(x)))
    return model


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def fail_and_go_on(how, strategy, file):
    """Fail in a step; then check that nothing of it is left, and train on in a new group with whoever is left."""
    model = failing_model(how, strategy)
    x = torch.ones(4, programs.HIDDEN, requires_grad=True)
    loss = model(x).sum()
    started = time.monotonic()
    try:
        loss.backward()
        error = None
    except Exception as failure:  # noqa: BLE001 (whatever it is, the test looks at it)
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - started
    assert not remat.is_recomputing()
    assert local.execution is None
    assert top_saved_tensors_hooks(True) is None
    rank = dist.get_rank()
    dist.destroy_process_group()
    num_left = 1 if how == "killed" else 2
    with joined(rank, num_left, file, 5 * GROUP_SECONDS):  # the other one may still be waiting in its old group
        torch.manual_seed(0)
        programs.fsdp(programs.Setting("eager", "bare"))
        programs.ddp(programs.Setting("eager", "policy"))
    return error, seconds


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "communicating"])
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_other_rank_fails_in_time_and_trains_on_in_a_new_group(how, strategy, tmp_path):
    with ranks_for(2, GROUP_SECONDS) as ranks:
        survivor, failed = ranks.attempt(fail_and_go_on, how, strategy, str(tmp_path / "again"))
    if how == "killed":
        assert isinstance(failed, Failure)
        assert failed.is_death
    else:
        assert "rank 1 fails in recompute" in failed[0]
    error, seconds = survivor
    assert error is not None, "the other rank waits for a gradient that never comes"
    assert any(word in error for word in ("Connection closed by peer", "Connection reset by peer", "Timed out")), error
    assert seconds < 3 * GROUP_SECONDS
