"""When forward and recomputation part, the error says where and why; and an error leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from support.eager_testing import REGIONS, plain, selective
from torch import nn

from remat import compat
from remat.eager import register_determinism_check
from remat.passes.shared.policy import PolicyError
from remat.passes.torch_private import current_graph_task_id, top_saved_tensors_hooks
from remat.regions.region import checkpoint_region, is_recomputing

CheckpointError = compat.CheckpointError
every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert top_saved_tensors_hooks(True) is None
    assert not is_recomputing()
    assert current_graph_task_id() == -1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def first_then(first, second):
    return lambda x: (second if is_recomputing() else first)(x)


def backward_of(function, x=None, **options):
    plain(function, torch.ones(1, requires_grad=True) if x is None else x, **options).sum().backward()


def saves_matmuls(ctx, op, *args, **kwargs):
    return op is torch.ops.aten.mm.default


class TestDivergence:
    def test_fewer_saved_tensors(self):
        with pytest.raises(CheckpointError, match="A different number of tensors was saved") as error:
            backward_of(first_then(lambda x: x.sin().exp().sin(), lambda x: x.sin().exp()))
        assert "Number of tensors saved during forward: 3" in str(error.value)
        assert "Number of tensors saved during recomputation: 2" in str(error.value)
        assert "control flow that depends on data" in str(error.value)

    def test_more_saved_tensors_without_early_stop(self):
        with pytest.raises(CheckpointError, match="trying to save more tensors during recomputation"):
            backward_of(first_then(lambda x: x.sin(), lambda x: x.sin().exp()), early_stop=False)

    def test_more_saved_tensors_with_early_stop_are_never_seen(self):
        backward_of(first_then(lambda x: x.sin(), lambda x: x.sin().exp()))

    def test_other_shapes_are_shown_side_by_side_with_line_and_module(self):
        class Block(nn.Module):
            def forward(self, x):
                return x.sin() * (torch.ones(2) if is_recomputing() else torch.ones(1))

        with pytest.raises(CheckpointError, match="tensors have different metadata") as error:
            backward_of(Block())
        message = str(error.value)
        assert "  forward:   {'shape': torch.Size([1])" in message
        assert "  recompute: {'shape': torch.Size([2])" in message
        assert f"{__file__}:" in message
        assert "in module Block" in message

    def test_nested_regions_and_modules_are_named_with_the_expression(self):
        class Inner(nn.Module):
            def forward(self, x):
                y = x.cos() + 1
                return y.sin() * (torch.ones(2) if is_recomputing() else torch.ones(1))

        model = nn.Sequential(nn.Identity(), nn.Sequential(Inner()))
        inner = checkpoint_region(name="inner")(model.__call__)
        outer = checkpoint_region(name="outer")(lambda x: inner(x.exp()).exp())
        with pytest.raises(CheckpointError, match="tensors have different metadata") as error:
            outer(torch.ones(1, requires_grad=True)).sum().backward()
        message = str(error.value)
        assert "First difference, in region outer/inner:" in message
        assert "in module 1.0: Inner in Sequential in Sequential" in message
        assert "`y.sin() * (torch.ones(2) if is_recomputing() else torch.ones(1))`" in message

    def test_a_missing_tensor_is_shown_with_the_last_one_that_both_saved(self):
        def function(x):
            y = x.sin()
            return y if is_recomputing() else y.exp().sin()

        with pytest.raises(CheckpointError, match="First tensor that is missing, number 1 in region") as error:
            backward_of(function)
        message = str(error.value)
        assert "  forward:   {'shape': torch.Size([1]), 'dtype': torch.float32" in message
        assert "`y.exp()`" in message
        assert "recompute: ended before it; the last one that both saved was at" in message
        assert "`x.sin()`" in message

    def test_a_surplus_op_of_a_selective_region_names_region_and_module(self):
        class Head(nn.Module):
            def forward(self, x):
                return x.sin().exp() if is_recomputing() else x.sin()

        model = nn.Sequential(Head())
        region = checkpoint_region(name="head", policy=saves_matmuls, early_stop=False)
        out = region(model.__call__)(torch.ones(1, requires_grad=True))
        with pytest.raises(CheckpointError, match=r"the forward of region head ran it 0 time.* in module 0\."):
            out.backward()

    def test_a_cache_that_grew_is_the_likely_cause(self):
        cache = []

        def function(x):
            cache.append(x)
            return torch.cat(cache).sin().exp()

        with pytest.raises(CheckpointError, match=r"a cache .* that the forward grew"):
            backward_of(function)

    def test_a_flipped_train_flag_is_the_likely_cause(self):
        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 3)

            def forward(self, x):
                x = self.layer(x).sin()
                return x.exp() if self.training else x

        model = Head()
        out = plain(model, torch.randn(2, 3, requires_grad=True))
        model.eval()
        with pytest.raises(CheckpointError, match="was in train mode in forward and is in eval mode now"):
            out.sum().backward()

    def test_a_new_dtype_is_the_likely_cause(self):
        layer = nn.Linear(3, 3)
        x = torch.randn(2, 3, requires_grad=True)
        out = plain(lambda x: layer(x.to(layer.weight.dtype)).sin(), x)
        layer.bfloat16()
        with pytest.raises(CheckpointError, match=r"the dtype changed from torch.float32 to torch.bfloat16"):
            out.sum().backward()

    def test_autocast_in_only_one_run_is_the_likely_cause(self):
        layer = nn.Linear(3, 3)

        def function(x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_recomputing()):
                return layer(x).sin()

        with pytest.raises(CheckpointError, match="autocast that is entered in only one of the two runs"):
            backward_of(function, torch.randn(2, 3, requires_grad=True))

    @pytest.mark.parametrize("policy", [saves_matmuls, [torch.ops.aten.mm.default]], ids=["function", "list"])
    def test_a_selective_region_names_the_op_and_the_line(self, policy):
        region = checkpoint_region(policy=policy, early_stop=False)
        out = region(first_then(lambda x: x.sin(), lambda x: x.sin().exp()))(torch.ones(1, requires_grad=True))
        with pytest.raises(CheckpointError, match=r"aten.exp.default encountered .* but not found in storage"):
            out.backward()

    def test_a_selective_region_counts_repeated_ops(self):
        region = checkpoint_region(policy=[torch.ops.aten.sin.default], early_stop=False)
        function = first_then(lambda x: x.sin().cos(), lambda x: x.sin().sin().cos())
        out = region(function)(torch.ones(1, requires_grad=True))
        with pytest.raises(CheckpointError, match=r"aten.sin.default invocation index 1 .*not found in storage"):
            out.backward()


class TestPolicyErrors:
    def test_policy_op_region_path_module_and_line_are_named(self):
        def faulty(ctx, op, *args, **kwargs):
            raise KeyError("no such layer")

        inner = checkpoint_region(name="inner", policy=faulty)(nn.Sequential(nn.Tanh()).__call__)
        outer = checkpoint_region(name="outer")(lambda x: inner(x.exp()))
        with pytest.raises(PolicyError) as error:
            outer(torch.ones(1, requires_grad=True))
        assert f"faulty ({__file__}:" in str(error.value)
        assert "raised KeyError when asked about aten.tanh.default: 'no such layer'" in str(error.value)
        assert f"(in region outer/inner, module 0, at {__file__}:" in str(error.value)

    def test_an_answer_that_is_no_policy_is_placed_too(self):
        region = checkpoint_region(name="mlp", policy=lambda ctx, op, *args, **kwargs: "save")(torch.sin)
        with pytest.raises(PolicyError, match=r"answered 'save' for aten.sin.default.*\(in region mlp, at .*\)"):
            region(torch.ones(1, requires_grad=True))


class TestChecks:
    def test_none_looks_at_nothing_but_numbers(self):
        function = first_then(lambda x: x.sin().exp(), lambda x: (x * torch.ones(1)).double().sin().exp())
        with pytest.raises(CheckpointError):
            backward_of(function)
        backward_of(function, determinism_check="none")

    def test_a_check_of_ones_own_sees_values(self):
        register_determinism_check("sum", lambda tensor: float(tensor.sum()))
        function = first_then(lambda x: x.sin().exp(), lambda x: (x + 1).sin().exp())
        backward_of(function)
        with pytest.raises(CheckpointError, match="different metadata"):
            backward_of(function, determinism_check="sum")

    def test_built_in_names_cannot_be_taken(self):
        with pytest.raises(ValueError, match="'none' is built in"):
            register_determinism_check("none", lambda tensor: None)


class TestDebug:
    function = staticmethod(first_then(lambda x: x.sin().exp().sin(), lambda x: (x.sin() * torch.ones(2)).exp()))

    def test_both_op_traces_are_in_the_error(self):
        with pytest.raises(CheckpointError, match="because you passed `debug=True` to checkpoint") as error:
            backward_of(self.function, debug=True)
        message = str(error.value)
        forward, recompute = message.split("Operations executed during recomputation:")
        assert "torch.ops.aten.exp.default($" in forward
        assert "torch.ops.aten.mul.Tensor($" in recompute
        assert f"{__file__}:" in message

    def test_the_first_op_that_differs_is_named_side_by_side(self):
        with pytest.raises(CheckpointError, match="First op that differs, number 1") as error:
            backward_of(self.function, debug=True)
        assert "forward:   : float32[1] = torch.ops.aten.exp.default" in str(error.value)

    @pytest.mark.parametrize("enabled", [True, False])
    def test_the_context_manager_overrides_the_argument(self, enabled):
        with pytest.raises(CheckpointError) as error, compat.set_checkpoint_debug_enabled(enabled):
            backward_of(self.function, debug=not enabled)
        assert ("Operations executed" in str(error.value)) is enabled

    def test_a_region_without_fault_runs_as_usual(self):
        x = torch.randn(3, requires_grad=True)
        plain(lambda x: x.sin().exp(), x, debug=True).sum().backward()
        expected = torch.autograd.grad(x.sin().exp().sum(), x)[0]
        assert torch.equal(x.grad, expected)


class TestExceptions:
    @every_region
    def test_an_exception_in_forward_comes_out_as_it_is(self, region):
        def function(x):
            x.sin()
            raise ZeroDivisionError("in forward")

        with pytest.raises(ZeroDivisionError, match="in forward"):
            region(function, torch.ones(1, requires_grad=True))

    @every_region
    def test_an_exception_in_recompute_comes_out_and_a_second_try_works(self, region):
        failures = [True]

        def function(x):
            y = x.sin()
            if is_recomputing() and failures:
                failures.clear()
                raise ZeroDivisionError("in recompute")
            return y.exp()

        x = torch.ones(1, requires_grad=True)
        out = region(function, x)
        with pytest.raises(ZeroDivisionError, match="in recompute"):
            out.backward(retain_graph=True)
        out.backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp(), x)[0])

    @every_region
    def test_an_exception_in_backward_comes_out(self, region):
        class Faulty(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise ZeroDivisionError("in backward")

        out = region(lambda x: Faulty.apply(x.sin()).exp(), torch.ones(1, requires_grad=True))
        with pytest.raises(ZeroDivisionError, match="in backward"):
            out.backward()

    def test_an_exception_in_an_inner_region_of_a_selective_one(self):
        inner = lambda x: 1 / 0  # noqa: E731
        with pytest.raises(ZeroDivisionError):
            selective(
                [torch.ops.aten.sin.default],
                lambda x: plain(inner, x.sin()),
                torch.ones(1, requires_grad=True),
            )


class TestChangedAfterItWasSaved:
    """Code that autograd refuses without a region is refused in one, too, instead of getting wrong gradients."""

    @staticmethod
    def output_of_exp(x):
        y = x.exp()
        z = y.sin()
        y.add_(1.0)
        return z * y

    @staticmethod
    def input_of_sin(x):
        y = x * 2
        z = y.sin()
        y.mul_(3.0)
        return z.exp()

    @pytest.mark.parametrize("function", ["output_of_exp", "input_of_sin"])
    @pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
    def test_is_refused(self, function, region):
        x = torch.randn(4, requires_grad=True)
        function = getattr(self, function)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(x).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            region(function, x).sum().backward()
        assert x.grad is None

    def test_is_refused_where_the_region_around_changes_it(self):
        inner = checkpoint_region(lambda x: x.sin().exp())

        @checkpoint_region(name="outer")
        def outer(x):
            y = inner(x)
            z = y.sin()
            y.add_(1.0)
            return (z * y).exp().sin()

        with pytest.raises(CheckpointError, match=r"region outer.* changes it in place"):
            outer(torch.randn(4, requires_grad=True)).sum().backward()

    def test_is_accepted_where_backward_does_not_want_it(self):
        def function(x):
            y = x.exp()
            z = y.detach().sin() * x.sin()
            y.add_(1.0)
            return z, y

        x, reference = (torch.linspace(0.1, 0.9, 4).requires_grad_() for _ in range(2))
        function(reference)[0].sum().backward()
        checkpoint_region(function)(x)[0].sum().backward()
        assert torch.equal(x.grad, reference.grad)
