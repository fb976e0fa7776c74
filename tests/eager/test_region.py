"""A region gives the same bits as its function, whatever is done with it."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading

import pytest
import torch
import torch.utils.checkpoint
from support.eager_testing import REGIONS, OpCounter, assert_same_grads, plain, save_all, selective
from torch import nn

from remat import compat
from remat.passes.shared.errors import OptionError
from remat.regions.region import checkpoint_region, is_recomputing

every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


def mlp(x):
    return torch.tanh(x @ x.t()).sin() @ x


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True)


@every_region
def test_outputs_and_gradients_are_bitwise_those_of_the_function(region, x):
    assert_same_grads(region, mlp, x)


@every_region
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.RReLU(), nn.Dropout1d(0.3)], ids=lambda m: type(m).__name__)
def test_random_layers_draw_the_same_numbers_again(region, layer, x):
    assert_same_grads(region, lambda x: layer(x.sin()).cos() * layer(x), x)


@every_region
def test_an_input_without_grad_and_a_parameter_with_grad(region):
    layer = nn.Linear(4, 4)
    out = region(lambda x: layer(x).sin(), torch.randn(2, 4))
    out.sum().backward()
    assert layer.weight.grad is not None


@every_region
def test_nothing_needs_grad(region):
    assert not region(lambda x: x.sin(), torch.randn(3)).requires_grad


@every_region
def test_no_grad_runs_the_function_once_and_saves_nothing(region, x):
    with torch.no_grad():
        out = region(mlp, x)
    assert out.grad_fn is None
    assert torch.equal(out, mlp(x))


@every_region
def test_inference_mode_runs_the_function(region):
    with torch.inference_mode():
        assert region(lambda x: x.sin(), torch.ones(2)).is_inference()


@every_region
def test_keyword_arguments_pytrees_and_non_tensors(region, x):
    Pair = collections.namedtuple("Pair", "left right")

    def function(x, *, config, pair, flag=True):
        out = x.sin() * config["scale"][0] + pair.left * pair.right
        return {"out": out if flag else x, "shape": list(out.shape), "none": None}

    def call(run):
        result = run(function, x, config={"scale": [x * 2]}, pair=Pair(x, 3.0), flag=True)
        return result, torch.autograd.grad(result["out"].sum(), x)[0]

    result, grad = call(region)
    expected, expected_grad = call(lambda f, *a, **k: f(*a, **k))
    assert torch.equal(result["out"], expected["out"])
    assert torch.equal(grad, expected_grad)
    assert result["shape"] == [4, 4]
    assert result["none"] is None


@every_region
def test_unused_outputs(region, x):
    def function(x):
        return x.sin().exp(), x.cos().exp()

    out, _ = region(function, x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(function(x)[0].sum(), x)[0])


@every_region
def test_a_detached_part(region, x):
    assert_same_grads(region, lambda x: x.sin() * x.exp().detach() + x.cos(), x)


@every_region
def test_a_part_under_no_grad(region, x):
    def function(x):
        with torch.no_grad():
            scale = x.exp().sum()
        return x.sin() * scale

    assert_same_grads(region, function, x)


@every_region
def test_a_view_of_the_input_as_output(region, x):
    assert_same_grads(region, lambda x: x.view(2, 8)[:, 1:], x)


@every_region
def test_in_place_ops_inside(region, x):
    assert_same_grads(region, lambda x: x.sin().mul_(2).add_(x).exp().sin().relu_(), x)


@every_region
def test_several_backwards_with_retain_graph(region, x):
    out = region(mlp, x)
    expected = torch.autograd.grad(mlp(x).sum(), x)[0]
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], expected)
    out.sum().backward()
    assert torch.equal(x.grad, expected)


@every_region
def test_a_backward_from_each_of_several_outputs(region, x):
    def function(x):
        a = x.sin().exp()
        return a, a.cos() @ x

    a, b = region(function, x)
    ra, rb = function(x)
    for out, reference in ((a, ra), (b, rb)):
        found = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        assert torch.equal(found, torch.autograd.grad(reference.sum(), x, retain_graph=True)[0])


@every_region
def test_disjoint_backwards_without_retain_graph(region, x):
    def function(x):
        y = x.sin().cos()
        return y, y.sin().cos()

    y, z = region(function, x)
    (grad_y,) = torch.autograd.grad(z, y, torch.ones_like(z))
    (grad_x,) = torch.autograd.grad(y, x, grad_y)
    _, rz = function(x)
    assert torch.equal(grad_x, torch.autograd.grad(rz.sum(), x)[0])


@every_region
def test_partial_backward_by_inputs(region):
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    out = region(lambda x, w: (x @ w).sin(), x, w)
    out.sum().backward(inputs=[w])
    assert x.grad is None
    assert torch.equal(w.grad, torch.autograd.grad((x @ w).sin().sum(), w)[0])


@every_region
def test_double_backward(region, x):
    def second(run):
        (grad,) = torch.autograd.grad(run(mlp, x).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    torch.testing.assert_close(second(region), second(lambda f, x: f(x)))


@every_region
def test_gradcheck_and_gradgradcheck(region):
    x = torch.randn(3, 3, dtype=torch.double, requires_grad=True)
    function = lambda x: region(lambda x: (x @ x).sin(), x)  # noqa: E731
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@every_region
def test_backward_inside_the_function(region, x):
    def function(x):
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return grad.cos()

    assert_same_grads(region, function, x)


@every_region
def test_a_backward_started_by_a_hook_of_another(region, x):
    def function(x):
        y = x.sin().cos()
        return y, y.sin()

    y, z = region(function, x)
    z.grad_fn.register_hook(lambda *_: y.backward(torch.ones_like(y), retain_graph=True))
    z.sum().backward(retain_graph=True)
    ry, rz = function(x)
    expected = torch.autograd.grad(ry.sum() + rz.sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@every_region
def test_module_and_tensor_hooks_run(region, x):
    calls = collections.Counter()
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: calls.update(["forward"]))
    layer.register_full_backward_hook(lambda *_: calls.update(["backward"]))
    layer.weight.register_hook(lambda grad: calls.update(["weight"]))

    def function(x):
        y = layer(x)
        y.register_hook(lambda grad: calls.update(["tensor"]))
        return y.sin()

    region(function, x).sum().backward()
    assert calls["backward"] == calls["weight"] == 1
    assert calls["tensor"] == 1
    assert calls["forward"] == 2


@every_region
def test_saved_tensor_hooks_of_the_user_outside(region, x):
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = region(mlp, x)
    assert [tuple(t.shape) for t in packed] == [(4, 4)], "only the region's input is saved outside of it"
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(mlp(x).sum(), x)[0])


@every_region
def test_saved_tensor_hooks_of_the_user_inside(region, x):
    def function(x):
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = y.exp() * y
        return y.cos()

    assert_same_grads(region, function, x)


@every_region
def test_save_on_cpu_around(region, x):
    def function(x):
        with torch.autograd.graph.save_on_cpu():
            return region(mlp, x.exp())

    (grad,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(mlp(x.exp()).sum(), x)[0])


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, grad * x


@every_region
def test_custom_autograd_function(region, x):
    assert_same_grads(region, lambda x: Scale.apply(x.sin(), x).cos(), x)


def test_a_saved_tensor_without_grad_is_the_same_object_in_backward():
    seen = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return grad, None

    a, b = torch.ones(1, requires_grad=True), torch.ones(1)
    plain(Keep.apply, a, b).backward()
    assert seen[0] is b


def test_reading_saved_tensors_twice_in_one_backward_is_refused():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(2):
                (_x,) = ctx.saved_tensors
            return grad

    with pytest.raises(compat.CheckpointError, match="was already unpacked once"):
        plain(lambda x: Twice.apply(x.sin()), torch.ones(1, requires_grad=True)).backward()


def test_saved_tensors_can_be_looked_at_outside_of_backward(x):
    out = plain(lambda x: x.sin().exp(), x)
    for _ in range(2):
        assert torch.equal(out.grad_fn._saved_result, x.sin().exp())


class Wrapped(torch.Tensor):
    """A wrapper subclass that counts the ops it is given."""

    num_ops = 0

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.num_ops += 1
        unwrap = lambda t: t.inner if isinstance(t, cls) else t  # noqa: E731
        out = func(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))
        return torch.utils._pytree.tree_map(lambda t: cls(t) if isinstance(t, torch.Tensor) else t, out)


@pytest.mark.parametrize("name", ["plain", "save_all", "recompute_all"])
def test_tensor_subclasses(name):
    inner = torch.randn(3, 3)
    x = Wrapped(inner).requires_grad_()
    REGIONS[name](mlp, x).sum().backward()
    reference = inner.clone().requires_grad_()
    mlp(reference).sum().backward()
    assert isinstance(x.grad, Wrapped)
    assert torch.equal(x.grad.inner, reference.grad)


class TestEarlyStop:
    def calls_of_the_last_op(self, **options):
        calls = []

        def function(x):
            y = x.sin().cos()
            calls.append(1)
            return y.clone()

        plain(function, torch.ones(1, requires_grad=True), **options).backward()
        return len(calls)

    def test_recomputation_stops_after_the_last_saved_tensor(self):
        assert self.calls_of_the_last_op() == 1

    def test_it_can_be_switched_off_by_argument(self):
        assert self.calls_of_the_last_op(early_stop=False) == 2

    @pytest.mark.parametrize("argument", [True, False])
    def test_the_context_manager_overrides_the_argument(self, argument):
        with compat.set_checkpoint_early_stop(False):
            assert self.calls_of_the_last_op(early_stop=argument) == 2
        with compat.set_checkpoint_early_stop(True):
            assert self.calls_of_the_last_op(early_stop=argument) == 1

    def test_context_managers_nest_and_count_for_the_forward_only(self):
        calls = []

        def function(x):
            y = x.sin()
            calls.append(1)
            return y.clone()

        with compat.set_checkpoint_early_stop(True), compat.set_checkpoint_early_stop(False):
            out = plain(function, torch.ones(1, requires_grad=True))
        out.backward()
        assert len(calls) == 2

    def test_user_code_that_catches_exceptions_does_not_swallow_the_stop(self, x):
        def function(x):
            try:
                return x.sin().exp()
            except Exception:  # noqa: BLE001
                return x

        assert_same_grads(plain, function, x)

    def test_what_only_dead_nodes_wanted_is_not_recomputed(self, x):
        def function(x):
            out = x.sin().exp()
            x.cos().exp()  # dropped at once
            return out

        out = plain(function, x)
        with OpCounter() as backward:
            out.sum().backward()
        assert backward["exp.default"] == 1
        assert backward["cos.default"] == 1, "the gradient of sin; not the dropped cos"


class TestContexts:
    def test_context_fn_gives_one_context_to_the_forward_and_one_to_the_recomputation(self, x):
        entered = []

        @contextlib.contextmanager
        def note(name):
            entered.append(name)
            yield
            entered.append(f"end of {name}")

        context_fn = lambda: (note("forward"), note("recompute"))  # noqa: E731
        plain(mlp, x, context_fn=context_fn).sum().backward()
        assert entered == ["forward", "end of forward", "recompute", "end of recompute"]

    def test_a_context_that_can_be_entered_once_serves_several_backwards(self, x):
        entered = []

        @contextlib.contextmanager
        def note():
            entered.append(1)
            yield

        out = plain(mlp, x, context_fn=lambda: (contextlib.nullcontext(), note()))
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        assert len(entered) == 2

    def test_a_forward_context_that_swallows_an_exception_is_refused(self, x):
        context_fn = lambda: (contextlib.suppress(ZeroDivisionError), contextlib.nullcontext())  # noqa: E731
        with pytest.raises(RuntimeError, match="suppressed an exception raised during"):
            plain(lambda x: 1 / 0, x, context_fn=context_fn)


class TestAmbientSettings:
    def settings_seen(self, function_around):
        seen = []
        layer = nn.Linear(4, 4)

        def function(x):
            seen.append(
                (
                    torch.is_autocast_enabled("cpu"),
                    torch.get_autocast_dtype("cpu"),
                    torch.is_autocast_cache_enabled(),
                    torch.get_default_dtype(),
                    torch.empty(0).device,
                    torch.is_grad_enabled(),
                )
            )
            return layer(x).sin()

        with function_around():
            out = plain(function, torch.randn(2, 4, requires_grad=True, dtype=torch.float32, device="cpu"))
        before = (
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.is_autocast_cache_enabled(),
        )
        out.sum().backward()
        after = (
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.is_autocast_cache_enabled(),
        )
        assert before == after
        return seen

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("cache", [True, False])
    def test_autocast_is_what_it_was(self, dtype, cache):
        forward, recompute = self.settings_seen(lambda: torch.autocast("cpu", dtype=dtype, cache_enabled=cache))
        assert forward == recompute
        assert forward[:3] == (True, dtype, cache)

    def test_the_default_device_is_what_it_was(self):
        forward, recompute = self.settings_seen(lambda: torch.device("meta"))
        assert forward == recompute
        assert forward[4].type == "meta"

    def test_the_default_dtype_is_what_it_was(self):
        @contextlib.contextmanager
        def double():
            torch.set_default_dtype(torch.float64)
            try:
                yield
            finally:
                torch.set_default_dtype(torch.float32)

        layer = nn.Linear(4, 4, dtype=torch.float32)
        seen = []

        def function(x):
            seen.append(torch.get_default_dtype())
            return layer(x) * torch.ones(4)

        with double():
            out = plain(function, torch.randn(2, 4, requires_grad=True, dtype=torch.float32))
        out.sum().backward()
        assert seen == [torch.float64, torch.float64]
        assert torch.get_default_dtype() is torch.float32

    def test_backward_under_autocast_recomputes_without_it(self):
        layer = nn.Linear(4, 4)
        seen = []

        def function(x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return layer(x).sin()

        out = plain(function, torch.randn(2, 4, requires_grad=True))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out.sum().backward()
            assert torch.is_autocast_enabled("cpu")
        assert seen == [False, False]

    def test_autocast_entered_inside(self):
        layer = nn.Linear(4, 4)

        def function(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return layer(x).sin()

        assert_same_grads(plain, function, torch.randn(2, 4, requires_grad=True))

    def test_a_module_called_twice_under_one_autocast_block(self):
        """The second call finds its weight in autocast's cache; its recomputation does not."""
        layer = nn.Linear(4, 4)
        x = torch.randn(2, 4, requires_grad=True)
        for region in REGIONS.values():
            layer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = region(layer, region(layer, x))
            out.float().sum().backward()
            found = layer.weight.grad.clone()
            layer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                layer(layer(x)).float().sum().backward()
            assert torch.equal(found, layer.weight.grad)


class TestGraphExecGroup:
    def recomputations(self, group):
        calls = []

        def function(x):
            calls.append(1)
            y = x.sin().cos()
            return y, y.sin().cos()

        x = torch.randn(3, requires_grad=True)
        y, z = plain(function, x)
        with group:
            (grad_y,) = torch.autograd.grad(z, y, torch.ones(3))
            torch.autograd.grad(y, x, grad_y)
        return len(calls) - 1

    def test_backwards_of_a_group_share_one_recomputation(self):
        assert self.recomputations(compat.GraphExecGroup()) == 1
        assert self.recomputations(contextlib.nullcontext()) == 2

    def test_overlapping_backwards_in_a_group_are_refused(self):
        out = plain(lambda x: x.sin().cos(), torch.randn(3, requires_grad=True))
        with compat.GraphExecGroup():
            out.sum().backward(retain_graph=True)
            with pytest.raises(compat.CheckpointError, match="Performing two backward calls that overlap"):
                out.sum().backward()

    def test_groups_do_not_nest(self):
        with (
            compat.GraphExecGroup(),
            pytest.raises(RuntimeError, match="cannot be nested"),
            compat.GraphExecGroup(),
        ):
            pass


class TestDecorator:
    def test_bare_and_with_options(self, x):
        bare = checkpoint_region(mlp)
        named = checkpoint_region(name="mlp", policy=[torch.ops.aten.mm.default])(mlp)
        assert bare.__name__ == "mlp"
        for region in (bare, named):
            assert_same_grads(lambda f, x, region=region: region(x), mlp, x)

    def test_methods(self, x):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)

            @checkpoint_region
            def block(self, x, *, scale=1.0):
                return self.layer(x).sin() * scale

            def forward(self, x):
                return self.block(x, scale=2.0)

        model = Model()
        with OpCounter() as forward:
            out = model(x)
        with OpCounter() as backward:
            out.sum().backward()
        assert forward["addmm.default"] == 1
        assert backward["addmm.default"] == 1

    def test_a_module_stays_the_module_it_is(self, x):
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        keys, kind = list(model.state_dict()), type(model[0])
        before = model(x)
        assert checkpoint_region(model[0]) is model[0]
        assert type(model[0]) is kind
        assert list(model.state_dict()) == keys
        assert torch.equal(model(x), before)

    def test_partials_lambdas_and_closures(self, x):
        scale = torch.ones(4, requires_grad=True)
        function = checkpoint_region(functools.partial(lambda a, b: (a * b * scale).sin(), b=2.0))
        function(x).sum().backward()
        assert scale.grad is not None

    def test_what_is_not_callable_is_refused(self):
        with pytest.raises(ValueError, match="marks a function, a method or a module, not int"):
            checkpoint_region(3)

    def test_is_recomputing_tells_the_two_runs_apart(self, x):
        seen = []

        def function(x):
            seen.append(is_recomputing())
            return x.sin().exp()

        checkpoint_region(function)(x).sum().backward()
        assert seen == [False, True]
        assert not is_recomputing()


def test_activations_are_not_kept():
    class Kept(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            self.num_bytes = 0
            super().__init__(self.pack, lambda t: t)

        def __enter__(self):
            super().__enter__()
            return self

        def pack(self, tensor):
            self.num_bytes += tensor.nbytes
            return tensor

    x = torch.randn(64, 64, requires_grad=True)
    with Kept() as kept:
        out = plain(lambda x: x.sin().cos().exp().tanh(), x)
    assert kept.num_bytes == x.nbytes
    del out


def test_a_policy_that_saves_everything_runs_nothing_again(x):
    out = selective(save_all, lambda x: x.sin().exp().tanh(), x)
    with OpCounter() as backward:
        out.sum().backward()
    assert backward["exp.default"] == backward["tanh.default"] == backward["sin.default"] == 0


def generator(x):
    yield x.sin()


async def coroutine(x):
    return x.sin()


class Yielding(nn.Module):
    def forward(self, x):
        yield x.sin()


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        (generator, "cannot mark generator: it is a generator"),
        (coroutine, "cannot mark coroutine: it is a coroutine"),
        (Yielding(), "cannot mark Yielding: it is a generator"),
        (nn.Linear, "Linear is a class. Mark its forward method, or an instance of it"),
        (3, "not int"),
    ],
)
def test_what_cannot_be_a_region_is_refused_when_it_is_marked(marked, message):
    with pytest.raises(OptionError, match=message):
        checkpoint_region(marked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polcy": None}, "no option 'polcy'.* Did you mean 'policy'"),
        ({"name": 3}, "name=3"),
        ({"name": ""}, "name=''"),
        ({"early_stop": 1}, "early_stop=1.: expected True or False"),
        ({"preserve_rng_state": "no"}, "preserve_rng_state='no'.: expected True or False"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_marked(options, message):
    with pytest.raises(OptionError, match=message):
        checkpoint_region(**options)


def test_static_and_class_methods_stay_such():
    class Model:
        @checkpoint_region
        @staticmethod
        def static(x):
            return x.sin().exp()

        @checkpoint_region(name="of the class")
        @classmethod
        def of_class(cls, x):
            assert cls is Model
            return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    (Model().static(x) + Model.of_class(x)).sum().backward()
    assert torch.allclose(x.grad, 2 * (x.sin().exp() * x.cos()))


class TestDepth:
    """How deep regions nest under Python's usual limit on its stack."""

    @staticmethod
    def nested(checkpoint, depth):
        def function(x, num_inside):
            x = x.sin()
            if num_inside:
                x = checkpoint(function, x, num_inside - 1, use_reentrant=False)
            return x.cos()

        return function(torch.ones(2, requires_grad=True), depth)

    @staticmethod
    def marked(depth):
        @checkpoint_region
        def function(x, num_inside):
            x = x.sin()
            if num_inside:
                x = function(x, num_inside - 1)
            return x.cos()

        return function(torch.ones(2, requires_grad=True), depth)

    @staticmethod
    def in_a_fresh_thread(run):
        """Run without the steps of the test runner on the stack."""
        results = []

        def target():
            try:
                run().sum().backward()
                results.append(None)
            except RecursionError as error:
                results.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        return results[0]

    @pytest.fixture(autouse=True)
    def default_limit(self):
        """Undo what imported libraries make of Python's limit."""
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(1000)
        yield
        sys.setrecursionlimit(before)

    @pytest.mark.parametrize("depth", [150, pytest.param(225, marks=pytest.mark.slow)])
    def test_regions_nest_as_deep_as_those_of_torch(self, depth):
        assert self.in_a_fresh_thread(lambda: self.nested(torch.utils.checkpoint.checkpoint, depth)) is None
        assert self.in_a_fresh_thread(lambda: self.nested(compat.checkpoint, depth)) is None

    def test_regions_that_return_what_the_one_inside_returns_nest_deep_too(self):
        def function(x, num_inside):
            return compat.checkpoint(function, x.sin(), num_inside - 1, use_reentrant=False) if num_inside else x.sin()

        assert self.in_a_fresh_thread(lambda: function(torch.ones(2, requires_grad=True), 230)) is None

    def test_marked_functions_nest_deep_too(self):
        assert self.in_a_fresh_thread(lambda: self.marked(175)) is None
