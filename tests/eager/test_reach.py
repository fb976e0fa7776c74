"""State that a region reaches by a long way is moved once; what is not found is an error, never moved twice."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import pytest
import torch
from torch import nn

from remat.eager.types.errors import CheckpointError
from remat.regions.region import checkpoint_region


class Counter(nn.Module):
    """Owns a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


COUNTER = Counter()
BY_KEY = {"a": [{"b": COUNTER}]}


class Holder:
    """Holds a counter, and calls it."""

    shared = COUNTER

    def __init__(self):
        self.inner = types.SimpleNamespace(counter=COUNTER)

    def __call__(self, x):
        return counted_by(self.inner.counter, x)

    def method(self, x):
        return self(x)


def counted_by(counter, x):
    counter.count.add_(1.0)
    return x * counter.count.clone()


def counted(x):
    return counted_by(COUNTER, x)


def counted_by_way_of_another(x):
    return counted(x)


def chain(steps):
    def go(x):
        for step in steps:
            x = step(x)
        return x

    return go


class Hiding(nn.Module):
    """Reaches the counter by something that is no submodule."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, x):
        return self.hidden[0](x)


class UsingAGlobal(nn.Module):
    """Calls a global function that changes a global module."""

    def forward(self, x):
        return self.run(x)

    def run(self, x):
        return counted_by_way_of_another(x)


def nested(depth):
    body = chain([counted, torch.sin])
    for _ in range(depth):
        body = chain([checkpoint_region(body), torch.tanh])
    return body


HOLDER = Holder()


def by_keyword_default(x, *, counter=COUNTER):
    return counted_by(counter, x)


PROGRAMS = {
    "two regions": lambda: nested(2),
    "forty regions": lambda: nested(40),
    "a global function": lambda: checkpoint_region(lambda x: counted_by_way_of_another(x).sin()),
    "a global container": lambda: checkpoint_region(lambda x: counted_by(BY_KEY["a"][0]["b"], x).sin()),
    "a global object": lambda: checkpoint_region(lambda x: HOLDER(x).sin()),
    "a class": lambda: checkpoint_region(lambda x: counted_by(Holder.shared, x).sin()),
    "a callable object": lambda: checkpoint_region(Holder()),
    "a method": lambda: checkpoint_region(Holder().method),
    "a partial of a partial": lambda: checkpoint_region(functools.partial(functools.partial(counted_by), COUNTER)),
    "a keyword default": lambda: checkpoint_region(by_keyword_default),
    "a module's attribute": lambda: checkpoint_region(Hiding([Holder()])),
    "a global of a module's method": lambda: checkpoint_region(nn.Sequential(UsingAGlobal(), nn.Tanh())),
}


@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS)
def test_a_buffer_that_is_far_away_moves_once(make):
    COUNTER.count.zero_()
    function = make()
    x = torch.linspace(0.1, 0.9, 4, requires_grad=True)
    for step in (1, 2, 3):
        function(x).sin().sum().backward()
        assert COUNTER.count.item() == step


def test_state_that_is_not_found_is_an_error_and_is_not_moved_twice():
    counter = Counter()
    reference = weakref.ref(counter)  # looks inside of nothing
    function = checkpoint_region(lambda x: counted_by(reference(), x).sin())
    for _ in range(2):
        counter.count.fill_(5.0)
        x = torch.ones(4, requires_grad=True)
        out = function(x).sum()
        with pytest.raises(CheckpointError, match=r"changes a tensor that outlives it, in place \(aten.add_.Tensor at"):
            out.backward()
        assert counter.count.item() == 6.0


def test_batch_norm_that_is_not_found_is_an_error():
    norm = nn.BatchNorm1d(4)
    reference = weakref.ref(norm)
    function = checkpoint_region(lambda x: reference()(x).sin())
    out = function(torch.randn(8, 4, requires_grad=True)).sum()
    with pytest.raises(CheckpointError, match="outlives it"):
        out.backward()
    assert norm.num_batches_tracked.item() == 1


def test_looking_at_one_saved_value_does_not_stand_for_a_whole_recomputation():
    counter = Counter()
    reference = weakref.ref(counter)
    function = checkpoint_region(lambda x: (x.sin(), counted_by(reference(), x.cos()).sin()))
    first, second = function(torch.ones(4, requires_grad=True))
    assert torch.equal(first.grad_fn._saved_self, torch.ones(4))
    with pytest.raises(CheckpointError, match="outlives it"):
        second.sum().backward()


def test_batch_norm_in_eval_mode_changes_nothing():
    """Also with statistics that were written to before, as those of a trained model are."""
    norm = nn.BatchNorm1d(4)
    norm(torch.randn(8, 4))
    norm.eval()
    x, y = (torch.linspace(0.1, 0.9, 32).view(8, 4).requires_grad_() for _ in range(2))
    norm(x).sin().sum().backward()
    checkpoint_region(lambda y: norm(y).sin())(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def through_data(tensor, x):
    tensor.data.mul_(0.5)
    return (tensor * x).sin()


def closed_over():
    tensor = torch.ones(1)
    return lambda x: through_data(tensor, x)


@pytest.mark.parametrize(
    "make",
    [closed_over, lambda: lambda x: through_data(x, x)],
    ids=["a tensor of a closure", "an argument"],
)
def test_state_that_is_changed_through_data_is_an_error_and_is_not_moved_twice(make):
    """An alias made by `.data` counts versions for itself, so nothing but the write tells."""
    function = checkpoint_region(make())
    out = function(torch.ones(1 << 19, requires_grad=True)).sum()
    with pytest.raises(CheckpointError, match=r"changes a tensor that outlives it, in place \(aten.mul_.Tensor at"):
        out.backward()


def test_a_buffer_that_is_changed_through_data_moves_once():
    holders = [nn.Module(), nn.Module()]
    for holder in holders:
        holder.register_buffer("large", torch.ones(1 << 19))
    runs = [checkpoint_region(lambda x: through_data(holders[0].large, x)), lambda x: through_data(holders[1].large, x)]
    for _ in range(2):
        x = torch.ones(1 << 19, requires_grad=True)
        grads = [torch.autograd.grad(run(x).sum(), x)[0] for run in runs]
        assert torch.equal(*grads)
        assert torch.equal(holders[0].large, holders[1].large)


def test_state_that_is_the_same_after_a_second_write_may_be_changed_through_data():
    def function(x, weight, scratch):
        weight.data.clamp_(-0.1, 0.1)
        scratch.data.zero_()
        scratch.data.add_(x.detach())
        return (x * weight * scratch).sin()

    def gradients(run):
        torch.manual_seed(0)
        x, weight = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        scratch = torch.ones(4)
        run(lambda x, weight: function(x, weight, scratch))(x, weight).sum().backward()
        return x.grad, weight.grad

    assert all(map(torch.equal, gradients(checkpoint_region), gradients(lambda f: f)))


def test_what_a_region_makes_itself_may_be_changed_in_place():
    def function(x):
        y = torch.zeros(4).add_(x)
        y.mul_(2.0).add_(1.0)
        buffer = torch.tensor([1.0, 2.0, 3.0, 4.0])
        buffer += 1.0
        return (y.exp() * buffer).view(2, 2).t().contiguous().add_(1.0).sin()

    x, y = (torch.linspace(0.1, 0.9, 4).requires_grad_() for _ in range(2))
    function(x).sum().backward()
    checkpoint_region(function)(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_overwriting_a_tensor_twice_is_allowed():
    scratch = [torch.zeros(4).add_(1.0)]
    reference = weakref.ref(scratch[0])

    def function(x):
        reference().copy_(x.detach())
        return x.sin().exp()

    x = torch.ones(4, requires_grad=True)
    checkpoint_region(function)(x).sum().backward()
    assert torch.equal(scratch[0], x)


def test_watching_an_object_does_not_keep_former_steps_alive():
    holder = types.SimpleNamespace(last=None)

    def function(x):
        return x.sin().exp() if holder is not None else x

    region = checkpoint_region(function)
    x = torch.ones(4, requires_grad=True)
    firsts = []
    for _ in range(3):
        out = region(x)
        firsts.append(weakref.ref(out))
        holder.last = out
        del out
        gc.collect()
    assert [first() is None for first in firsts] == [True, True, False]


def save_copies(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.clone.default


@pytest.mark.parametrize("inner_policy", [None, save_copies])
def test_copies_of_an_inner_regions_buffers_are_no_ops_to_the_policy_around(inner_policy):
    def gradient_of(mark_inner, mark_outer):
        counter = Counter()
        inner = mark_inner(lambda x: counted_by(counter, x.sin()).sin())
        outer = mark_outer(lambda x: counted_by(counter, inner(x).cos()).cos())
        x = torch.linspace(0.1, 0.9, 4, requires_grad=True)
        outer(x).sum().backward()
        assert counter.count.item() == 2
        return x.grad

    expected = gradient_of(lambda f: f, lambda f: f)
    marked = gradient_of(checkpoint_region(policy=inner_policy), checkpoint_region(policy=save_copies))
    assert torch.equal(marked, expected)


def _counting_down(limit):
    def go(x, n):
        return x.sin() if n >= limit else _knot(x, n + 1)

    return go


_knot = _counting_down(3)


def test_functions_that_lead_to_themselves_are_looked_at_once():
    x = torch.randn(4, requires_grad=True)
    checkpoint_region(lambda v: _knot(v, 0))(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
