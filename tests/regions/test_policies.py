"""Ready-made policies: what they keep, alone and composed, in remat's engine and in torch's own."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from support.eager_testing import MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, OpCounter, selective
from torch import nn

import remat
from remat.passes.shared.fingerprint import fingerprint
from remat.passes.shared.module_path import current_module_path, ends_match, matches, path_of_stack
from remat.passes.shared.policy import PolicyError, normalise_policy
from remat.policies import (
    by_module,
    bytes_above,
    bytes_below,
    every_nth,
    first_of,
    flops_above,
    offload_names,
    recompute_all,
    save_all,
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


def through_torch(policy, function, *args):
    """Run a function as a region of torch's own engine."""
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


ENGINES = {"remat": selective, "torch": through_torch}
every_engine = pytest.mark.parametrize("run", ENGINES.values(), ids=ENGINES)


def recomputed(run, policy, function, x):
    """Count what runs again in backward, beyond what the gradient itself needs; no detach."""
    with OpCounter() as gradient:
        loss = function(x).sum()
        gradient.counts.clear()
        loss.backward()
    x.grad = None
    loss = run(policy, function, x).sum()
    with OpCounter() as counter:
        loss.backward()
    return {op: n for op, n in (counter.counts - gradient.counts).items() if op != "detach.default"}


def chain(x):
    return ((x @ x).sin() @ x).cos().exp()


ALL = {"sin.default": 1, "mm.default": 2, "cos.default": 1, "exp.default": 1}


class TestWhatIsKept:
    @every_engine
    @pytest.mark.parametrize(
        ("policy", "kept"),
        [
            (save_all(), ["sin.default", "mm.default", "cos.default", "exp.default"]),
            (recompute_all(), []),
            (save_matmuls(), ["mm.default"]),
            (save_ops([aten.mm]), ["mm.default"]),
            (save_ops([aten.sin.default, aten.cos.default]), ["sin.default", "cos.default"]),
            (save_names("y"), []),
            (flops_above(127), ["mm.default"]),
            (flops_above(128), []),
            (bytes_below(65), ["sin.default", "mm.default", "cos.default", "exp.default"]),
            (bytes_below(64), []),
            (bytes_above(63), ["sin.default", "mm.default", "cos.default", "exp.default"]),
            (first_of(save_ops([aten.sin]), save_matmuls()), ["sin.default", "mm.default"]),
            (first_of(save_ops([aten.sin]), recompute_all(), save_matmuls()), ["sin.default"]),
        ],
        ids=repr,
    )
    def test_only_the_rest_runs_again(self, run, policy, kept, x):
        assert recomputed(run, policy, chain, x) == {op: n for op, n in ALL.items() if op not in kept}

    @every_engine
    @pytest.mark.parametrize(("n", "num_again"), [(1, 0), (2, 2), (3, 3), (5, 4)])
    def test_every_nth_counts_within_one_call_of_a_region(self, run, n, num_again, x):
        function = lambda x: ((((x @ x) @ x) @ x) @ x).sin()  # noqa: E731
        policy = every_nth([aten.mm], n)
        for _ in range(3):  # the policy object has no memory of its own
            assert recomputed(run, policy, function, x).get("mm.default", 0) == num_again

    def test_every_nth_counts_inner_regions_apart(self, x):
        policy = every_nth(save_matmuls(), 2)
        inner = remat.checkpoint_region(policy=policy)(lambda x: (x @ x).sin())
        function = lambda x: inner((x @ x).sin() @ x).sin()  # noqa: E731
        assert recomputed(selective, policy, function, x)["mm.default"] == 1

    def test_every_nth_in_a_composition_counts_what_reaches_it(self, x):
        function = lambda x: (((x @ x).sin() @ x).sin() @ x).sin()  # noqa: E731
        policy = first_of(save_ops([aten.sin]), every_nth([aten.mm.default, aten.sin.default], 3))
        assert recomputed(selective, policy, function, x) == {"mm.default": 2}

    def test_a_view_has_no_bytes_of_its_own(self, x):
        kept = []

        def spy(ctx, op, *args, **kwargs):
            kept.append((op.__name__, bytes_below(10**6)(ctx, op, *args, **kwargs) is MUST_SAVE))
            return False

        selective(spy, lambda x: x.view(-1).exp().t().sin(), x).sum().backward()
        assert kept == [("view.default", False), ("exp.default", True), ("t.default", False), ("sin.default", True)]

    def test_save_matmuls_means_convolutions_and_attention_too(self):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 8, 8, requires_grad=True)
        weight = torch.randn(2, 2, 1, 1)

        def function(x):
            y = torch.conv2d(x, weight).sin()
            return nn.functional.scaled_dot_product_attention(y, y, y).sin()

        again = recomputed(selective, save_matmuls(), function, x)
        assert set(again) == {"sin.default"}


class TestOpinions:
    def test_a_function_without_an_opinion_returns_none(self, x):
        asked = []

        def only_sin(ctx, op, *args, **kwargs):
            asked.append(op.__name__)
            return MUST_SAVE if op is aten.sin.default else None

        again = recomputed(selective, first_of(only_sin, save_matmuls()), chain, x)
        assert again == {"cos.default": 1, "exp.default": 1}
        assert asked == ["mm.default", "sin.default", "mm.default", "cos.default", "exp.default"]

    def test_none_is_no_answer_of_a_policy_that_is_alone(self, x):
        with pytest.raises(PolicyError, match=r"answered None for aten.mm.default, .*only inside remat.policies"):
            selective(lambda ctx, op, *args, **kwargs: None, chain, x)

    def test_bools_are_opinions(self, x):
        policy = first_of(lambda ctx, op, *args, **kwargs: op is aten.sin.default, save_matmuls())
        assert recomputed(selective, policy, chain, x) == {"mm.default": 2, "cos.default": 1, "exp.default": 1}

    def test_ready_made_ones_answer_alone_for_every_op(self):
        ctx = remat.compat.SelectiveCheckpointContext(is_recompute=False, op_output=torch.ones(1))
        for policy in (save_matmuls(), save_ops([aten.mm]), save_names("y"), by_module({"mlp": save_all()})):
            assert policy(ctx, aten.exp.default, torch.ones(1)) is PREFER_RECOMPUTE
            assert policy.opinion(ctx, aten.exp.default, torch.ones(1)) is None

    def test_an_answer_that_is_no_policy_names_the_part_that_gave_it(self, x):
        def faulty(ctx, op, *args, **kwargs):
            return "save"

        with pytest.raises(PolicyError, match=r"faulty.* answered 'save' for aten.mm.default"):
            selective(first_of(save_names("y"), faulty), chain, x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4)

    def forward(self, x):
        return self.q_proj(x).sin()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return self.mlp(self.attn(x))


class Model(nn.Module):
    def __init__(self, layer_policy=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.layer_policy = layer_policy

    def forward(self, x):
        for layer in self.layers:
            run = remat.checkpoint_region(policy=self.layer_policy)(layer.__call__) if self.layer_policy else layer
            x = run(x)
        return x.exp()


class TestByModule:
    @every_engine
    @pytest.mark.parametrize(
        ("policies", "num_addmm", "num_sin", "num_tanh", "num_exp"),
        [
            ({"*.attn": save_all(), "*": recompute_all()}, 2, 0, 2, 1),
            ({"attn": save_all()}, 2, 0, 2, 1),
            ({"q_proj": save_all()}, 2, 2, 2, 1),
            ({"layers.0": save_all()}, 2, 1, 1, 1),
            ({"layers.1.mlp.*": save_matmuls()}, 3, 2, 2, 1),
            ({"mlp": recompute_all(), "*": save_all()}, 2, 0, 2, 0),
            ({"*": save_all()}, 0, 0, 0, 0),
        ],
    )
    def test_an_op_goes_by_the_module_it_is_called_in(self, run, policies, num_addmm, num_sin, num_tanh, num_exp, x):
        again = recomputed(run, by_module(policies), Model().__call__, x)
        found = [again.get(f"{op}.default", 0) for op in ("addmm", "sin", "tanh", "exp")]
        assert found == [num_addmm, num_sin, num_tanh, num_exp]

    def test_the_path_starts_at_the_outermost_module_also_inside_a_region(self, x):
        seen = []

        def policy(ctx, op, *args, **kwargs):
            seen.append((op.__name__, ctx.module))
            return False

        with OpCounter():
            Model(policy)(x).sum().backward()
        layer = ["layers.{}.attn.q_proj"] * 2 + ["layers.{}.attn"] + ["layers.{}.mlp.0"] * 2 + ["layers.{}.mlp.1"]
        names = ["t.default", "addmm.default", "sin.default", "t.default", "addmm.default", "tanh.default"]
        expected = [(op, path.format(i)) for i in range(2) for op, path in zip(names, layer, strict=True)]
        assert seen == expected

    def test_outside_of_modules_only_the_wildcard_matches(self, x):
        assert recomputed(selective, by_module({"*": save_all()}), chain, x) == {}
        assert recomputed(selective, by_module({"*.attn": save_all()}), chain, x) == ALL

    def test_a_module_that_moved_is_found_at_its_new_place(self):
        class Asks(nn.Module):
            def forward(self):
                return current_module_path()

        class Calls(nn.Module):
            def forward(self):
                return next(iter(self.children()))()

        model, child = Calls(), Asks()
        model.old = child
        assert model() == "old"
        del model.old
        model.new = child
        assert model() == "new"

    def test_a_module_of_nobody_starts_a_path_of_its_own(self):
        class Asks(nn.Module):
            def forward(self):
                return current_module_path()

        class Calls(nn.Module):
            def forward(self):
                return helper()

        helper = nn.Sequential()
        helper.inner = Asks()
        helper.forward = lambda: helper.inner()
        assert Calls()() == "inner"

    @pytest.mark.parametrize(
        ("text", "path"),
        [
            ("L['self']", ""),
            ("L['self'].layers.0.attn", "layers.0.attn"),
            ("G['model'].layers.1", "layers.1"),
            ("L['self']._modules['layers']._modules['0']", "layers.0"),
            ("L['fn'].__closure__[0].cell_contents.layers.1", "layers.1"),
            ("L['self']._orig_mod.layers.1", "layers.1"),
            ("L['self'].layers.0.forward.module().attn", "layers.0.attn"),
            ("L['self'].layers.0.__dict__['_modules']['mlp'].1", "layers.0.mlp.1"),
        ],
    )
    def test_the_path_in_a_traced_graph(self, text, path):
        assert path_of_stack({"1": ("L['self']", nn.Module), "2": (text, nn.Module)}) == path


@pytest.mark.parametrize(
    ("pattern", "path", "whole", "end"),
    [
        ("layers.*.mlp", "layers.3.mlp", True, True),
        ("layers.*", "layers.3.mlp", False, True),
        ("layers.**", "layers.3.mlp", True, True),
        ("**.mlp", "layers.3.mlp", True, True),
        ("**.mlp", "mlp", True, True),
        ("mlp", "layers.3.mlp", False, True),
        ("mlp", "layers.3.my_mlp", False, False),
        ("*mlp", "my_mlp", True, True),
        ("layers.?", "layers.10", False, False),
        ("layers.1", "layers.10", False, False),
        ("a.b", "a+b", False, False),
        ("", "", True, True),
    ],
)
def test_patterns(pattern, path, whole, end):
    assert matches(pattern, path) is whole
    if pattern:
        assert ends_match(pattern, path) is end


def by_function(ctx, op, *args, **kwargs):
    return None


EXAMPLES = [
    lambda: save_all(),
    lambda: recompute_all(),
    lambda: save_matmuls(),
    lambda: save_ops([aten.mm, aten.add.Tensor]),
    lambda: save_ops([aten.mm, aten.add.Scalar]),
    lambda: save_names("a"),
    lambda: save_names("b"),
    lambda: save_all_but_names("a"),
    lambda: offload_names("a"),
    lambda: flops_above(100),
    lambda: flops_above(101),
    lambda: bytes_below(100),
    lambda: bytes_above(100),
    lambda: every_nth([aten.mm], 2),
    lambda: every_nth([aten.mm], 3),
    lambda: first_of(save_names("a"), by_function),
    lambda: first_of(by_function, save_names("a")),
    lambda: by_module({"a": save_all(), "b": recompute_all()}),
    lambda: by_module({"b": save_all(), "a": recompute_all()}),
]


class TestValues:
    def test_equal_parts_make_equal_policies_with_one_fingerprint(self):
        for make in EXAMPLES:
            first, second = make(), make()
            assert first == second
            assert hash(first) == hash(second)
            assert repr(first) == repr(second)
            assert fingerprint(first) == fingerprint(second)

    def test_different_parts_make_different_policies_with_different_fingerprints(self):
        made = [make() for make in EXAMPLES]
        assert len(set(made)) == len({fingerprint(policy) for policy in made}) == len(made)

    def test_they_survive_pickle_and_deepcopy(self):
        for make in EXAMPLES:
            assert pickle.loads(pickle.dumps(make())) == make() == copy.deepcopy(make())

    def test_they_print_as_the_call_that_makes_them(self):
        policy = by_module({"*.attn": first_of(save_names("q"), [aten.mm]), "*": every_nth(save_matmuls(), 2)})
        expected = "{'*.attn': first_of(save_names('q'), save_ops([aten.mm])), '*': every_nth(save_matmuls(), 2)}"
        assert repr(policy) == f"by_module({expected})"

    def test_the_order_of_ops_and_names_makes_no_difference(self):
        assert save_ops([aten.mm, aten.sin]) == save_ops([aten.sin, aten.mm])
        assert save_names("a", "b") == save_names("b", "a", "b")

    def test_fingerprints_are_the_same_in_another_process(self):
        program = (
            "import torch; from remat.policies import *; from remat.passes.shared.fingerprint import fingerprint;"
            "print(fingerprint(by_module({'*': first_of(save_names('a'), every_nth([torch.ops.aten.mm], 2))})))"
        )
        found = {
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": s}
            ).stdout
            for s in ("1", "2")
        }
        policy = by_module({"*": first_of(save_names("a"), every_nth([aten.mm], 2))})
        assert found == {fingerprint(policy) + "\n"}


class TestMistakes:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: save_ops("mm"), r"save_ops\('mm'\): expected a list of ops"),
            (lambda: save_ops(aten.mm), r"expected a list of ops, like save_ops\(\[torch.ops.aten.mm.default\]\)"),
            (lambda: save_ops([torch.mm]), r"is no op but .*Did you mean torch.ops.aten.mm\?"),
            (lambda: save_ops(["aten.mm.default"]), r"Did you mean torch.ops.aten.mm\?"),
            (lambda: save_ops([3]), r"3 is no op but an int. Ops are named like"),
            (lambda: save_ops([]), r"an empty list saves nothing; say recompute_all\(\)"),
            (lambda: save_names(), r"save_names\(\) names nothing"),
            (lambda: save_names(["a", "b"]), r"one by one: save_names\(\"attn_out\", \"mlp_in\"\)"),
            (lambda: offload_names(""), r"offload_names\(''\): expected names"),
            (lambda: flops_above("1e9"), r"flops_above\('1e9'\): expected a whole number, 0 or more"),
            (lambda: bytes_below(True), r"bytes_below\(True\): expected a whole number"),
            (lambda: every_nth([aten.mm], 0), r"every_nth\(0\): expected a whole number, 1 or more"),
            (lambda: every_nth(aten.mm, 2), r"expected a list of ops, like every_nth"),
            (lambda: first_of(), r"first_of\(\) asks nobody"),
            (lambda: first_of(3), r"first_of: 3 is no policy. Give a ready-made one"),
            (lambda: first_of(save_all), r"save_all makes a policy when it is called: save_all\(...\)"),
            (lambda: by_module([save_all()]), r"expected a dictionary from patterns to policies"),
            (lambda: by_module({}), r"expected a dictionary"),
            (lambda: by_module({"a..b": save_all()}), r"'a..b' is no pattern of a module's path"),
            (lambda: by_module({"a": aten.mm}), r"by_module: .*aten.mm.* is no policy"),
        ],
    )
    def test_they_are_explained(self, make, message):
        with pytest.raises(remat.OptionError, match=message):
            make()


def test_a_context_without_state_outside_of_any_engine_is_explained():
    class Context:
        is_recompute, op_output = False, torch.ones(1)

    with pytest.raises(remat.OptionError, match="a policy that counts needs to know which call"):
        every_nth([aten.mm], 2)(Context(), aten.mm.default)


def test_lists_and_functions_become_policies():
    assert normalise_policy([aten.mm]) == save_ops([aten.mm])
    assert normalise_policy(by_function) is by_function


def test_must_recompute_of_one_part_is_an_opinion(x):
    policy = first_of(lambda ctx, op, *a, **k: MUST_RECOMPUTE if op is aten.mm.default else None, save_all())
    assert recomputed(selective, policy, chain, x) == {"mm.default": 2}
