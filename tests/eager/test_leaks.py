"""A region leaves nothing behind: no objects, no storages, whether the step ends well or raises."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.eager_testing import REGIONS, plain
from torch import nn

from remat.regions.region import is_recomputing

every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


@pytest.fixture(autouse=True)
def only_new_objects_are_looked_at():
    """Set what other tests have left aside: collecting and counting it takes most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Faulty(torch.autograd.Function):
    """Raises in backward when told to."""

    @staticmethod
    def forward(ctx, x, is_faulty):
        ctx.is_faulty = is_faulty
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_faulty:
            raise ValueError("backward")
        return grad, None


class Step:
    """One training step of a small model with nested regions, dropout and batch norm, raising where told."""

    def __init__(self, region):
        self.region = region
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8))
        self.where = None

    def block(self, x):
        x = self.region(self.model, x)
        if self.where == "forward" or (self.where == "recompute" and is_recomputing()):
            raise ValueError(self.where)
        return Faulty.apply(x, self.where == "backward").exp()

    def __call__(self):
        out = self.region(self.block, torch.randn(4, 8, requires_grad=True))
        out.sum().backward()
        self.model.zero_grad(set_to_none=True)


def num_live_storages():
    with_storage = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return len({t.untyped_storage()._cdata for t in with_storage})


def measure():
    gc.collect()
    return len(gc.get_objects()), num_live_storages()


def assert_no_growth(run, num_steps):
    for _ in range(6):
        run()
    before = measure()
    for _ in range(num_steps):
        run()
    after = measure()
    assert after[1] <= before[1], "live storages"
    assert after[0] <= before[0] + 50, "objects; a few belong to the test runner"


def raising(step, where):
    """Return a step that raises every second time."""
    turn = [0]

    def run():
        turn[0] += 1
        step.where = where if turn[0] % 2 else None
        try:
            step()
        except ValueError as error:
            assert str(error) == where  # noqa: PT017 - the step may raise or not
            step.model.zero_grad(set_to_none=True)

    return run


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("plain", None),
        ("save_matmuls", None),
        ("plain", "forward"),
        ("save_matmuls", "recompute"),
        ("save_all", "backward"),
    ],
)
def test_fifty_steps_leak_nothing(name, where):
    step = Step(REGIONS[name])
    assert_no_growth(raising(step, where) if where else step, num_steps=50)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("where", [None, "forward", "recompute", "backward"])
def test_a_thousand_steps_leak_nothing(name, where):
    step = Step(REGIONS[name])
    assert_no_growth(raising(step, where) if where else step, num_steps=1000)


@every_region
@pytest.mark.parametrize("ending", ["backward", "retained backward", "dropped", "partial backward"])
def test_everything_dies_without_the_garbage_collector(region, ending):
    """No reference cycles: what a region held is gone as soon as the last name for it is."""
    refs = []

    class Mark:
        pass

    def scope():
        x = torch.randn(4, 4, requires_grad=True)
        mark = Mark()
        refs.append(weakref.ref(mark))

        def function(x):
            y = (x @ x).sin()
            assert mark is not None
            refs.append(weakref.ref(y))
            return y.exp().cos()

        out = region(function, x.exp())
        refs.append(weakref.ref(out))
        if ending == "backward":
            out.sum().backward()
        elif ending == "retained backward":
            out.sum().backward(retain_graph=True)
        elif ending == "partial backward":
            torch.autograd.grad(out.sum(), x, retain_graph=True)

    gc.collect()
    gc.disable()
    try:
        scope()
        alive = [r() for r in refs if r() is not None]
    finally:
        gc.enable()
    assert alive == []


def test_recomputed_values_that_backward_did_not_need_are_dropped_at_its_end():
    x = torch.randn(64, 64, requires_grad=True)

    def function(x):
        return x.sin().exp(), x.cos().exp()

    a, b = plain(function, x)
    gc.collect()
    before = num_live_storages()
    torch.autograd.grad(a.sum(), x, retain_graph=True)
    gc.collect()
    assert num_live_storages() <= before
    del b


def test_recomputed_values_are_freed_as_backward_uses_them():
    alive = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            alive.append(sum(r() is not None for r in storages))
            return grad

    storages = []

    def function(x):
        for _ in range(4):
            x = Look.apply(x.exp())
            if is_recomputing():
                storages.append(weakref.ref(x.untyped_storage()))
        return x

    plain(function, torch.randn(4, requires_grad=True)).sum().backward()
    assert alive == sorted(alive, reverse=True)
    assert sum(r() is not None for r in storages) == 0


@every_region
def test_partial_backwards_leave_nothing_of_an_inner_region(region):
    """The outer region's recomputation runs the inner one, too, whose values nobody asks for."""
    weight = torch.randn(64, requires_grad=True)

    def outer(x):
        return (region(lambda x: (x.sin() * x.cos()).tanh(), x) * weight).sin()

    out = region(outer, torch.randn(64, requires_grad=True)).sum()
    gc.collect()
    before = sum(type(o) is torch.Tensor for o in gc.get_objects())
    for _ in range(3):
        torch.autograd.grad(out, weight, retain_graph=True)
    gc.collect()
    assert sum(type(o) is torch.Tensor for o in gc.get_objects()) == before
