"""Whole programs in regions whose policy is a list of ops: all is as under the equal function.

A list's answers are remembered by op, a function is asked about each one anew and may speak of names. So the two are
held against each other: the same bits, the same ops run again, the same refusals.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
from collections import Counter

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from support.eager_testing import OpCounter, plain, selective
from support.region_fuzz import STEPS, RandomProgram
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from remat import compat, policies
from remat.eager.types.errors import CheckpointError
from remat.eager.types.execution import is_recomputing
from remat.passes.shared.policy import SaveOps
from remat.regions.region import checkpoint_region

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # torch.func.jvp calls it

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


@pytest.fixture
def x():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.fixture
def w():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture(autouse=True)
def no_mode_stays():
    yield
    assert _get_current_dispatch_mode() is None


def as_function(ops):
    return lambda ctx, op, *args, **kwargs: op in ops


def save(ops, function, *args):
    return selective(list(ops), function, *args)


def step(policy, function, *inputs):
    """Run a step of a region; return output and gradients, and which ops ran in forward and in backward."""
    torch.manual_seed(3)
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    with OpCounter() as forward:
        out = function(*inputs) if policy is None else selective(policy, function, *inputs)
    with OpCounter() as backward:
        grads = torch.autograd.grad(out.abs().sum(), inputs, allow_unused=True)
    # A function may speak of names, so aliases are kept of the results of ops with several.
    counts = [Counter({op: n for op, n in c.counts.items() if op != "detach.default"}) for c in (forward, backward)]
    return (out.detach(), *grads, torch.get_rng_state()), counts


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def assert_list_is_function(ops, function, *inputs):
    expected, _ = step(None, function, *inputs)
    by_function, function_counts = step(as_function(ops), function, *inputs)
    by_list, list_counts = step(list(ops), function, *inputs)
    assert_same_bits(by_function, expected)
    assert_same_bits(by_list, expected)
    assert list_counts == function_counts


# ------------------------------------------------------------------------------------------------------- programs


def attention(x, w):
    q, k, v = (t.view(1, 2, 2, 4) for t in (x.sin(), x.cos(), (x @ w)))
    return F.scaled_dot_product_attention(q, k, v).reshape(4, 4).sin() @ w


def convolution(x, w):
    image = x.sin().view(1, 1, 4, 4)
    return F.conv2d(F.conv2d(image, w.view(1, 1, 4, 4).tanh(), padding=2).exp(), w.view(1, 1, 4, 4)).sin()


def linear(x, w):
    return F.linear(F.linear(x.sin(), w, x[0]).relu(), w).exp()


def in_place_on_saved(x, w):
    y = x.sin() @ w
    z = y.clone().exp()
    y.add_(1).mul_(w.detach())
    return (y @ w).sin() + z


def view_then_in_place(x, w):
    y = x.sin() @ w
    y.view(16)[3:7].mul_(2.0)
    y.t()[0].zero_()
    return (y.sin() @ w).exp()


def setitem_on_saved(x, w):
    y = x.sin() @ w
    y = y * 1
    u = x.detach() @ w.detach()
    v = u.clone() * y
    u[0], u[1] = 1.0, w.detach()[0]
    u[u > 0.5] = 0
    return v.exp() * u.clone()


def numbers_for_tensors(x, w):
    y = (x.sin() @ w).mul_(2).add_(1).div_(3)
    buffer = torch.empty(4, 4).copy_(1)
    i = torch.arange(16).view(4, 4)
    i <<= 1
    i &= 7
    return (y * buffer * i) @ w + torch.pow(2.0, x.sin()) + torch.ldexp(x, w)


def determinants(x, w):
    return (torch.linalg.det(x.sin()) * torch.linalg.slogdet(w)[1] * x) @ w


def autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = (x.sin() @ w).exp()
        z = F.linear(y, w).double().float()
        return (z.sin() @ w).float().sin() + z


def casts_between(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.baddbmm(x.sin()[None], x.cos()[None], w[None])[0]
        return y.to(torch.float64).sin().float() @ w


def dropout_between_saved(x, w):
    y = F.dropout(x.sin() @ w, 0.5)
    z = torch.rand(4, 4) * torch.rand_like(y) + torch.bernoulli(torch.full((4, 4), 0.5))
    noise = torch.rand(4, 4, out=torch.empty(4, 4))
    return (F.dropout(y.exp(), 0.3) @ w) * z * noise


def transforms(x, w):
    rows = torch.func.vmap(lambda row: (row @ w).sin())(x.sin())
    _, tangent = torch.func.jvp(lambda t: (t @ w).exp(), (rows,), (torch.ones_like(rows),))
    return (rows + tangent.sin()) @ w


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a @ b).sin()

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        grad = grad * (a @ b).cos()
        return grad @ b.t(), a.t() @ grad


def own_function(x, w):
    return (_Product.apply(x.sin(), w).exp() @ w).sin()


def without_grad(x, w):
    with torch.no_grad():
        scale = (x @ w).exp()
    with torch.inference_mode():
        number = (x.detach() @ w.detach()).mul_(2).sum().item() + F.linear(x, w).sum().item()
    return (x.sin() @ w).tanh() * scale * number


def failing_op(x, w):
    try:
        y = x.sin() @ w[:2]
    except RuntimeError:
        y = x.cos()
    return ((y @ w).sin() @ w).exp()


def backward_inside(x, w):
    y = (x.sin() @ w).exp()
    (slope,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    inner = x.detach().requires_grad_()
    (other,) = torch.autograd.grad(plain(lambda t: (t.sin() @ t).exp(), inner).sum(), inner)
    return (y * slope * other).sin() @ w


def conjugated(x, w):
    z = torch.complex(x.sin(), w)
    return torch.view_as_real((z.conj().exp() @ z).clone().conj().exp().sin().resolve_conj())


def quantiles(x, w):
    return (torch.quantile(x.sin(), 0.3, dim=1) * x) @ w


def reshaped(x, w):
    return (x.sin().reshape(2, 8).exp().view(8, 2).cos().reshape(16).sin().view(4, 4) @ w).sin()


PROGRAMS = {
    "attention": (attention, [*MATMULS, aten._scaled_dot_product_flash_attention_for_cpu.default]),
    "convolution": (convolution, [aten.convolution.default]),
    "linear": (linear, MATMULS),
    "a composite op in the list": (linear, [aten.linear.default, aten.matmul.default]),
    "a composite op and what it is made of": (linear, [aten.linear.default, aten.addmm.default, aten.t.default]),
    "in place on a saved value": (in_place_on_saved, MATMULS),
    "in place, saved": (in_place_on_saved, [aten.mm.default, aten.add_.Tensor, aten.mul_.Tensor]),
    "in place through views": (view_then_in_place, MATMULS),
    "in place through saved views": (view_then_in_place, [*MATMULS, aten.t.default, aten.slice.Tensor]),
    "items of a saved value": (setitem_on_saved, MATMULS),
    "numbers for tensors": (numbers_for_tensors, MATMULS),
    "numbers for tensors, saved": (numbers_for_tensors, [aten.mul.Tensor, aten.mul_.Tensor, aten.pow.Tensor_Tensor]),
    "determinants": (determinants, MATMULS),
    "autocast": (autocast, MATMULS),
    "autocast, casts saved": (autocast, [*MATMULS, aten._to_copy.default]),
    "casts by an op that is not saved": (casts_between, [aten._to_copy.default]),
    "dropout": (dropout_between_saved, MATMULS),
    "saved random ops": (dropout_between_saved, [aten.mm.default, aten.rand.default, aten.native_dropout.default]),
    "saved random ops in place": (dropout_between_saved, [aten.bernoulli_.float, aten.rand_like.default]),
    "transforms": (transforms, MATMULS),
    "transforms, more saved": (transforms, [*MATMULS, aten.mv.default, aten.sin.default, aten.cos.default]),
    "own function": (own_function, [*MATMULS, aten.sin.default]),
    "without grad": (without_grad, MATMULS),
    "an op that fails": (failing_op, MATMULS),
    "backward inside": (backward_inside, [*MATMULS, aten.exp.default]),
    "conjugated": (conjugated, [*MATMULS, aten.exp.default]),
    "what torch calls without a mode only": (quantiles, MATMULS),
    "what torch calls in place of another with a mode": (reshaped, [aten.view.default]),
}


class TestListsAreAsFunctions:
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_in_bits_and_in_ops_run(self, name, x, w):
        function, ops = PROGRAMS[name]
        assert_list_is_function(ops, function, x, w)

    @pytest.mark.parametrize("name", PROGRAMS)
    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_whatever_dispatch_modes_are_around_a_part_of_the_step(self, name, where, x, w):
        function, ops = PROGRAMS[name]
        torch.manual_seed(3)
        with OpCounter() if where == "forward" else contextlib.nullcontext():
            out = save(ops, function, x, w)
        with OpCounter() if where == "backward" else contextlib.nullcontext():
            grads = torch.autograd.grad(out.abs().sum(), (x, w), allow_unused=True)
        assert_same_bits((out, *grads), step(None, function, x, w)[0][:-1])

    @pytest.mark.parametrize("policy", [policies.save_matmuls(), policies.recompute_all()], ids=repr)
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_ready_made_policies_change_no_bit(self, name, policy, x, w):
        function, _ = PROGRAMS[name]
        assert_same_bits(step(policy, function, x, w)[0], step(None, function, x, w)[0])

    def test_packets_stand_for_all_their_overloads(self, x, w):
        by_packet = step([aten.mm, aten.add], lambda x, w: (x.sin() @ w + 1).exp() + w, x, w)
        by_overload = step([aten.mm.default, aten.add.Tensor], lambda x, w: (x.sin() @ w + 1).exp() + w, x, w)
        assert_same_bits(by_packet[0], by_overload[0])
        assert by_packet[1] == by_overload[1]

    def test_ops_by_which_torch_makes_tensors_of_other_classes_may_be_listed(self, x, w):
        def function(x, w):
            buffer = torch.nn.Buffer(torch.nn.Parameter(x.detach()).detach())
            return (x.sin() * buffer.as_subclass(torch.Tensor)) @ w.as_subclass(torch.nn.Parameter)

        ops = [aten.detach, aten.alias, aten.mm.default]
        assert_same_bits(step(ops, function, x, w)[0], step(None, function, x, w)[0])

    def test_ops_that_no_policy_sees_may_be_listed(self, x, w):
        assert_list_is_function([aten.detach.default, aten.mm.default], lambda x, w: x.sin().detach() @ w * x, x, w)


# ------------------------------------------------------------------------------------- what is numbered how


def compressing(t):
    return t @ torch.ones(4, 4), t


def copying(t):
    return torch.empty_like(t).copy_(t), t


class TestOpsThatRunOnTheWayDown:
    @pytest.mark.parametrize("pack", [compressing, copying])
    def test_in_hooks_on_saved_tensors_inside_the_region(self, pack, x, w):
        def function(x, w):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
                y = (x.sin() @ w).exp()
            return ((y @ w).sin() @ w).sin()

        assert_list_is_function(MATMULS, function, x, w)

    def test_hooks_around_the_region_change_nothing(self, x, w):
        def function(x, w):
            return save(MATMULS, lambda x: (x.sin() @ w).exp() @ w, x)

        with torch.autograd.graph.saved_tensors_hooks(compressing, lambda packed: packed[1]):
            found = step(None, function, x, w)[0]
        assert_same_bits(found, step(None, lambda x, w: (x.sin() @ w).exp() @ w, x, w)[0])

    def test_for_derivatives_in_forward_mode(self, x, w):
        def function(x, w):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x.sin(), torch.ones_like(x))
                y, tangent = forward_ad.unpack_dual(dual @ w)
                y = (y.cos() + tangent).sin()
            return (y @ w).sin()

        assert_list_is_function(MATMULS, function, x, w)

    def test_for_conjugated_values(self, x, w):
        def function(x, w):
            z = torch.complex(x.sin(), w)
            return torch.view_as_real(((z.conj().exp().clone() * 2).clone()).sin())

        assert_list_is_function([aten.exp.default, aten.clone.default], function, x, w)

    def test_a_saved_op_that_never_gets_down_is_counted_all_the_same(self, x, w):
        def function(x, w):
            return (x.sin() * torch._efficientzerotensor((4, 4)) + (x.cos() * w).sin()).exp()

        assert_list_is_function([aten.mul.Tensor], function, x, w)


# ------------------------------------------------------------------------------------------------ nested regions


def by_context(policy, function, *args):
    contexts = functools.partial(compat.create_selective_checkpoint_contexts, policy)
    return compat.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


INNER = {
    "list": save,
    "function": lambda ops, function, *args: selective(as_function(ops), function, *args),
    "plain": lambda ops, function, *args: plain(function, *args),
    "context": by_context,
    "context of a function": lambda ops, function, *args: by_context(as_function(ops), function, *args),
    "matmuls": lambda ops, function, *args: selective(policies.save_matmuls(), function, *args),
}


class TestNesting:
    @pytest.mark.parametrize("inner", INNER)
    @pytest.mark.parametrize("outer", INNER)
    def test_changes_no_bit_and_no_count(self, outer, inner, x, w):
        def function(outer, inner, x, w):
            def block(x):
                y = F.dropout((x @ w).sin(), 0.5)
                return (y.mul_(2) @ w).exp().tanh()

            def around(x):
                y = inner([aten.mm.default], block, x.cos())
                y = (y @ w).sin() + inner([aten.sin.default, aten.tanh.default], block, y)
                return (y @ w).tanh()

            return outer([aten.mm.default, aten.exp.default], around, x.sin())

        def call(ops, f, *args):
            return f(*args)

        expected, _ = step(None, functools.partial(function, call, call), x, w)
        found, counts = step(None, functools.partial(function, INNER[outer], INNER[inner]), x, w)
        assert_same_bits(found, expected)
        as_functions = {"list": "function", "context": "context of a function"}
        if "matmuls" not in (outer, inner):
            names = [as_functions.get(name, name) for name in (outer, inner)]
            _, wanted = step(None, functools.partial(function, *(INNER[name] for name in names)), x, w)
            assert counts == wanted

    def test_a_policy_may_first_be_used_inside_of_another_region(self, x, w):
        ops = [aten.asinh.default, aten.mm.default]

        def function(x, w):
            y = (x.asinh() @ w).sin()
            return (save(ops, lambda y: (y.asinh() @ w).sin(), y).asinh() @ w).exp()

        assert_list_is_function(MATMULS, function, x, w)


# ---------------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("remat_programs::product", mutates_args=())
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w) @ w


product.register_autograd(
    lambda ctx, grad: (grad @ torch.matrix_power(ctx.saved_tensors[0].t(), 2), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1].detach()),
)


@torch.library.custom_op("remat_programs::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


class TestCustomOps:
    def function(self, x, w):
        y = product(x.sin() @ w, w)
        return (y.exp() @ w).sin()

    @pytest.mark.parametrize(
        "ops", [MATMULS, [torch.ops.remat_programs.product.default], [torch.ops.remat_programs.product]]
    )
    def test_what_their_kernels_call_is_not_the_regions(self, ops, x, w):
        x, w = x * 0.1, w * 0.1
        by_list, counts = step(list(ops), self.function, x, w)
        assert_same_bits(by_list, step(None, self.function, x, w)[0])
        assert counts[1] == step(policies.save_ops(list(ops)).__call__, self.function, x, w)[1][1]

    def test_one_that_changes_a_saved_value(self, x, w):
        def function(x, w):
            y = x.detach() @ w.detach()
            z = y.clone() * x.sin()
            double(y)
            return (z.exp() @ w) * y.clone()

        assert_list_is_function(MATMULS, function, x, w)

    def test_one_that_is_defined_anew(self, x, w):
        for factor in (2, 3):
            op = torch.library.custom_op("remat_programs::scaled", self.scaled(factor), mutates_args=())
            op.register_autograd(lambda ctx, grad, factor=factor: grad * factor)
            assert_list_is_function(MATMULS, lambda x, w, op=op: (op(x.sin()) @ w).exp() @ w, x, w)

    def scaled(self, factor):
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return scaled


# ------------------------------------------------------------------------------------------ modes and subclasses


class Wrapper(torch.Tensor):
    """A tensor around another one, which draws and multiplies in ops of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda t: t.inner if isinstance(t, Wrapper) else t, (args, kwargs or {}))
        if func is aten.exp.default:
            torch.rand_like(args[0]) @ args[0]
        return tree_map(lambda t: Wrapper(t) if isinstance(t, torch.Tensor) else t, func(*args, **kwargs))


class TestModesAndSubclasses:
    @pytest.mark.parametrize("ops", [MATMULS, [aten.mm.default, aten.rand_like.default]])
    def test_a_subclass_with_ops_of_its_own(self, ops, x, w):
        def gradients(region):
            torch.manual_seed(0)
            inputs = [Wrapper(t.detach().clone()).requires_grad_() for t in (x, w)]
            out = region(lambda x, w: ((x.sin() @ w).exp() @ w).sin() * torch.rand(4, 4), *inputs)
            return [grad.inner for grad in torch.autograd.grad(out, inputs, Wrapper(torch.ones(4, 4)))]

        expected = gradients(lambda function, *args: function(*args))
        assert_same_bits(gradients(functools.partial(save, ops)), expected)

    def test_a_mode_that_the_region_enters(self, x, w):
        class Shifting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                return out + 1 if func in (aten.mm.default, aten.sin.default) else out

        def function(x, w):
            with Shifting():
                y = (x.sin() @ w).exp()
            return (y @ w).sin()

        assert_list_is_function(MATMULS, function, x, w)

    def test_flops_are_counted_once_for_what_is_saved(self, x, w):
        def flops(policy):
            with FlopCounterMode(display=False) as counter:
                selective(policy, lambda x, w: (x.sin() @ w).exp() @ w, x, w).sum().backward()
            return counter.get_total_flops()

        assert flops([aten.mm.default]) == flops(as_function([aten.mm.default])) < flops(policies.recompute_all())

    def test_tensors_that_stand_for_others(self):
        with FakeTensorMode():
            x = torch.empty(4, 4, requires_grad=True)
            save(MATMULS, lambda x: (x.sin() @ x).exp().mul_(2), x).sum().backward()
        assert x.grad.shape == (4, 4)

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_a_compiled_block(self, backend, x, w):
        torch._dynamo.reset()
        block = torch.compile(lambda x, w: (F.dropout(x.sin() @ w, 0.5).exp() @ w).tanh(), backend=backend)

        def function(x, w):
            y = torch.rand(4, 4) * (x @ w)
            return (block(y.cos(), w) @ w) * torch.rand(4, 4)

        ops = [aten.mm.default, aten.rand.default]
        expected = step(None, function, x, w)[0]
        for policy in (ops, ops, as_function(ops)):
            for a, b in zip(step(policy, function, x, w)[0], expected, strict=True):
                torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------- however it is run


class TestBackwards:
    def test_the_graph_may_be_kept(self, x, w):
        def grads(region):
            out = region(lambda x: ((x.sin() @ w).exp() @ w).tanh(), x).sum()
            return [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]

        assert_same_bits(grads(functools.partial(save, MATMULS)), grads(lambda function, x: function(x)))

    def test_gradients_may_have_gradients(self, x, w):
        def second(region):
            out = region(lambda x: ((x.sin() @ w).exp() @ w).tanh(), x).sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            return torch.autograd.grad(slope.sin().sum(), x)

        assert_same_bits(second(functools.partial(save, MATMULS)), second(lambda function, x: function(x)))

    @pytest.mark.parametrize("early_stop", [True, False])
    def test_recomputation_may_stop_early_or_not(self, early_stop, x, w):
        def counts(policy):
            region = checkpoint_region(policy=policy, early_stop=early_stop)
            out = region(lambda x: ((x.sin() @ w).exp() @ w).tanh() + 1)(x).sum()
            with OpCounter() as counter:
                torch.autograd.grad(out, x)
            return {op: n for op, n in counter.counts.items() if op != "detach.default"}

        assert counts([aten.mm.default]) == counts(as_function([aten.mm.default]))

    def test_backwards_of_a_group_share_one_recomputation(self, x, w):
        first, second = save([aten.mm.default], lambda x: ((x.sin() @ w).exp(), (x.cos() @ w).tanh()), x)
        with OpCounter() as counter, compat.GraphExecGroup():
            first.sum().backward(retain_graph=True)
            second.sum().backward()
        assert counter["mm.default"] == 4  # two for each of the two gradients, none again
        assert counter["sin.default"] == 2  # one again, and one for the gradient of the cosine


class TestErrors:
    def fail_when(self, is_time):
        def function(x):
            y = (x.sin() @ x).mul_(2)
            if is_time():
                raise KeyError("no such layer")
            return (y @ x).exp()

        return function

    def test_a_forward_that_raises_leaves_nothing_behind(self, x):
        with pytest.raises(KeyError, match="no such layer"):
            save(MATMULS, self.fail_when(lambda: True), x)
        save(MATMULS, self.fail_when(lambda: False), x).sum().backward()

    def test_so_does_a_recomputation(self, x):
        out = save(MATMULS, self.fail_when(is_recomputing), x)
        with pytest.raises(KeyError, match="no such layer"):
            out.sum().backward()
        assert _get_current_dispatch_mode() is None
        save(MATMULS, self.fail_when(lambda: False), x).sum().backward()

    @pytest.mark.parametrize("op", [lambda x: x @ x[:2], lambda x: x.sin().add_(x[:3]), lambda x: F.dropout(x, 2.0)])
    def test_so_does_an_op(self, op, x):
        with pytest.raises((RuntimeError, ValueError)):
            save(MATMULS, op, x)
        assert _get_current_dispatch_mode() is None
        save(MATMULS, torch.sin, x).sum().backward()

    def test_a_saved_op_that_the_forward_did_not_run_is_named(self, x):
        def function(x):
            y = x.sin() @ x
            return (y @ x if is_recomputing() else y).exp().sin()

        out = checkpoint_region(policy=[aten.mm.default], early_stop=False)(function)(x)
        with pytest.raises(CheckpointError, match=r"aten.mm.default invocation index 1 .* ran it 1 time"):
            out.sum().backward()

    @pytest.mark.parametrize("region", [save, lambda ops, *rest: selective(as_function(ops), *rest)])
    def test_a_saved_value_that_is_changed_before_backward_is_refused(self, region, x):
        kept = []

        def function(x):
            y = x.sin() @ x.detach()
            kept.append(y.detach())
            return y.exp().sin()

        out = region(MATMULS, function, x)
        kept[0].zero_()
        with pytest.raises(CheckpointError, match="has been mutated"):
            out.sum().backward()


class TestThreads:
    def test_each_may_use_other_policies_and_new_ones_at_any_time(self, x, w):
        names = ["sin", "cos", "exp", "tanh", "sigmoid", "atan", "erf", "relu", "abs", "neg", "sqrt", "log1p"]
        unary = [getattr(aten, name).default for name in names]
        failures = []

        def work(seed):
            rng = random.Random(seed)
            try:
                for _ in range(15):
                    ops = [aten.mm.default, *rng.sample(unary, 3)]
                    chosen = [getattr(torch, name) for name in rng.sample(names, 4)]

                    def function(x, w, chosen=chosen):
                        for f in chosen:
                            x = (f(x.abs() + 1) @ w).tanh()
                        return x

                    inputs = [t.detach().clone().requires_grad_() for t in (x, w)]
                    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
                    assert_same_bits(torch.autograd.grad(save(ops, function, *inputs).sum(), inputs), expected)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


class TestMemory:
    def test_nothing_is_left_of_steps_with_ever_new_policies(self, x, w):
        def alive():
            gc.collect()
            return sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects())

        def some_step():
            policy = SaveOps(frozenset([aten.mm.default, aten.exp.default]))
            selective(policy, lambda x: F.dropout((x.sin() @ w).exp(), 0.5) @ w, x).sum().backward()
            x.grad = w.grad = None

        some_step()
        before = alive()
        for _ in range(200):
            some_step()
        assert alive() <= before


# --------------------------------------------------------------------------------------------------- random programs


FUZZED_OPS = [
    overload
    for name in (
        *("mm", "addmm", "sin", "gelu", "sigmoid", "t", "tanh", "relu_", "_softmax", "native_layer_norm", "mul"),
        *("bernoulli_", "div_", "add", "topk", "cat", "split", "native_dropout", "clone", "expand"),
    )
    for packet in [getattr(aten, name)]
    for overload in [getattr(packet, name) for name in packet.overloads()]
]


def run_random_program(seed, kind):
    """Run a random program with lists for policies, or the equal functions, or none; return bits and counts."""
    rng = random.Random(seed)

    def mark(name, policy):
        ops = [op for op in FUZZED_OPS if rng.random() < 0.2]
        is_list = kind == "list" or (kind == "mixed" and rng.random() < 0.5)
        if kind == "none":
            return lambda function: function
        return checkpoint_region(name=name, policy=None if policy is None else ops if is_list else as_function(ops))

    torch.manual_seed(seed)
    model = RandomProgram(seed, mark, STEPS)
    x = torch.randn(8, 8, requires_grad=True)
    left, right = model(x)
    losses = [left.sum(), right.sum(), (left * right).sum()]
    with OpCounter() as counter:
        grads = torch.autograd.grad(losses[seed % 3], [x, *model.parameters()], allow_unused=True)
    del counter.counts["detach.default"]
    return (left.detach(), right.detach(), *grads, torch.get_rng_state()), counter.counts


def assert_random_programs_agree(seeds):
    for seed in seeds:
        expected, _ = run_random_program(seed, "none")
        found, counts = run_random_program(seed, "list")
        assert_same_bits(found, expected)
        assert counts == run_random_program(seed, "function")[1], seed
        assert_same_bits(run_random_program(seed, "mixed")[0], expected)


class TestRandomPrograms:
    def test_a_few(self):
        assert_random_programs_agree(range(60))

    @pytest.mark.slow
    def test_many(self):
        assert_random_programs_agree(range(60, 3000))
