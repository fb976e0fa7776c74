"""One module with state, shared by threads that each run regions over it."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest
import torch
from support.eager_testing import plain
from torch import nn

from remat import compat
from remat.eager.state import swap
from remat.regions.region import is_recomputing


@pytest.fixture
def quick_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_in_threads(work, num_threads=4):
    errors, start = [], threading.Barrier(num_threads)

    def target(number):
        try:
            start.wait()
            work(number)
        except (AssertionError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=target, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("quick_switches")
def test_a_batch_norm_that_threads_share_moves_once_per_forward():
    """Forwards take turns, as without regions they must; backwards run whenever they like."""
    turn = threading.Lock()
    for _ in range(60):
        norm, reference = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        x = torch.randn(8, 4)
        expected = torch.autograd.grad(reference(y := x.clone().requires_grad_()).sin().sum(), y)[0]

        def work(number, norm=norm, x=x, expected=expected):
            for _ in range(3):
                own = x.clone().requires_grad_()
                with turn:
                    out = plain(lambda x: norm(x).sin(), own)
                assert torch.equal(torch.autograd.grad(out.sum(), own)[0], expected)

        run_in_threads(work)
        assert norm.num_batches_tracked == 12
        for _ in range(11):
            reference(x)
        assert torch.equal(norm.running_mean, reference.running_mean)


class Renewing(nn.Module):
    """Puts another tensor in the place of its buffer in each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        self.num_calls = self.num_calls + 1
        return (x * 2).sin()


def test_a_forward_that_raises_does_not_count_as_running_for_ever():
    model = nn.BatchNorm1d(4)

    def function(x):
        model(x)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        plain(function, torch.randn(8, 4, requires_grad=True))
    assert not swap._num_forwards


@contextlib.contextmanager
def another_thread_in_forward(model, region):
    """Run a block while a thread has begun a region over a model, and not come to the model yet."""
    in_forward, may_end = threading.Event(), threading.Event()

    def waiting(x):
        in_forward.set()
        may_end.wait()
        return model(x)

    thread = threading.Thread(target=lambda: region(waiting, torch.ones(4, requires_grad=True)))
    thread.start()
    in_forward.wait()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


def test_a_buffer_that_is_replaced_while_another_thread_is_in_forward_is_refused():
    """The other thread must not find what a recomputation would put there."""
    model = Renewing()
    out = plain(model, torch.ones(4, requires_grad=True))
    with (
        another_thread_in_forward(model, plain),
        pytest.raises(compat.CheckpointError, match="`num_calls` of a Renewing was replaced"),
    ):
        out.sum().backward()
    assert model.num_calls == 2


def _add_to_all(counts):
    counts.add_(1)


def _add_to_a_slice(counts):
    counts[1:3].add_(1)


def _assign_to_a_slice(counts):
    counts[1:3] = 7


class Counting(nn.Module):
    """Reads a buffer, changes it, and reads it again."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x):
        before = x.sin() * self.counts.clone()
        self.change(self.counts)
        return (before * self.counts.clone()).tanh()


@pytest.mark.parametrize("change", [_add_to_all, _add_to_a_slice, _assign_to_a_slice])
def test_a_region_may_change_a_buffer_while_another_thread_is_in_forward(change):
    """Whole or in part: the recomputation then works on copies that no module has."""

    def gradient_and_counts(region):
        model, x = Counting(change), torch.linspace(0, 1, 4, requires_grad=True)
        out = region(model, x)
        with another_thread_in_forward(model, region):
            out.sum().backward()
        return x.grad, model.counts

    expected = gradient_and_counts(lambda function, x: function(x))
    assert all(map(torch.equal, gradient_and_counts(plain), expected))


def test_threads_that_wait_for_each_other_end_in_an_error(monkeypatch):
    """A recomputation that waits for a thread which is to run a region over the same module."""
    monkeypatch.setattr(swap, "MAX_WAIT_SECONDS", 0.2)
    norm, errors = nn.BatchNorm1d(4), []

    def beside():
        try:
            plain(norm, torch.randn(8, 4, requires_grad=True))
        except compat.CheckpointError as error:
            errors.append(error)

    def function(x):
        out = norm(x).sin()
        if is_recomputing():
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
        return out.exp()

    plain(function, torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert len(errors) == 1
    assert "waited 0.2 seconds for the recomputation" in str(errors[0])
    assert norm.num_batches_tracked == 1
    assert not swap._num_forwards
    assert not swap._swapped
