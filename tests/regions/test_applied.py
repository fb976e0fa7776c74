"""`remat.apply` and `remat.remove`: submodules become regions and plain modules again, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from support.eager_testing import OpCounter
from torch import nn

import remat
from remat.policies import save_matmuls
from remat.regions.region import region_of_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.calls = 0

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        return self.mlp(self.attn(x).sin()) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 4)


def gradients(model, x):
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def num_calls(model):
    return [layer.calls for layer in model.layers]


def everything_in(model):
    return [dict(module.__dict__) for module in model.modules()]


class TestWhatMatches:
    @pytest.mark.parametrize(
        ("target", "names"),
        [
            ("layers.*", ["layers.0", "layers.1", "layers.2"]),
            ("layers.1", ["layers.1"]),
            ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
            ("**.mlp", ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]),
            ("layers.0.**", ["layers.0", "layers.0.attn", "layers.0.mlp", "layers.0.mlp.0", "layers.0.mlp.1"]),
            ("e*", ["embed"]),
            ("", [""]),
            (Block, ["layers.0", "layers.1", "layers.2"]),
            ((Net, nn.Tanh), ["", "layers.0.mlp.1", "layers.1.mlp.1", "layers.2.mlp.1"]),
            (lambda path, module: path.endswith("attn"), ["layers.0.attn", "layers.1.attn", "layers.2.attn"]),
        ],
    )
    def test_patterns_classes_and_predicates(self, target, names, model, x):
        expected = gradients(model, x)
        applied = remat.apply(model, target)
        assert list(applied.names) == names
        assert [path for path, m in model.named_modules() if region_of_module(m) is not None] == names
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))

    def test_the_result_can_be_read(self, model):
        assert str(remat.apply(model, "layers.1*")) == "1 module marked as a region:\n  layers.1 (Block)"
        assert str(remat.apply(model, "")) == "1 module marked as a region:\n  the model itself (Net)"
        assert str(remat.remove(model)) == "2 modules unmarked:\n  the model itself (Net)\n  layers.1 (Block)"
        assert str(remat.remove(model)) == "no module unmarked"

    def test_a_long_result_is_cut_in_the_middle(self):
        model = nn.Sequential(*(nn.Tanh() for _ in range(40)))
        text = str(remat.apply(model, "*"))
        assert len(text.splitlines()) == 1 + 8 + 1 + 8
        assert "  ... 24 more" in text

    def test_a_shared_module_is_marked_once_by_any_of_its_names(self, x):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model.again = model[0]
        assert remat.apply(model, "again").names == ("again",)
        remat.remove(model)
        assert remat.apply(model, nn.Linear).names == ("0",)

    def test_regions_are_called_by_their_path_or_the_given_name(self, model):
        remat.apply(model, "layers.1")
        remat.apply(model, "layers.2", name="last", policy=save_matmuls(), early_stop=False)
        assert region_of_module(model.layers[1]).name == "layers.1"
        options = region_of_module(model.layers[2])
        assert (options.name, options.policy, options.early_stop) == ("last", save_matmuls(), False)

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("layer.*", r"no submodule of Net matches 'layer.\*'. Did you mean 'layers.\*'"),
            ("mlp", r"Did you mean 'layers.0.mlp', 'layers.1.mlp' or 'layers.2.mlp'\?"),
            ("layers.*.mpl", r"Did you mean 'layers.\*.mlp'"),
            ("xyzzy", r"The model has 'embed', 'layers', 'layers.0'"),
            (nn.Conv2d, r"no submodule of Net is a Conv2d. It has 'Net', 'Linear'"),
            (nn.Linear(1, 1), r"says no modules. Give a pattern of their paths"),
            (3, r"3 says no modules"),
            ((), r"\(\) says no modules"),
            ("a..b", r"'a..b' is no pattern of a path"),
            (lambda path, module: False, r"the predicate is true for no submodule of Net"),
        ],
    )
    def test_nothing_found_is_an_error_with_near_misses(self, target, message, model):
        before = everything_in(model)
        with pytest.raises(remat.OptionError, match=message):
            remat.apply(model, target)
        assert everything_in(model) == before

    def test_something_that_is_no_model_is_explained(self):
        with pytest.raises(remat.OptionError, match=r"expected a torch\.nn\.Module"):
            remat.apply(lambda x: x, "layers.*")

    def test_marking_twice_is_an_error_that_marks_nothing(self, model):
        remat.apply(model, "layers.2", policy=save_matmuls())
        with pytest.raises(remat.OptionError, match=r"layers.2 is a region already .*save_matmuls\(\)") as error:
            remat.apply(model, "layers.*")
        assert "remat.remove(model, 'layers.2')" in str(error.value)
        assert region_of_module(model.layers[0]) is None

    def test_a_mistake_in_an_option_marks_nothing(self, model):
        with pytest.raises(ValueError, match="determinism_check should be one of"):
            remat.apply(model, "layers.*", determinism_check="sometimes")
        assert all(region_of_module(m) is None for m in model.modules())


class TestRegions:
    def test_marked_modules_are_recomputed(self, model, x):
        remat.apply(model, "layers.*")
        gradients(model, x)
        assert num_calls(model) == [2, 2, 2]

    def test_the_policy_holds(self, model, x):
        remat.apply(model, "layers.*", policy=save_matmuls())
        loss = model(x).sum()
        with OpCounter() as counter:
            loss.backward()
        assert counter["addmm.default"] == 0
        assert counter["sin.default"] == 3

    def test_nested_regions(self, model, x):
        expected = gradients(model, x)
        remat.apply(model, "layers.*")
        remat.apply(model, "layers.*.mlp", policy=save_matmuls())
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))

    def test_type_parameters_state_and_signature_stay(self, model):
        keys, types = list(model.state_dict()), [type(m) for m in model.modules()]
        signature = inspect.signature(model.layers[0].forward)
        remat.apply(model, "layers.*")
        assert list(model.state_dict()) == keys
        assert [type(m) for m in model.modules()] == types
        assert inspect.signature(model.layers[0].forward) == signature
        assert list(inspect.signature(model.layers[0].forward).parameters) == ["x", "scale"]

    def test_hooks_run_as_before(self, model, x):
        calls = []
        model.layers[0].register_forward_pre_hook(lambda module, args: calls.append("before"))
        model.layers[0].register_forward_hook(lambda module, args, out: calls.append("after"))
        remat.apply(model, "layers.*")
        gradients(model, x)
        assert calls == ["before", "after"]

    def test_a_forward_of_the_modules_own_is_wrapped_and_given_back(self, model, x):
        layer = model.layers[0]
        patched = lambda x: Block.forward(layer, x) * 2  # noqa: E731
        layer.forward = patched
        expected = gradients(model, x)
        before = everything_in(model)
        remat.apply(model, "layers.*")
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
        remat.remove(model)
        assert layer.__dict__["forward"] is patched
        assert [d.keys() for d in everything_in(model)] == [d.keys() for d in before]


class TestRemove:
    def test_it_restores_every_module_exactly(self, model):
        before = everything_in(model)
        remat.apply(model, "layers.**")
        assert everything_in(model) != before
        remat.remove(model)
        assert everything_in(model) == before

    def test_it_takes_a_pattern_or_a_subtree(self, model, x):
        remat.apply(model, "layers.*")
        assert remat.remove(model, "layers.0").names == ("layers.0",)
        assert remat.remove(model.layers[1]).names == ("",)
        gradients(model, x)
        assert num_calls(model) == [1, 1, 2]

    def test_it_undoes_checkpoint_region_on_a_module(self, model, x):
        remat.checkpoint_region(model.layers[0])
        assert remat.remove(model).names == ("layers.0",)
        gradients(model, x)
        assert num_calls(model) == [1, 1, 1]

    def test_a_pattern_that_matches_nothing_is_an_error(self, model):
        with pytest.raises(remat.OptionError, match=r"remat.remove: no submodule of Net matches 'layer.\*'"):
            remat.remove(model, "layer.*")

    def test_a_graph_made_before_still_works(self, model, x):
        expected = gradients(model, x)
        remat.apply(model, "layers.*")
        model.zero_grad()
        out = model(x)
        remat.remove(model)
        out.sum().backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
class TestCopies:
    def test_a_copy_runs_itself_and_is_a_region(self, copied, model, x):
        remat.apply(model, "layers.*", policy=save_matmuls())
        twin = copied(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(2)
        gradients(twin, x)
        assert num_calls(twin) == [2, 2, 2]
        assert num_calls(model) == [0, 0, 0]
        assert all(p.grad is None for p in model.parameters())
        assert region_of_module(twin.layers[0]).policy == save_matmuls()

    def test_its_gradients_are_right(self, copied, model, x):
        expected = gradients(model, x)
        remat.apply(model, "layers.*")
        twin = copied(model)
        assert all(torch.equal(a, b) for a, b in zip(gradients(twin, x), expected, strict=True))

    def test_removing_from_a_copy_leaves_the_original(self, copied, model, x):
        remat.apply(model, "layers.*")
        twin = copied(model)
        remat.remove(twin)
        assert all("forward" not in m.__dict__ for m in twin.modules())
        assert all(region_of_module(layer) is not None for layer in model.layers)


@pytest.mark.parametrize("has_hooks", [False, True])
def test_a_shallow_copy_runs_itself(has_hooks, model, x):
    layer = model.layers[0]
    if has_hooks:
        layer.register_forward_hook(lambda module, args, out: None)
    remat.apply(model, "layers.0")
    twin = copy.copy(layer)
    twin.calls = 10
    twin._modules = {"attn": layer.attn, "mlp": nn.Identity()}  # as a replica for another device has its own
    expected = layer.attn(x).sin()
    out = twin(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert (layer.calls, twin.calls) == (0, 12)


def test_a_marked_model_dies_without_garbage_collection(x):
    model = Net()
    remat.apply(model, "layers.*")
    gradients(model, x)
    reference = weakref.ref(model.layers[0])
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


# Dynamo looks at `.grad` of the arguments of the frames around a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_marked_model_can_be_compiled(backend, model, x):
    expected = gradients(model, x)
    remat.apply(model, "layers.*", policy=save_matmuls())
    found = gradients(torch.compile(model, backend=backend), x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
