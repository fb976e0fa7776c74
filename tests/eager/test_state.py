"""State around a region: moved once by it, and never read changed."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from support.eager_testing import REGIONS, plain, recompute_all, selective
from torch import nn

import remat
from remat import compat
from remat.eager.state.reach import reach
from remat.regions.region import checkpoint_region

every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


class Counting(nn.Module):
    """Counts its calls in a buffer and computes with the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("table", torch.arange(4.0))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.num_calls += 1
        return (x * self.num_calls * self.weight + self.table).sin().exp()


class OwnStatistics(nn.Module):
    """Gives its buffers to the functional batch norm, which changes them without counting a version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(x.sin(), self.mean, self.variance, training=self.training).exp()


MODULES = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()),
    "cumulative batch norm": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Tanh()),
    "counter": Counting,
    "own statistics": OwnStatistics,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)),
}


@every_region
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_module_state_moves_once_and_gradients_are_the_same(region, make):
    torch.manual_seed(0)
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    for _ in range(3):
        x = torch.randn(8, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(region(model, x).sum(), x)
        (expected,) = torch.autograd.grad(reference(x).sum(), x)
        assert torch.equal(grad, expected)
        for name, value in reference.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


@every_region
def test_two_forwards_before_two_backwards(region):
    """Gradient accumulation: the second forward moves state that the first one is replayed on."""
    torch.manual_seed(0)
    model, reference = Counting(), Counting()
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    expected = [torch.autograd.grad(reference(value).sum(), value)[0] for value in (x, y)]
    first, second = region(model, x), region(model, y)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], expected[0])
    assert torch.equal(torch.autograd.grad(second.sum(), y)[0], expected[1])
    assert model.num_calls == 2


def test_a_method_and_a_closure_are_looked_through():
    model, reference = Counting(), Counting()
    for run in (lambda x: model(x), model.forward, functools.partial(lambda m, x: m(x), model)):
        x = torch.randn(4, requires_grad=True)
        (grad,) = torch.autograd.grad(plain(run, x).sum(), x)
        assert torch.equal(grad, torch.autograd.grad(reference(x).sum(), x)[0])
    assert model.num_calls == reference.num_calls == 3


def test_buffers_stay_the_same_objects():
    model = nn.BatchNorm1d(4)
    before = model.running_mean
    plain(model, torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert model.running_mean is before


def test_buffers_are_back_after_a_recomputation_that_raises():
    model = Counting()
    before = model.num_calls

    def function(x):
        if compat_recomputing():
            raise ValueError("only the second time")
        return model(x).sin()

    from remat.regions.region import is_recomputing as compat_recomputing

    out = plain(function, torch.randn(4, requires_grad=True))
    with pytest.raises(ValueError, match="only the second time"):
        out.sum().backward()
    assert model.num_calls is before
    assert before == 1


class TestChangedTensors:
    """Something the region reads is changed in place between its forward and its recomputation."""

    @every_region
    def test_an_argument_is_named(self, region):
        x = torch.randn(4, requires_grad=True)
        h = x * 1

        def block(hidden):
            return hidden.sin().exp()

        out = region(block, h)
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(
            compat.CheckpointError,
            match=r"argument `hidden` of region .*block has been modified by an inplace",
        ):
            out.sum().backward()

    @every_region
    def test_a_keyword_argument_is_named(self, region):
        x, scale = torch.randn(4, requires_grad=True), torch.ones(4)
        out = region(lambda x, scale: (x + scale).sin().exp(), x, scale=scale)
        scale.add_(1)
        with pytest.raises(compat.CheckpointError, match=r"argument `scale` of"):
            out.sum().backward()

    @pytest.mark.parametrize("name", ["plain", "recompute_all"])
    @pytest.mark.parametrize("use", ["saved", "only read"])
    def test_a_closed_over_tensor_is_named(self, name, use):
        x, factor = torch.randn(4, requires_grad=True), torch.ones(4)
        combine = torch.mul if use == "saved" else torch.add
        out = REGIONS[name](lambda x: combine(x, factor).sin().exp(), x)
        factor.add_(1)
        with pytest.raises(compat.CheckpointError, match=r"`factor`, .* has been modified by an inplace operation"):
            out.sum().backward()

    @pytest.mark.parametrize("parameter", ["0.weight", "0.bias", "2.weight"])
    def test_a_parameter_is_named(self, parameter):
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        out = plain(model, torch.randn(2, 4, requires_grad=True))
        with torch.no_grad():
            model.get_parameter(parameter).add_(1)
        with pytest.raises(compat.CheckpointError, match=f"`{parameter}`, "):
            out.sum().backward()

    def test_an_optimizer_step_in_between_is_found(self):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(2, 4, requires_grad=True)
        late = plain(lambda x: model(x).sin(), x)
        model(x).sum().backward()
        optimizer.step()
        with pytest.raises(compat.CheckpointError, match=r"`model.(weight|bias)`"):
            late.sum().backward()

    def test_a_buffer_changed_by_somebody_else_is_named(self):
        model = Counting()
        out = plain(model, torch.randn(4, requires_grad=True))
        model.table.add_(1)
        with pytest.raises(compat.CheckpointError, match="`table`, read by"):
            out.sum().backward()

    def test_a_global_is_named(self):
        out = plain(reads_a_global, torch.randn(4, requires_grad=True))
        a_global.add_(1)
        with pytest.raises(compat.CheckpointError, match="`a_global`"):
            out.sum().backward()

    def test_a_changed_tensor_that_is_not_read_again_is_no_error(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(4, 4), nn.BatchNorm1d(4)

            def forward(self, x):
                return plain(lambda x: self.used(x).sin(), x)

        model = Model()
        out = model(torch.randn(2, 4, requires_grad=True))
        with torch.no_grad():
            model.unused.weight.add_(1)
        model.unused(torch.randn(2, 4))
        out.sum().backward()

    def test_the_argument_of_an_inner_region_is_named(self):
        x = torch.randn(4, requires_grad=True)
        scale = torch.ones(4)

        def inner(value, scale):
            return (value * scale).sin()

        out = plain(lambda x, scale: plain(inner, x.cos(), scale).exp(), x, scale)
        scale.add_(1)
        with pytest.raises(compat.CheckpointError, match="argument `scale`"):
            out.sum().backward()

    def test_a_region_that_changes_its_own_argument_raises_in_backward(self):
        x = torch.randn(4, requires_grad=True)

        def function(h):
            return h.mul_(2).sin()

        out = plain(function, x * 1)
        with pytest.raises(compat.CheckpointError, match="argument `h`"):
            out.sum().backward()


a_global = torch.ones(4)


def reads_a_global(x):
    return (x + a_global).sin().exp()


@every_region
def test_a_module_that_is_an_argument_moves_once(region):
    def run(call):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(4), torch.randn(8, 4, requires_grad=True)
        call(lambda module, x: module(x).sin().exp(), norm, x).sum().backward()
        return norm.running_mean, norm.num_batches_tracked, x.grad

    for found, expected in zip(run(region), run(lambda f, *args: f(*args)), strict=True):
        assert torch.equal(found, expected)


def test_a_tensor_in_a_list_argument_changed_in_between_is_named():
    x, scales = torch.ones(4, requires_grad=True), [torch.ones(4)]
    out = plain(lambda x, scales: (x * scales[0]).sin(), x, scales)
    scales[0].add_(1)
    with pytest.raises(compat.CheckpointError, match=r"`argument 1\[0\]`.* modified by an inplace operation"):
        out.sum().backward()


class TestReach:
    def test_finds_what_a_function_can_touch(self):
        layer, tensor, generator = nn.Linear(2, 2), torch.ones(1), torch.Generator()
        inside = {"layers": [layer]}

        def wrapped(x, default=tensor):
            return inside["layers"][0](x) * a_global * torch.rand(1, generator=generator)

        found = reach(functools.partial(wrapped))
        assert [m for _, m in found.modules] == [layer]
        assert {id(t) for t in found.tensors} == {id(tensor), id(a_global)}
        assert found.generators == [generator]

    def test_finds_what_an_object_keeps_in_slots(self):
        class Base:
            __slots__ = ("generator",)

        class Slotted(Base):
            __slots__ = ("tensor", "unset")

        obj = Slotted()
        obj.generator, obj.tensor = torch.Generator(), torch.ones(1)
        found = reach(lambda: obj)
        assert found.generators == [obj.generator]
        assert [id(t) for t in found.tensors] == [id(obj.tensor)]

    def test_remembering_a_module_does_not_keep_it_alive(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        plain(model, torch.randn(8, 4, requires_grad=True)).sum().backward()
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None


def test_a_module_marked_as_a_region_keeps_its_buffers_right():
    model, reference = checkpoint_region(nn.BatchNorm1d(4)), nn.BatchNorm1d(4)
    x = torch.randn(8, 4, requires_grad=True)
    model(x).sin().sum().backward()
    reference(x)
    assert torch.equal(model.running_var, reference.running_var)


def test_eval_mode_then_train_mode_is_learnt_anew():
    model, reference = OwnStatistics(), OwnStatistics()
    for training in (False, True, False, True):
        model.train(training)
        reference.train(training)
        x = torch.randn(8, 4, requires_grad=True)
        selective(recompute_all, model, x).sum().backward()
        reference(x)
        assert torch.equal(model.mean, reference.mean)


class Average(nn.Module):
    """Keeps a running average, by assignment or in place."""

    def __init__(self, in_place):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.in_place = in_place

    def forward(self, x):
        if self.in_place:
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        else:
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        return (x * self.mean.clone()).sin()


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), lambda: Average(True), lambda: Average(False)])
@pytest.mark.parametrize("runs_between", [False, True])
def test_one_region_may_run_other_modules_from_call_to_call(make, runs_between):
    """What its first call leaves alone says nothing about the calls after it."""

    def train(region):
        torch.manual_seed(0)
        layers = nn.ModuleList(make() for _ in range(3))
        x = torch.randn(8, 4, requires_grad=True)
        run = region(lambda x, index: layers[index](x).sin())
        for _ in range(2):
            out = run(x, 0)
            if runs_between:
                out = layers[1](out)
            run(run(out, 1), 2).sum().backward()
        return [x.grad, *layers.buffers()]

    assert all(map(torch.equal, train(checkpoint_region), train(lambda function: function)))


# --- parameters that take each other's place ---------------------------------------------------------------------


def test_parameters_that_functional_call_replaces_are_refused_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    remat.apply(model, "0")
    tensors = {name: torch.randn_like(value, requires_grad=True) for name, value in model.named_parameters()}
    out = torch.func.functional_call(model, tensors, (torch.randn(2, 4),))
    with pytest.raises(
        compat.CheckpointError, match=r"weight is another tensor than it was in forward.*functional_call"
    ):
        out.sum().backward()


def test_region_around_functional_call_has_the_gradients_of_no_region() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4)
    tensors = {name: torch.randn_like(value, requires_grad=True) for name, value in model.named_parameters()}
    expected = torch.autograd.grad(torch.func.functional_call(model, tensors, (x,)).sin().sum(), tensors.values())
    out = remat.checkpoint(torch.func.functional_call, model, tensors, (x,), use_reentrant=False)
    actual = torch.autograd.grad(out.sin().sum(), tensors.values())
    assert all(map(torch.equal, actual, expected))


class LargeState(nn.Module):
    """Moves a buffer of 4 MiB in each call and computes with it, beside another one that it only reads."""

    num_elements = 1 << 20

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(self.num_elements))
        self.register_buffer("table", torch.linspace(0, 1, self.num_elements))

    def forward(self, x):
        self.total.mul_(0.5).add_(x.detach().mean())
        return (x * self.total[:4] + self.table[:4]).sin().exp()


@every_region
def test_a_large_buffer_moves_once_from_the_first_step_on(region):
    torch.manual_seed(0)
    model, reference = LargeState(), LargeState()
    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        (grad,) = torch.autograd.grad(region(model, x).sum(), x)
        assert torch.equal(grad, torch.autograd.grad(reference(x).sum(), x)[0])
        assert torch.equal(model.total, reference.total)


def test_of_large_buffers_only_those_are_kept_that_the_region_changes():
    """One copy of what is changed, for each call that waits for backward; one more of all, during the first call."""
    model, kept_bytes = LargeState(), []
    for _ in range(2):
        before = _live_buffer_bytes()
        out = plain(model, torch.randn(4, requires_grad=True))
        kept_bytes.append(_live_buffer_bytes() - before)
        out.sum().backward()
    one_buffer = 4 * LargeState.num_elements
    assert kept_bytes == [one_buffer] * 2


def _live_buffer_bytes():
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() == LargeState.num_elements]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class DataSwapped(nn.Module):
    """Puts other memory under its buffer in each call, which counts no version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.data = self.scale + 1
        return (x * self.scale).sin().exp()


@every_region
def test_memory_swapped_under_a_buffer_is_noticed_when_calls_run_different_modules(region):
    modules, references = (nn.ModuleList([DataSwapped(), DataSwapped()]) for _ in range(2))

    def choose(x, index):
        return modules[index](x)

    for index in (0, 1, 1, 0, 1):
        x = torch.randn(4, requires_grad=True)
        (grad,) = torch.autograd.grad(region(choose, x, index).sum(), x)
        assert torch.equal(grad, torch.autograd.grad(references[index](x).sum(), x)[0])
        assert torch.equal(torch.stack([m.scale for m in modules]), torch.stack([m.scale for m in references]))
