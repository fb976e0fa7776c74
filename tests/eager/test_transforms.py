"""Regions under torch.func, inside and around torch.compile, and on several threads."""

from __future__ import annotations

import threading
import types
from contextlib import nullcontext

import pytest
import torch
from support.eager_testing import REGIONS, OpCounter, plain
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad

from remat.passes.torch_private import peek_functorch_stack, top_saved_tensors_hooks
from remat.regions.region import checkpoint_region, is_recomputing

pytestmark = [
    # torch's own: forward-mode AD loads decompositions written in TorchScript, Dynamo looks at `.grad` of
    # what it traces.
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]

every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
some_regions = pytest.mark.parametrize(
    "region", [REGIONS["plain"], REGIONS["save_matmuls"]], ids=["plain", "save_matmuls"]
)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    torch._dynamo.reset()
    yield
    assert top_saved_tensors_hooks(True) is None
    assert peek_functorch_stack() is None
    assert not is_recomputing()


def chain(x):
    return (x.sin() @ x).cos()


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True)


class TestFunc:
    @every_region
    def test_grad(self, region, x):
        found = torch.func.grad(lambda x: region(chain, x).sum())(x.detach())
        assert torch.equal(found, torch.func.grad(lambda x: chain(x).sum())(x.detach()))

    @every_region
    def test_vmap_and_backward_through_it(self, region, x):
        out = torch.func.vmap(lambda row: region(lambda r: r.sin().exp(), row))(x)
        expected = torch.autograd.grad(x.sin().exp().sum(), x)[0]
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)

    @every_region
    def test_jvp(self, region, x):
        primal, tangent = x.detach(), torch.ones(4, 4)
        found = torch.func.jvp(lambda x: region(chain, x), (primal,), (tangent,))
        for a, b in zip(found, torch.func.jvp(chain, (primal,), (tangent,)), strict=True):
            assert torch.equal(a, b)

    @every_region
    def test_jacrev_and_hessian(self, region, x):
        function = lambda x: region(lambda x: x.sin().exp(), x)  # noqa: E731
        row = x.detach()[0]
        torch.testing.assert_close(torch.func.jacrev(function)(row), torch.diag(row.cos() * row.sin().exp()))
        hessian = torch.func.hessian(lambda r: function(r).sum())(row)
        torch.testing.assert_close(hessian, torch.func.hessian(lambda r: r.sin().exp().sum())(row))

    @every_region
    def test_functional_call(self, region, x):
        layer = nn.Linear(4, 4)
        values = {name: p.detach() * 2 for name, p in layer.named_parameters()}

        def loss(values):
            return torch.func.functional_call(layer, values, (x.detach(),)).sin().sum()

        def loss_in_region(values):
            return region(loss, values)

        for name, grad in torch.func.grad(loss_in_region)(values).items():
            assert torch.equal(grad, torch.func.grad(loss)(values)[name])

    def test_a_forward_mode_level_around(self, x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), torch.ones(4, 4))
            tangent = forward_ad.unpack_dual(plain(chain, dual)).tangent
        assert torch.equal(tangent, torch.func.jvp(chain, (x.detach(),), (torch.ones(4, 4),))[1])


def normalised(x):
    return nn.functional.layer_norm(chain(x), (4,)).exp()


def nested(x):
    return plain(lambda x: chain(x) * x, x.exp()).sin()


class TestCompiledAutograd:
    """Backward as a graph of its own, which calls the hooks that recompute."""

    @some_regions
    def test_gradients(self, region, x):
        seen = []

        def function(x):
            seen.append(torch._dynamo.is_compiling())
            return chain(x)

        expected = torch.autograd.grad(chain(x.exp()).sum(), x)[0]
        with compiled_autograd._enable(torch.compile(backend="eager")):
            region(function, x.exp()).sum().backward()
        assert torch.equal(x.grad, expected)
        assert seen == [False] * len(seen)

    def test_nested_regions_are_recomputed_once(self, x):
        calls = [0]

        def inner(x):
            calls[0] += 1
            return chain(x)

        region = checkpoint_region(lambda x: checkpoint_region(inner)(x.exp()).tanh())
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            region(x).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(chain(x.exp()).tanh().sum(), x)[0])
        assert calls == [2]


def budgeted(function, *args):
    return checkpoint_region(memory_budget=1.0)(function)(*args)


class TestForwardOverReverse:
    """Gradients that are taken inside of a level of forward-mode AD, with their tangents."""

    def gradient_and_tangent(self, region, function, x):
        # With code of its own: what a region recomputes for the first time is watched, and must be as ever.
        function = types.FunctionType(function.__code__.replace(), function.__globals__)
        with forward_ad.dual_level():
            out = region(function, forward_ad.make_dual(x, torch.ones(4, 4)))
            return forward_ad.unpack_dual(*torch.autograd.grad(out.sum(), x))

    @pytest.mark.parametrize("region", [*REGIONS.values(), budgeted], ids=[*REGIONS, "budgeted"])
    @pytest.mark.parametrize("function", [chain, normalised, nested])
    def test_gradients_and_tangents(self, region, function, x):
        found = self.gradient_and_tangent(region, function, x)
        expected = self.gradient_and_tangent(lambda function, x: function(x), function, x)
        if region in (plain, budgeted):
            assert torch.equal(found.primal, expected.primal)
            assert torch.equal(found.tangent, expected.tangent)
        else:  # under a policy's dispatch mode torch itself computes derivatives of norms by other ops
            torch.testing.assert_close(found, expected)


class TestCompile:
    @every_region
    def test_a_compiled_block_inside(self, region, x):
        block = torch.compile(chain, backend="aot_eager")
        function = lambda x: block(x.exp()).tanh()  # noqa: E731
        (grad,) = torch.autograd.grad(region(function, x).sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(chain(x.exp()).tanh().sum(), x)[0])

    @some_regions
    def test_a_compiled_block_inside_with_retain_graph(self, region, x):
        block = torch.compile(chain, backend="aot_eager")
        out = region(lambda x: block(x).tanh(), x)
        grads = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(*grads)

    @every_region
    def test_a_region_inside_compiled_code(self, region, x):
        function = torch.compile(lambda x: region(chain, x.exp()).tanh(), backend="aot_eager")
        (grad,) = torch.autograd.grad(function(x).sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(chain(x.exp()).tanh().sum(), x)[0])

    @some_regions
    def test_a_graph_break_inside_a_region_inside_compiled_code(self, region, x):
        def broken(x):
            x = x.sin()
            torch._dynamo.graph_break()
            return (x @ x).cos()

        function = torch.compile(lambda x: region(broken, x.exp()).tanh(), backend="aot_eager")
        # A region of our own reports the break; torch's function, compiled, is torch's own.
        report = nullcontext() if region is plain else pytest.warns(UserWarning, match="graph break in region broken")
        with report:
            (grad,) = torch.autograd.grad(function(x).sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(broken(x.exp()).tanh().sum(), x)[0])

    def test_the_compatible_function_is_captured_without_a_graph_break(self, x):
        function = torch.compile(lambda x: plain(chain, x.exp()).tanh(), backend="aot_eager", fullgraph=True)
        (grad,) = torch.autograd.grad(function(x).sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(chain(x.exp()).tanh().sum(), x)[0])

    @some_regions
    def test_a_compiled_module_as_the_region(self, region, x):
        layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        compiled = torch.compile(layer, backend="aot_eager")
        out = region(lambda x: compiled(x), x)
        out.sum().backward()
        expected = torch.autograd.grad(layer(x).sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)


def run_on_threads(work, num_threads=6):
    errors = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class TestThreads:
    @every_region
    def test_regions_on_several_threads(self, region):
        def work(number):
            generator = torch.Generator().manual_seed(number)
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            for _ in range(10):
                x = torch.randn(4, 8, generator=generator).requires_grad_()
                (grad,) = torch.autograd.grad(region(model, x).sum(), x)
                assert torch.equal(grad, torch.autograd.grad(model(x).sum(), x)[0])

        run_on_threads(work)

    @some_regions
    def test_one_module_with_buffers_on_several_threads(self, region):
        """Its statistics are moved by every thread; no recomputation may move them or lose them."""
        model = nn.BatchNorm1d(8)

        def work(number):
            for _ in range(5):
                region(model, torch.randn(4, 8, requires_grad=True)).sum().backward()

        run_on_threads(work)
        assert isinstance(model.num_batches_tracked, torch.Tensor)
        assert torch.isfinite(model.running_mean).all()

    @every_region
    def test_backward_on_another_thread_than_forward(self, region):
        x = torch.randn(4, 4, requires_grad=True)
        out = region(chain, x)
        run_on_threads(lambda _: out.sum().backward(), num_threads=1)
        assert torch.equal(x.grad, torch.autograd.grad(chain(x).sum(), x)[0])

    @every_region
    def test_one_graph_backwarded_on_several_threads_at_once(self, region):
        x = torch.randn(4, 4, requires_grad=True)
        out = region(chain, x)
        expected = torch.autograd.grad(chain(x).sum(), x)[0]

        def work(_):
            for _ in range(5):
                assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], expected)

        run_on_threads(work)

    def test_settings_of_one_thread_do_not_reach_another(self):
        from remat import compat

        barrier, calls = threading.Barrier(2), {}

        def work(number):
            with compat.set_checkpoint_early_stop(number == 0):
                barrier.wait()
                num_calls = [0]

                def function(x):
                    y = x.sin()
                    num_calls[0] += 1
                    return y.clone()

                plain(function, torch.ones(1, requires_grad=True)).backward()
                calls[number] = num_calls[0]
                barrier.wait()

        run_on_threads(work, num_threads=2)
        assert calls == {0: 1, 1: 2}

    def test_recomputing_on_one_thread_is_not_seen_on_another(self):
        seen = []

        def function(x):
            if is_recomputing():
                run_on_threads(lambda _: seen.append(is_recomputing()), num_threads=1)
            return x.sin().exp()

        plain(function, torch.ones(1, requires_grad=True)).backward()
        assert seen == [False]


@pytest.mark.parametrize("is_nested", [False, True])
def test_ops_that_are_made_of_others_under_a_dispatch_mode(is_nested):
    lengths, targets = torch.full((4,), 9), torch.ones(4, 3, dtype=torch.long)

    def loss(x):
        log_probabilities = x.log_softmax(-1)
        return nn.functional.ctc_loss(log_probabilities.sin(), targets, lengths, lengths // 3)

    def whole(x, first=torch.exp, second=loss):
        return second(first(x)).sin()

    x = torch.randn(9, 4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(whole(x), x)
    parts = [checkpoint_region(lambda x: x.exp()), checkpoint_region(loss)] if is_nested else []
    region = checkpoint_region(lambda x: whole(x, *parts))
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(region(x), x)[0], expected)


def test_no_dispatch_mode_is_entered_without_a_policy_after_the_first_recomputation(x):
    modes = []

    def function(x):
        modes.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return x.sin().exp()

    plain(function, x).sum().backward()  # whose recomputation looks for writes to state that nobody knew of
    assert modes.pop(0) is None
    modes.clear()
    plain(function, x).sum().backward()
    assert modes == [None, None]


def test_marked_code_counts_the_same_ops_under_an_observers_mode(x):
    region = checkpoint_region(policy=[torch.ops.aten.mm.default])(chain)
    with OpCounter() as forward:
        out = region(x)
    with OpCounter() as backward:
        out.sum().backward()
    assert forward["mm.default"] == 1
    assert backward["mm.default"] == 2
