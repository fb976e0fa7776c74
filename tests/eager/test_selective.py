"""Selective regions: the policy is asked, obeyed, and holds however backward is run."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from support.eager_testing import (
    MUST_CPU_OFFLOAD,
    MUST_RECOMPUTE,
    MUST_SAVE,
    PREFER_RECOMPUTE,
    REGIONS,
    OpCounter,
    assert_same_grads,
    plain,
    save_all,
    selective,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat import compat, policies
from remat.passes.shared.policy import PolicyError
from remat.regions.region import checkpoint_region

aten = torch.ops.aten


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True)


def chain(x):
    return (x.sin() @ x).cos().exp()


def count_backward(out, **options):
    with OpCounter() as counter:
        out.sum().backward(**options)
    return counter


def gradient_ops(function, x):
    """Count what backward runs without any region."""
    return count_backward(function(x))


class TestPolicies:
    @pytest.mark.parametrize(
        "policy",
        [
            [aten.mm.default],
            [aten.mm],
            {aten.mm.default},
            lambda ctx, op, *args, **kwargs: op is aten.mm.default,
            lambda ctx, op, *args, **kwargs: MUST_SAVE if op is aten.mm.default else MUST_RECOMPUTE,
            lambda ctx, op, *args, **kwargs: compat.CheckpointPolicy.PREFER_SAVE if op is aten.mm.default else False,
        ],
        ids=["overload", "packet", "set", "bool", "must", "prefer"],
    )
    def test_saved_ops_do_not_run_again_and_others_do(self, policy, x):
        recomputed = count_backward(selective(policy, chain, x)).counts - gradient_ops(chain, x).counts
        assert {op: n for op, n in recomputed.items() if op != "detach.default"} == {
            "sin.default": 1,
            "cos.default": 1,
            "exp.default": 1,
        }

    def test_the_policy_is_asked_once_per_op_in_program_order_with_the_output(self, x):
        asked = []

        def policy(ctx, op, *args, **kwargs):
            asked.append((op.__name__, tuple(ctx.op_output.shape), ctx.is_recompute))
            return PREFER_RECOMPUTE

        selective(policy, chain, x).sum().backward()
        names = ["sin.default", "mm.default", "cos.default", "exp.default"]
        assert asked == [(name, (4, 4), False) for name in names]

    def test_every_second_matmul(self, x):
        seen = []

        def policy(ctx, op, *args, **kwargs):
            if op is aten.mm.default:
                seen.append(op)
            return op is aten.mm.default and len(seen) % 2 == 0

        function = lambda x: ((((x @ x) @ x) @ x) @ x).sin()  # noqa: E731
        recomputed = count_backward(selective(policy, function, x)).counts - gradient_ops(function, x).counts
        assert recomputed["mm.default"] == 2

    def test_a_policy_that_raises_is_named_with_the_op(self, x):
        def faulty(ctx, op, *args, **kwargs):
            raise KeyError("no such layer")

        with pytest.raises(PolicyError, match=r"policy .*faulty.* raised KeyError when asked about aten.sin.default"):
            selective(faulty, chain, x)

    def test_an_answer_that_is_no_policy_is_refused(self, x):
        def faulty(ctx, op, *args, **kwargs):
            return "save"

        with pytest.raises(PolicyError, match=r"faulty.* answered 'save' for aten.sin.default"):
            selective(faulty, chain, x)

    def test_ops_with_several_outputs(self, x):
        def function(x):
            variance, mean = torch.var_mean(x.sin(), dim=0)
            values, _ = (x * mean).topk(2, dim=1)
            return (values * variance[:2]).exp()

        assert_same_grads(functools.partial(selective, [aten.var_mean.correction, aten.topk.default]), function, x)

    def test_ops_with_outputs_that_are_no_tensors(self, x):
        calls = []
        with torch.library._scoped_library("remat_test", "FRAGMENT"):

            @torch.library.custom_op("remat_test::sin_and_two", mutates_args=())
            def sin_and_two(x: torch.Tensor) -> tuple[torch.Tensor, int]:
                calls.append(1)
                return x.sin(), 2

            sin_and_two.register_autograd(
                lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(),
                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
            )
            op = torch.ops.remat_test.sin_and_two.default
            out = selective([op], lambda x: sin_and_two(x)[0].exp(), x)
            out.sum().backward()
        assert len(calls) == 1

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
    @pytest.mark.parametrize("region", ["save_all", "recompute_all"])
    def test_sparse_tensors(self, region, x):
        def function(x):
            return torch.sparse.mm((x.detach() * 1).to_sparse_csr() * 2, x).sin()

        (grad,) = torch.autograd.grad(REGIONS[region](function, x).sum(), x)
        assert torch.equal(grad, torch.autograd.grad(function(x).sum(), x)[0])

    def test_views_and_integer_views_can_be_saved(self, x):
        index = torch.tensor([1, 2, 3])
        function = lambda x: x.view(-1)[index.view(-1)].sin()  # noqa: E731
        assert_same_grads(functools.partial(selective, [aten.view.default]), function, x)


class TestSeveralBackwards:
    policy = (aten.mm.default,)

    def test_saved_values_serve_every_backward_of_a_retained_graph(self, x):
        out = selective(list(self.policy), chain, x)
        for _ in range(3):
            assert count_backward(out, retain_graph=True)["mm.default"] == 2, "the two matmuls of the gradient"

    def test_they_serve_torch_compatible_contexts_too(self, x):
        contexts = functools.partial(compat.create_selective_checkpoint_contexts, list(self.policy))
        out = plain(chain, x, context_fn=contexts)
        for _ in range(3):
            assert count_backward(out, retain_graph=True)["mm.default"] == 2

    def test_they_serve_disjoint_backwards_without_retain_graph(self, x):
        def function(x):
            y = (x @ x).sin()
            return y, (y @ x).sin()

        y, z = selective(list(self.policy), function, x)
        with OpCounter() as counter:
            (grad,) = torch.autograd.grad(z, y, torch.ones_like(z))
            torch.autograd.grad(y, x, grad)
        assert counter["mm.default"] == 1 + 2

    def test_they_serve_double_backward(self, x):
        def second(run):
            (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
            return torch.autograd.grad(grad.sum(), x)[0]

        torch.testing.assert_close(second(lambda x: selective(list(self.policy), chain, x)), second(chain))


class TestLifetimeOfSavedValues:
    def saved(self, function, x, **options):
        """Run a selective region and return weak references to what its policy saved, in order."""
        storages = []

        def policy(ctx, op, *args, **kwargs):
            storages.append(weakref.ref(ctx.op_output.untyped_storage()))
            return MUST_SAVE

        return selective(policy, function, x, **options), storages

    @staticmethod
    def num_alive(storages):
        return sum(s() is not None for s in storages)

    def test_they_die_with_the_graph_without_garbage_collection(self, x):
        gc.disable()
        try:
            out, storages = self.saved(lambda x: x.sin().exp().cos(), x)
            assert self.num_alive(storages) >= 2
            del out
            assert self.num_alive(storages) == 0
        finally:
            gc.enable()

    def test_they_die_in_backward_step_by_step(self):
        x = torch.randn(4, requires_grad=True)
        alive = []

        class Look(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                alive.append(TestLifetimeOfSavedValues.num_alive(storages))
                return grad

        def function(x):
            for _ in range(3):
                x = Look.apply(x.sin().exp())
            return x

        out, storages = self.saved(function, x)
        out.sum().backward()
        assert alive == sorted(alive, reverse=True)
        assert alive[-1] < alive[0]
        del out
        assert self.num_alive(storages) == 0

    def test_they_live_as_long_as_the_graph_is_retained(self, x):
        out, storages = self.saved(lambda x: x.sin().exp().cos(), x)
        before = self.num_alive(storages)
        out.sum().backward(retain_graph=True)
        assert self.num_alive(storages) == before
        out.sum().backward()
        assert self.num_alive(storages) <= 1, "the output itself may live on"

    def test_what_nothing_in_backward_can_ask_for_is_not_kept(self, x):
        _out, storages = self.saved(lambda x: (x.exp() * 2) + 1, x)
        assert storages[1]() is None, "the product is after the last value that backward needs"


class TestInPlace:
    def test_in_place_ops_on_saved_values_work(self, x):
        function = lambda x: x.sin().mul_(2).cos().exp()  # noqa: E731
        assert_same_grads(functools.partial(selective, [aten.sin.default]), function, x)

    def test_they_work_in_several_backwards(self, x):
        function = lambda x: x.sin().mul_(2).add_(1).cos().exp()  # noqa: E731
        out = selective(save_all, function, x)
        expected = torch.autograd.grad(function(x).sum(), x)[0]
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], expected)

    def test_in_place_ops_that_are_saved_themselves_do_not_run_again(self, x):
        function = lambda x: x.sin().mul_(2).cos().exp()  # noqa: E731
        counter = count_backward(selective([aten.mul_.Tensor], function, x))
        assert counter["mul_.Tensor"] == 0

    def test_writing_to_a_view_of_a_saved_value(self, x):
        def function(x):
            y = x.sin()
            y[0].mul_(2)
            return y.cos().exp()

        assert_same_grads(functools.partial(selective, [aten.sin.default]), function, x)

    def test_a_saved_value_changed_after_the_region_raises(self, x):
        out = selective(save_all, lambda x: x.sin().exp() + 1, x)
        hidden = selective(lambda ctx, op, *a, **k: op is aten.exp.default, lambda x: (x.exp(), x.exp().sin()), x)
        with torch.no_grad():
            hidden[0].add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been mutated"):
            hidden[0].sum().backward()
        out.sum().backward()

    def test_torch_compatible_contexts_raise_by_default_and_allow_on_demand(self, x):
        function = lambda x: x.sin().mul_(2).cos().exp()  # noqa: E731

        def run(**options):
            contexts = functools.partial(compat.create_selective_checkpoint_contexts, [aten.sin.default], **options)
            plain(function, x, context_fn=contexts).sum().backward()

        with pytest.raises(RuntimeError, match="has been mutated"):
            run()
        run(allow_cache_entry_mutation=True)


class TestRandomOps:
    """A saved random op is not drawn again, and the ones after it draw what they drew in forward."""

    @pytest.mark.parametrize("saved", [0, 1, 2])
    def test_saving_one_random_op_does_not_shift_the_others(self, saved):
        def policy(ctx, op, *args, **kwargs):
            if op is aten.rand_like.default:
                seen.append(op)
                return len(seen) - 1 == saved
            return False

        def function(x):
            for _ in range(3):
                x = (x * torch.rand_like(x)).sin()
            return x

        seen = []
        assert_same_grads(functools.partial(selective, policy), function, torch.randn(16, requires_grad=True))

    def test_without_preserve_rng_state_recomputed_numbers_are_fresh_and_saved_ones_are_kept(self):
        drawn = []

        def function(x):
            drawn.append((torch.rand_like(x), torch.randn_like(x)))
            return (x * drawn[-1][0]).sin() * drawn[-1][1]

        region = checkpoint_region(policy=[aten.rand_like.default], preserve_rng_state=False, early_stop=False)(
            function
        )
        region(torch.ones(16, requires_grad=True)).sum().backward()
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert not torch.equal(drawn[0][1], drawn[1][1])


class TestOffload:
    def test_offloaded_ops_do_not_run_again_and_give_the_same_gradients(self, x):
        policy = lambda ctx, op, *a, **k: MUST_CPU_OFFLOAD if op is aten.mm.default else False  # noqa: E731
        assert_same_grads(functools.partial(selective, policy), chain, x)
        assert count_backward(selective(policy, chain, x))["mm.default"] == 2

    def test_the_value_itself_is_not_kept_only_a_copy(self, x):
        storages = []

        def policy(ctx, op, *args, **kwargs):
            storages.append(weakref.ref(ctx.op_output.untyped_storage()))
            return MUST_CPU_OFFLOAD

        out = selective(policy, lambda x: (x @ x).sin().cos(), x)
        assert storages[0]() is None
        out.sum().backward()

    def test_a_copy_is_not_touched_by_in_place_ops(self, x):
        assert_same_grads(REGIONS["offload_all"], lambda x: x.sin().mul_(2).cos().exp(), x)


class TestNesting:
    def inner_outer(self, inner_policy, outer_policy):
        inner = checkpoint_region(policy=inner_policy)(lambda x: (x @ x).sin())
        return checkpoint_region(policy=outer_policy)(lambda x: inner(x.cos()).exp().tanh())

    @pytest.mark.parametrize("outer", [None, [aten.exp.default], [aten.mm.default, aten.sin.default]])
    def test_what_the_inner_policy_saves_is_not_run_again_by_the_outer_region(self, outer, x):
        out = self.inner_outer([aten.mm.default], outer)(x)
        assert count_backward(out)["mm.default"] == 2

    @pytest.mark.parametrize("inner", [None, [aten.sin.default]])
    def test_the_outer_policy_does_not_hold_inside(self, inner, x):
        asked = []

        def outer(ctx, op, *args, **kwargs):
            asked.append(op.__name__)
            return MUST_SAVE

        out = self.inner_outer(inner, outer)(x)
        assert asked == ["cos.default", "exp.default", "tanh.default"]
        assert count_backward(out)["mm.default"] == 2 + 1, "recomputed once, for the outer and the inner region"

    def test_a_block_saved_inside_needs_no_mark_of_what_the_outside_needs(self, x):
        block = checkpoint_region(policy=save_all)(lambda x: (x @ x).sin() @ x)
        function = checkpoint_region(lambda x: (block(x.cos()) * 2).tanh().exp())
        out = function(x)
        counter = count_backward(out)
        reference = gradient_ops(lambda x: (((x.cos() @ x.cos()).sin() @ x.cos()) * 2).tanh().exp(), x)
        assert counter["mm.default"] == reference["mm.default"]

    @pytest.mark.parametrize("depth", [2, 3, 5])
    @pytest.mark.parametrize("policy", [None, save_all, [aten.mm.default]], ids=["plain", "save_all", "save_mm"])
    def test_gradients_at_any_depth(self, depth, policy, x):
        def nested(level):
            if level == 0:
                return lambda x: (x @ x).sin()
            inner = nested(level - 1)
            return checkpoint_region(policy=policy)(lambda x: inner(x.cos()).exp().tanh())

        def unmarked(level):
            if level == 0:
                return lambda x: (x @ x).sin()
            inner = unmarked(level - 1)
            return lambda x: inner(x.cos()).exp().tanh()

        found = torch.autograd.grad(nested(depth)(x).sum(), x)[0]
        assert torch.equal(found, torch.autograd.grad(unmarked(depth)(x).sum(), x)[0])

    def test_children_are_told_apart(self, x):
        first = checkpoint_region(policy=[aten.mm.default])(lambda x: (x @ x).sin())
        second = checkpoint_region(lambda x: (x @ x).cos())
        function = checkpoint_region(lambda x: (first(x) * second(x) * first(x * 2)).exp())
        plain_function = lambda x: ((x @ x).sin() * (x @ x).cos() * ((x * 2) @ (x * 2)).sin()).exp()  # noqa: E731
        found = torch.autograd.grad(function(x).sum(), x)[0]
        assert torch.equal(found, torch.autograd.grad(plain_function(x).sum(), x)[0])


class ByOpAlone:
    """A policy of somebody's that has an answer per op, and no place for an engine to remember it."""

    def answer_for(self, op):
        return MUST_SAVE

    def __call__(self, ctx, op, *args, **kwargs):
        return self.answer_for(op)


def test_what_one_policy_answers_is_no_answer_of_another(x):
    asked = []

    def recompute(ctx, op, *args, **kwargs):
        asked.append(op)
        return PREFER_RECOMPUTE

    checkpoint_region(chain, policy=ByOpAlone())(x).sum().backward()
    with OpCounter() as counter:
        checkpoint_region(chain, policy=recompute)(x).sum().backward()
    assert aten.mm.default in asked
    assert counter["sin.default"] == 3, "in forward, again, and in the formula for the gradient of cos"


def test_a_random_op_saved_inside_does_not_shift_those_after_the_inner_region(x):
    inner = checkpoint_region(policy=save_all)(lambda x: (x * torch.rand_like(x)).sin())
    outer = checkpoint_region(lambda x: (inner(x) * torch.rand_like(x)).exp())
    torch.manual_seed(3)
    found = torch.autograd.grad(outer(x).sum(), x)[0]
    torch.manual_seed(3)
    expected = ((x * torch.rand_like(x)).sin() * torch.rand_like(x)).exp()
    assert torch.equal(found, torch.autograd.grad(expected.sum(), x)[0])


def test_torch_compatible_nested_regions_are_recomputed_once_per_level(x):
    """That is what nesting them is for: less is held at a time."""
    function = lambda x: plain(lambda x: plain(lambda x: (x @ x).sin(), x.cos()).exp().tanh(), x)  # noqa: E731
    assert count_backward(function(x))["mm.default"] == 2 + 2


def test_nested_random_layers_draw_the_same_numbers(x):
    inner = checkpoint_region(policy=[aten.mm.default])(lambda x: nn.functional.dropout(x @ x, 0.5).sin())
    outer = checkpoint_region(lambda x: nn.functional.dropout(inner(x), 0.5).exp())

    def unmarked(x):
        return nn.functional.dropout(nn.functional.dropout(x @ x, 0.5).sin(), 0.5).exp()

    torch.manual_seed(3)
    found = torch.autograd.grad(outer(x).sum(), x)[0]
    torch.manual_seed(3)
    assert torch.equal(found, torch.autograd.grad(unmarked(x).sum(), x)[0])


def test_policy_is_written_into_a_trace_also_after_it_was_asked_without_one():
    """What is remembered of its answers must not stand in for the tags."""
    contexts = functools.partial(compat.create_selective_checkpoint_contexts, [aten.mm.default])

    def gradient(x):
        out = compat.checkpoint(lambda x: (x @ x).tanh().sin(), x, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(out.sum(), x)

    def tags():
        nodes = make_fx(gradient)(torch.ones(2, 2, requires_grad=True)).graph.nodes
        return [(node.name, node.meta["recompute"]) for node in nodes if "recompute" in node.meta]

    before = tags()
    assert ("mm", MUST_SAVE) in before
    gradient(torch.ones(2, 2, requires_grad=True))
    assert tags() == before


def test_trace_leaves_no_tag_behind_for_the_next_one():
    contexts = functools.partial(compat.create_selective_checkpoint_contexts, [aten.mm.default])

    def function(x):
        return compat.checkpoint(lambda x: (x @ x).tanh(), x, use_reentrant=False, context_fn=contexts)

    make_fx(function)(torch.ones(2, 2, requires_grad=True))
    later = make_fx(lambda x: x.sin().exp())(torch.ones(2))
    assert not any("recompute" in node.meta or "ac_graph_id" in node.meta for node in later.graph.nodes)


def written_through_a_view(x):
    y = (x @ x).clone()
    y[:, 0] = 3.0
    return (y @ x).sin()


def written_under_a_view(x):
    y = (x @ x).clone()
    view = y[:, :2]
    y.mul_(2.0)
    return view.sin().sum() + (y @ x).cos()


@pytest.mark.parametrize("answer", [MUST_SAVE, MUST_CPU_OFFLOAD])
@pytest.mark.parametrize("only_views", [False, True])
@pytest.mark.parametrize("function", [written_through_a_view, written_under_a_view])
def test_saved_view_still_shows_memory_that_is_changed_in_place(x, function, only_views, answer):
    """A view that is answered by a copy would neither see the change nor pass it on."""

    def policy(ctx, op, *args, **kwargs):
        return answer if not only_views or op in (aten.select.int, aten.slice.Tensor) else PREFER_RECOMPUTE

    y = x.detach().clone().requires_grad_()
    function(x).sum().backward()
    checkpoint_region(policy=policy)(function)(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_saved_view_that_is_written_through_is_right_under_torchs_names(x):
    y = x.detach().clone().requires_grad_()
    contexts = functools.partial(compat.create_selective_checkpoint_contexts, [aten.select.int])
    written_through_a_view(x).sum().backward()
    compat.checkpoint(written_through_a_view, y, use_reentrant=False, context_fn=contexts).sum().backward()
    assert torch.equal(x.grad, y.grad)


def random_after_a_saved_draw(x, region=None):
    return torch.rrelu(torch.dropout(x, 0.5, True), training=True).exp()


def region_after_a_saved_draw(x, region=lambda function: function):
    inner = region(lambda y: torch.dropout(y, 0.5, True).exp())
    return inner(torch.dropout(x, 0.5, True)).sin()


def mask_after_a_saved_draw(x, region=lambda function: function):
    """Nothing is saved in the inner region, so nobody knows it any more in backward."""
    inner = region(lambda y: torch.dropout(y.detach(), 0.5, True))
    return (inner(torch.dropout(x, 0.5, True)) * x.sin()).exp()


INNER_REGIONS = {
    "plain": checkpoint_region,
    "policy": checkpoint_region(policy=[aten.mm.default]),
    "torch's names": lambda function: functools.partial(compat.checkpoint, function, use_reentrant=False),
}


@pytest.mark.parametrize("inner", INNER_REGIONS.values(), ids=INNER_REGIONS)
@pytest.mark.parametrize("function", [random_after_a_saved_draw, region_after_a_saved_draw, mask_after_a_saved_draw])
def test_what_runs_again_after_a_saved_draw_draws_what_it_drew(x, function, inner):
    """A draw that is answered from what was kept moves no generator."""
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    function(x).sum().backward()
    torch.manual_seed(1)
    out = checkpoint_region(policy=policies.save_all())(lambda y: function(y, inner))(y).sum()
    torch.manual_seed(2)
    out.backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("change", [lambda y: y.unsqueeze_(0), lambda y: y.t_(), lambda y: y.detach().resize_(2, 2)])
def test_shape_that_is_changed_in_place_is_changed_again(x, change):
    def function(x):
        return (change((x[:2] * 2.0).clone()) + x.sum()).exp()

    y = x.detach().clone().requires_grad_()
    function(x).sum().backward()
    checkpoint_region(policy=policies.save_all())(function)(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
