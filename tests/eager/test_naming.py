"""`remat.name` in eager code: policies keep, recompute and offload values by the name they are given."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from support.eager_testing import MUST_RECOMPUTE, MUST_SAVE, OpCounter, assert_same_grads, save_all, selective
from torch import nn

import remat
from remat import name
from remat.passes.ops.name_op import name_op
from remat.passes.shared.policy import PolicyError
from remat.policies import (
    first_of,
    offload_names,
    recompute_all,
    save_all_but_names,
    save_matmuls,
    save_names,
    save_ops,
)

aten = torch.ops.aten


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True)


def recomputed(policy, function, x):
    """Count the ops that backward runs beyond those of the gradient."""
    with OpCounter() as expected:
        function(x).sum().backward()
    with OpCounter() as forward:
        function(x)
    out = selective(policy, function, x)
    with OpCounter() as counter:
        out.sum().backward()
    found = counter.counts - (expected.counts - forward.counts)
    return {op: n for op, n in found.items() if op not in ("detach.default", "sum.default", "expand.default")}


def check(policy, function, x, run_again, kept):
    """Assert which ops run again, and that gradients do not change for it."""
    assert_same_grads(functools.partial(selective, policy), function, x)
    counts = recomputed(policy, function, x)
    assert {op: counts.get(op, 0) for op in [*run_again, *kept]} == {**run_again, **dict.fromkeys(kept, 0)}


class TestOutsideOfSelectiveRegions:
    @pytest.mark.parametrize("region", [lambda f: f, remat.checkpoint_region], ids=["no region", "bare region"])
    def test_a_name_is_the_value_itself_and_runs_no_op(self, region, x):
        def function(x):
            y = x.sin()
            assert name(y, "y") is y
            return y.exp()

        with OpCounter() as counter:
            region(function)(x)
        del counter.counts["detach.default"]
        assert dict(counter.counts) == {"sin.default": 1, "exp.default": 1}

    @pytest.mark.parametrize("bad", ["", None, 3])
    def test_a_name_must_be_a_text(self, bad, x):
        with pytest.raises(remat.OptionError, match="a name is a text that is not empty"):
            name(x, bad)

    def test_only_tensors_can_be_named(self, x):
        with pytest.raises(remat.OptionError, match="names a tensor, not tuple"):
            name((x, x), "pair")


class TestSave:
    def test_the_op_that_made_a_saved_value_does_not_run_again(self, x):
        function = lambda x: name(x @ x, "product").sin().exp()  # noqa: E731
        check(save_names("product"), function, x, {"sin.default": 1}, ["mm.default"])

    def test_other_names_are_no_reason(self, x):
        function = lambda x: name(x @ x, "product").sin().exp()  # noqa: E731
        check(save_names("other"), function, x, {"mm.default": 1}, [])

    def test_ops_between_the_value_and_its_name_make_no_difference(self, x):
        def function(x):
            y = x @ x
            z = (x * 2).sin()
            y = name(y, "y")
            return (y.sin() * z).exp()

        check(save_names("y"), function, x, {"sin.default": 2}, ["mm.default"])

    def test_a_name_of_a_view_keeps_what_is_viewed(self, x):
        function = lambda x: name((x @ x).view(2, 8).t(), "y").sin().exp()  # noqa: E731
        check(save_names("y"), function, x, {"view.default": 1}, ["mm.default"])

    def test_a_name_of_a_detached_value_whose_maker_is_gone(self, x):
        def function(x):
            y = name((x @ x).detach().view(-1), "y").sum()
            return (x * y).sin().exp()

        check(save_names("y"), function, x, {}, ["mm.default"])

    def test_a_value_changed_in_place_after_its_name_is_kept_as_it_was(self, x):
        function = lambda x: (name((x @ x), "y").mul_(3)).exp().sin()  # noqa: E731
        check(save_names("y"), function, x, {"mul_.Tensor": 1}, ["mm.default"])

    def test_a_value_changed_in_place_before_its_name_is_kept_as_it_is_then(self, x):
        function = lambda x: name((x @ x).mul_(3), "y").exp().sin()  # noqa: E731
        check(save_names("y"), function, x, {}, ["mul_.Tensor"])

    def test_a_value_partly_written_before_its_name(self, x):
        def function(x):
            y = x @ x
            y[0].mul_(3)
            return name(y, "y").exp().sin()

        assert_same_grads(functools.partial(selective, save_names("y")), function, x)

    def test_a_region_input_can_be_named(self, x):
        function = lambda x: (name(x, "x") @ x).sin().exp()  # noqa: E731
        check(save_names("x"), function, x, {"mm.default": 1}, [])

    def test_one_result_of_several_keeps_all_of_them(self, x):
        def function(x):
            values, indices = (x * 2).topk(2)
            values = name(values, "best")
            return (values * indices).exp().sin()

        check(save_names("best"), function, x, {}, ["topk.default"])

    def test_another_than_the_first_result_keeps_all_of_them(self, x):
        def function(x):
            values, indices = (x * 2).topk(2)
            name(indices.view(-1), "best")
            return (values * indices).exp().sin()

        check(save_names("best"), function, x, {}, ["topk.default"])
        check(save_all_but_names("best"), function, x, {"topk.default": 1}, [])

    @pytest.mark.parametrize("changed", [0, 1])
    def test_results_changed_before_the_name_are_not_kept_as_they_were(self, changed, x):
        def function(x):
            results = torch.var_mean(x.sin(), dim=0)
            variance, mean = (r.detach() for r in results)
            (variance, mean)[changed].mul_(3)
            name(mean, "mean")
            return (x * variance * mean).exp().sin()

        assert_same_grads(functools.partial(selective, save_names("mean")), function, x)

    def test_an_attention_output(self):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 8, 4, requires_grad=True)

        def function(x):
            y = nn.functional.scaled_dot_product_attention(x.sin(), x, x)
            return name(y.transpose(1, 2), "attn_out").reshape(1, 8, 8).exp().sin()

        check(save_names("attn_out"), function, x, {}, ["_scaled_dot_product_flash_attention_for_cpu.default"])

    def test_results_are_not_held_once_the_named_one_is_gone(self, x):
        storages = []

        def function(x):
            variance, mean = torch.var_mean(x.sin(), dim=0)
            storages.append(weakref.ref(mean.untyped_storage()))
            del variance, mean
            storages.append(storages[0]() is None)
            return x.exp().sin()

        gc.disable()
        try:
            selective(save_names("y"), function, x)
        finally:
            gc.enable()
        assert storages[1] is True

    def test_it_holds_for_several_backwards(self, x):
        out = selective(save_names("y"), lambda x: name(x @ x, "y").sin().exp(), x)
        for _ in range(3):
            with OpCounter() as counter:
                out.sum().backward(retain_graph=True)
            assert counter["mm.default"] == 2, "the two matmuls of the gradient"

    def test_what_was_saved_dies_with_the_graph(self, x):
        storages = []

        def function(x):
            y = name(x @ x, "y")
            storages.append(weakref.ref(y.untyped_storage()))
            return y.sin().exp()

        gc.disable()
        try:
            out = selective(save_names("y"), function, x)
            assert storages[0]() is not None
            del out
            assert storages[0]() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("named", ["a", "b", "c"])
    def test_naming_one_random_value_does_not_shift_the_others(self, named, x):
        def function(x):
            a, b, c = torch.rand_like(x), torch.rand_like(x), torch.rand_like(x)
            for value, text in ((c, "c"), (a, "a"), (b, "b")):
                name(value, text)
            return ((x * a).sin() * b).exp() * c

        check(save_names(named), function, x, {"rand_like.default": 2}, [])

    def test_a_random_value_named_late_inside_does_not_shift_those_after_the_region(self, x):
        def inner(x):
            a = torch.rand_like(x)
            b = torch.rand_like(x)
            return (x * name(a, "a")).sin() * b

        region = remat.checkpoint_region(policy=save_names("a"))(inner)
        outer = remat.checkpoint_region(lambda x: (region(x) * torch.rand_like(x)).exp())
        torch.manual_seed(3)
        found = torch.autograd.grad(outer(x).sum(), x)[0]
        torch.manual_seed(3)
        assert torch.equal(found, torch.autograd.grad((inner(x) * torch.rand_like(x)).exp().sum(), x)[0])


class TestRecompute:
    def test_a_name_drops_what_the_ops_policy_saved(self, x):
        function = lambda x: (name(x @ x, "cheap") @ x).sin().exp()  # noqa: E731
        check(save_all_but_names("cheap"), function, x, {"mm.default": 1}, ["sin.default"])
        check(save_all_but_names("other"), function, x, {}, ["mm.default", "sin.default"])

    def test_must_save_of_an_op_and_must_recompute_of_one_of_its_results_contradict_each_other(self, x):
        policy = lambda ctx, op, *args, **kwargs: MUST_RECOMPUTE if op is name_op() else MUST_SAVE  # noqa: E731
        function = lambda x: name((x * 2).topk(2)[0], "best").exp()  # noqa: E731
        with pytest.raises(PolicyError, match=r"MUST_SAVE for aten.topk.default and MUST_RECOMPUTE for 'best'.*region"):
            selective(policy, function, x)

    def test_a_part_of_a_value_does_not_drop_the_whole(self, x):
        function = lambda x: (name((x @ x)[:2], "part") @ x).sin().exp()  # noqa: E731
        check(save_all_but_names("part"), function, x, {}, ["mm.default"])

    def test_its_memory_is_free_after_forward(self, x):
        storages = []

        def function(x):
            y = name(x @ x, "y")
            storages.append(weakref.ref(y.untyped_storage()))
            return y.sin().exp()

        out = selective(save_all_but_names("y"), function, x)
        assert storages[0]() is None
        out.sum().backward()

    def test_policies_that_do_not_speak_of_names_are_not_changed_by_them(self, x):
        function = lambda x: name(x @ x, "y").sin().exp()  # noqa: E731
        for policy in ([aten.mm.default], save_matmuls(), lambda ctx, op, *a, **k: op is aten.mm.default):
            check(policy, function, x, {"sin.default": 1}, ["mm.default"])

    def test_a_random_value_is_drawn_alike_when_it_is_dropped(self, x):
        def function(x):
            a, b = torch.rand_like(x), torch.rand_like(x)
            return ((x * a).sin() * name(b, "b")).exp()

        check(save_all_but_names("b"), function, x, {"rand_like.default": 1}, [])

    def test_an_op_that_runs_once_cannot_be_dropped(self, x):
        with torch.library._scoped_library("remat_test", "FRAGMENT") as library:
            library.define("log(Tensor x) -> Tensor")
            library.impl("log", lambda x: x.clone(), "CompositeExplicitAutograd")
            from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

            op = torch.ops.remat_test.log.default
            handle = _register_effectful_op(op, _EffectType.ORDERED)
            try:
                with pytest.raises(PolicyError, match=r"MUST_RECOMPUTE for 'y', the result of remat_test.log.default"):
                    selective(save_all_but_names("y"), lambda x: name(op(x.detach()), "y") * x.sin(), x)
            finally:
                handle.destroy()


class TestOffload:
    def test_only_a_copy_is_kept(self, x):
        storages = []

        def function(x):
            y = name(x @ x, "y")
            storages.append(weakref.ref(y.untyped_storage()))
            return y.sin().exp()

        out = selective(offload_names("y"), function, x)
        assert storages[0]() is None
        out.sum().backward()
        check(offload_names("y"), function, x, {"sin.default": 1}, ["mm.default"])

    def test_what_the_ops_policy_saved_is_offloaded_instead(self, x):
        storages = []

        def function(x):
            y = name(x @ x, "y")
            storages.append(weakref.ref(y.untyped_storage()))
            return y.sin().exp()

        out = selective(first_of(offload_names("y"), save_all), function, x)
        assert storages[0]() is None
        out.sum().backward()
        check(first_of(offload_names("y"), save_all), function, x, {}, ["mm.default", "sin.default"])


class TestSeveralNamesAndNesting:
    def test_the_last_name_with_an_answer_holds(self, x):
        function = lambda x: name(name(name(x @ x, "a"), "b"), "c").sin().exp()  # noqa: E731
        check(first_of(save_names("a"), save_all_but_names("b")), function, x, {"mm.default": 1}, [])
        check(first_of(save_names("b"), save_all_but_names("a")), function, x, {}, ["mm.default"])

    def test_the_policy_is_asked_once_per_name_in_program_order(self, x):
        asked = []

        def policy(ctx, op, *args, **kwargs):
            asked.append((op.__name__, args[1]) if op is name_op() else op.__name__)
            assert ctx.op_output is not None
            return False

        function = lambda x: name(name(x, "in").sin(), "y").exp()  # noqa: E731
        selective(policy, function, x).sum().backward()
        assert asked == [("named.default", "in"), "sin.default", ("named.default", "y"), "exp.default"]

    def test_what_the_policy_computes_is_no_part_of_the_region(self, x):
        def policy(ctx, op, *args, **kwargs):
            return MUST_SAVE if op is name_op() and (args[0] * 2).abs().sum() > 0 else False

        check(policy, lambda x: name(x @ x, "y").sin().exp(), x, {"sin.default": 1}, ["mm.default"])

    def test_names_in_an_inner_region_are_for_its_policy(self, x):
        inner = remat.checkpoint_region(policy=recompute_all())(lambda x: name(x @ x, "y").sin())
        outer = lambda x: inner(x.cos()).exp().tanh()  # noqa: E731
        check(save_names("y"), outer, x, {"mm.default": 0}, [])

    def test_a_name_of_what_an_inner_region_returns(self, x):
        inner = remat.checkpoint_region(policy=save_ops([aten.mm]))(lambda x: (x @ x).sin())
        outer = lambda x: name(inner(x.cos()), "y").exp().tanh()  # noqa: E731
        assert_same_grads(functools.partial(selective, save_names("y")), outer, x)

    def test_must_recompute_for_all_but_matmuls_includes_named_matmuls(self, x):
        policy = lambda ctx, op, *a, **k: MUST_SAVE if op is aten.mm.default else MUST_RECOMPUTE  # noqa: E731
        check(policy, lambda x: name(x @ x, "y").sin().exp(), x, {"mm.default": 1}, [])

    def test_names_work_in_torch_compatible_contexts(self, x):
        contexts = functools.partial(remat.compat.create_selective_checkpoint_contexts, save_names("y"))
        out = remat.checkpoint(lambda x: name(x @ x, "y").sin().exp(), x, use_reentrant=False, context_fn=contexts)
        with OpCounter() as counter:
            out.sum().backward()
        assert counter["mm.default"] == 2
