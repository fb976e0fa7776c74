"""`remat.wrappers`: torch's checkpoint and offload wrappers by their names and signatures, as regions of ours."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as torch_wrappers
from support.eager_testing import OpCounter
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy, size_based_auto_wrap_policy

import remat
from remat import compat, wrappers
from remat.wrappers import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
    unwrap,
)

pytestmark = [
    # Dynamo looks at the gradient of every input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # The reentrant kind says so where no input asks for a gradient, as torch's does.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.factor = 2

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.dropout(torch.sin(self.norm(self.linear(x))) * scale) * self.factor


def save_mm() -> Any:
    return compat.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint": checkpoint_wrapper,
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "use_reentrant": functools.partial(checkpoint_wrapper, use_reentrant=True),
    "context_fn": functools.partial(checkpoint_wrapper, context_fn=save_mm),
    "policy": functools.partial(checkpoint_wrapper, policy=remat.policies.save_matmuls()),
    "offload_policy": functools.partial(checkpoint_wrapper, policy=remat.policies.offload_all()),
    "budget": functools.partial(checkpoint_wrapper, memory_budget=1.0),
    "own_function": functools.partial(checkpoint_wrapper, checkpoint_fn=compat.checkpoint, use_reentrant=False),
    "offload": offload_wrapper,
    "offload_around": lambda module: offload_wrapper(checkpoint_wrapper(module)),
    "offload_inside": lambda module: checkpoint_wrapper(checkpoint_wrapper(offload_wrapper(module))),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
# The reentrant kind knows tensors and tuples of them, and no transforms, in torch too.
MODERN = {name: wrap for name, wrap in WRAPPERS.items() if name not in ("reentrant", "use_reentrant")}
each_modern_wrapper = pytest.mark.parametrize("wrap", MODERN.values(), ids=MODERN)


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def make_model(wrap: Callable[[nn.Module], nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if wrap is not None:
        apply_activation_checkpointing(model, wrap, is_block)
    return model


def run_step(model: nn.Module, call: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    """Output, all gradients, and all state after one step."""
    torch.manual_seed(1)
    x = torch.randn(4, 8, requires_grad=True)
    model.zero_grad()
    out = (call or model)(x)
    out.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return [out.detach(), x.grad, *gradients, *(buffer.clone() for buffer in model.buffers())]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- the same numbers --------------------------------------------------------------------------------------------


@each_wrapper
def test_wrapped_model_computes_what_the_plain_one_does(wrap) -> None:
    assert_same(run_step(make_model(wrap)), run_step(make_model()))


@each_wrapper
@pytest.mark.parametrize("backend", ["aot_eager", "remat"])
def test_wrapped_model_is_captured_whole_and_computes_the_same(wrap, backend) -> None:
    model = make_model(wrap)
    options = {"inner": "aot_eager"} if backend == "remat" else None
    compiled = torch.compile(model, backend=backend, fullgraph=True, options=options)
    assert_same(run_step(model, compiled), run_step(make_model()))


@pytest.mark.parametrize("name", ["checkpoint", "reentrant", "offload", "offload_around", "offload_inside"])
def test_backend_that_runs_graphs_as_they_are_moves_module_state_once(name) -> None:
    model = make_model(WRAPPERS[name])
    assert_same(run_step(model, torch.compile(model, backend="eager", fullgraph=True)), run_step(make_model()))


def test_wrapped_model_trains_alike_with_inductor() -> None:
    model = make_model(WRAPPERS["policy"]).eval()
    result = run_step(model, torch.compile(model, backend="remat"))
    torch.testing.assert_close(result, run_step(make_model().eval()))


@pytest.mark.parametrize("name", ["checkpoint", "reentrant", "use_reentrant", "context_fn", "own_function"])
def test_forward_runs_again_in_backward(name) -> None:
    model = make_model(WRAPPERS[name])
    with OpCounter() as counter:
        run_step(model)
    assert counter["sin.default"] == 4
    assert counter["addmm.default"] == (2 if name == "context_fn" else 4)


def test_offload_wrapper_runs_nothing_again() -> None:
    with OpCounter() as counter:
        run_step(make_model(offload_wrapper))
    assert counter["sin.default"] == 2


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offload_wrapper_leaves_nothing_of_a_forward_without_backward(offload, tmp_path) -> None:
    """What stays where it is must not lead from the graph to itself."""
    folder = tmp_path if offload == "disk" else None
    model = offload_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), offload=offload, offload_folder=folder)
    gone = weakref.ref(model(torch.randn(2, 4)))
    gc.collect()
    assert gone() is None


def test_region_is_named_in_the_plan_by_its_path() -> None:
    model = make_model(checkpoint_wrapper)
    report = remat.explain(model, torch.randn(4, 8))
    assert {decision.region for decision in report.plans[0].decisions} >= {"0", "1"}


def test_given_name_is_kept() -> None:
    model = make_model(functools.partial(checkpoint_wrapper, name="mine"))
    report = remat.explain(model, torch.randn(4, 8))
    assert {decision.region for decision in report.plans[0].decisions} >= {"mine", "mine#2"}


# --- transparency ------------------------------------------------------------------------------------------------


def test_names_are_those_of_torch() -> None:
    names = ["CheckpointImpl", "ActivationWrapper", "CheckpointWrapper", "OffloadWrapper"]
    names += ["checkpoint_wrapper", "offload_wrapper", "apply_activation_checkpointing"]
    assert all(hasattr(torch_wrappers, name) and name in wrappers.__all__ for name in names)


def test_attributes_and_indices_are_those_of_the_wrapped_module() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    inner.note = "here"
    wrapped = CheckpointWrapper(inner)
    assert wrapped[0] is inner[0] and list(wrapped) == list(inner)
    assert wrapped.note == "here"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wrapped.nothing


def test_special_methods_are_the_wrappers_own() -> None:
    """A graph module brings its own `__deepcopy__`, which would lose the wrapper."""
    wrapped = checkpoint_wrapper(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    assert isinstance(copy.deepcopy(wrapped), CheckpointWrapper)


def test_base_class_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ActivationWrapper(nn.Linear(1, 1))  # type: ignore[abstract]


@each_wrapper
def test_state_dict_fits_plain_and_wrapped_models_both_ways(wrap) -> None:
    plain, wrapped = make_model(), make_model(wrap)
    run_step(plain)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    assert_same([*wrapped.state_dict().values()], [*plain.state_dict().values()])
    again = make_model()
    again.load_state_dict(wrapped.state_dict())
    make_model(wrap).load_state_dict(wrapped.state_dict())
    assert_same([*again.state_dict().values()], [*plain.state_dict().values()])


def test_state_dict_goes_from_compiled_to_plain_to_wrapped() -> None:
    wrapped = make_model(checkpoint_wrapper)
    compiled = torch.compile(wrapped, backend="remat", options={"inner": "aot_eager"})
    run_step(wrapped, compiled)
    state = {key.removeprefix("_orig_mod."): value for key, value in compiled.state_dict().items()}
    plain = make_model()
    plain.load_state_dict(state)
    in_place = make_model(checkpoint_wrapper)
    in_place.compile(backend="remat", options={"inner": "aot_eager"})
    assert list(in_place.state_dict()) == list(plain.state_dict())
    in_place.load_state_dict(plain.state_dict())
    assert_same([*in_place.state_dict().values()], [*plain.state_dict().values()])


def test_distributed_checkpoints_know_the_same_names() -> None:
    plain, wrapped = make_model(), make_model(WRAPPERS["offload_inside"])
    assert list(get_model_state_dict(wrapped)) == list(get_model_state_dict(plain))
    run_step(wrapped)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (wrapped, plain)]
    optimizers[0].step()
    set_model_state_dict(plain, get_model_state_dict(wrapped))
    set_optimizer_state_dict(plain, optimizers[1], get_optimizer_state_dict(wrapped, optimizers[0]))
    assert_same([*plain.state_dict().values()], [*wrapped.state_dict().values()])
    momenta = [[o.state[p]["momentum_buffer"] for p in o.param_groups[0]["params"]] for o in optimizers]
    assert_same(*momenta)


def test_keys_that_name_the_wrapper_are_loaded_too() -> None:
    wrapped = checkpoint_wrapper(checkpoint_wrapper(nn.Linear(2, 2)))
    weight, bias = torch.randn(2, 2), torch.randn(2)
    prefix = "_checkpoint_wrapped_module."
    wrapped.load_state_dict({f"{prefix}weight": weight, f"{prefix}{prefix}bias": bias})
    assert torch.equal(wrapped.weight, weight) and torch.equal(wrapped.bias, bias)


def test_extra_state_goes_both_ways() -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 7}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.found = state

    plain, wrapped = Stateful(2, 2), checkpoint_wrapper(offload_wrapper(Stateful(2, 2)))
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    assert plain.found == wrapped.found == {"count": 7}


def test_versions_of_modules_are_kept_for_plain_and_wrapped_models() -> None:
    state = make_model(checkpoint_wrapper).state_dict()
    assert state._metadata["0.norm"] == {"version": 2}
    assert state._metadata["0._checkpoint_wrapped_module.norm"] == {"version": 2}


def test_names_of_parameters_and_buffers_are_keys_of_the_state_dict() -> None:
    wrapped = offload_wrapper(checkpoint_wrapper(Block()))
    names = [name for name, _ in [*wrapped.named_parameters(), *wrapped.named_buffers()]]
    assert sorted(names) == sorted(wrapped.state_dict())
    assert wrapped.get_parameter("linear.weight") is wrapped.linear.weight


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "budget"])
def test_wrapped_model_can_be_copied_and_pickled(name) -> None:
    expected = run_step(make_model())
    assert_same(run_step(copy.deepcopy(make_model(WRAPPERS[name]))), expected)
    assert_same(run_step(pickle.loads(pickle.dumps(make_model(WRAPPERS[name])))), expected)


# --- what is called and returned ---------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, *, x: torch.Tensor) -> Any:
        return self.make(self.linear(x).sin())


@each_modern_wrapper
@pytest.mark.parametrize(
    "make",
    [lambda y: (y, None, 3), lambda y: {"a": y, "b": [y * 2, "text"]}, lambda y: None, lambda y: y.detach()],
    ids=["tuple", "dict", "none", "no_grad"],
)
def test_any_result_and_keywords_only(wrap, make) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    torch.manual_seed(0)
    plain = Returns(make)
    wrapped = wrap(copy.deepcopy(plain))
    expected, result = plain(x=x), wrapped(x=x)
    leaves, spec = torch.utils._pytree.tree_flatten(result)
    expected_leaves, expected_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == expected_spec
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other
    grads = [g for g in leaves if isinstance(g, torch.Tensor) and g.requires_grad]
    assert len(grads) == len([g for g in expected_leaves if isinstance(g, torch.Tensor) and g.requires_grad])
    if grads:
        sum(g.sum() for g in grads).backward()
        assert wrapped.linear.weight.grad is not None


@each_wrapper
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients_nothing_is_kept(wrap, mode) -> None:
    with mode(), OpCounter() as counter:
        out = make_model(wrap).eval()(torch.randn(4, 8))
    assert not out.requires_grad and counter["sin.default"] == 2


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "budget"])  # compiled backward rounds otherwise
def test_autocast_is_what_it_was_in_forward(name) -> None:
    def step(model: nn.Module) -> list[torch.Tensor]:
        return run_step(model, torch.autocast("cpu", dtype=torch.bfloat16)(model.__call__))

    assert_same(step(make_model(WRAPPERS[name])), step(make_model()))


def test_hooks_of_wrapper_and_wrapped_module_run() -> None:
    seen: list[str] = []
    inner = nn.Linear(2, 2)
    inner.register_forward_hook(lambda *_: seen.append("inner"))
    wrapped = checkpoint_wrapper(inner, early_stop=False)
    wrapped.register_forward_hook(lambda *_: seen.append("wrapper"))
    wrapped(torch.randn(2, 2)).sum().backward()
    assert seen == ["inner", "wrapper", "inner"], "the wrapped module is called again, the wrapper is not"


def test_train_and_eval_reach_the_wrapped_module() -> None:
    wrapped = checkpoint_wrapper(Block())
    assert not wrapped.eval().dropout.training and wrapped.train().dropout.training


@each_modern_wrapper
def test_func_transforms_run_a_wrapper_as_plain_code(wrap) -> None:
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(4, 8)
    expected = torch.func.grad(lambda x: unwrap(copy.deepcopy(model))(x).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: model(x).sum())(x), expected)


# --- options -----------------------------------------------------------------------------------------------------


def test_unknown_keyword_is_refused_by_name() -> None:
    with pytest.raises(remat.OptionError, match=r"no option 'polcy'.*Did you mean 'policy'"):
        checkpoint_wrapper(nn.Linear(1, 1), polcy=None)


def test_reentrant_kind_takes_no_policy() -> None:
    wrapped = checkpoint_wrapper(
        nn.Linear(1, 1), checkpoint_impl=CheckpointImpl.REENTRANT, policy=remat.policies.save_all()
    )
    with pytest.raises(ValueError, match="Unexpected keyword arguments: policy"):
        wrapped(torch.ones(1, 1, requires_grad=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "tape"}, "offload='tape': expected 'cpu' or 'disk'"),
        ({"offload": "disk"}, 'offload="disk" needs a folder'),
        ({"offload_folder": "x"}, "offload_folder='x' goes with"),
    ],
)
def test_wrong_place_to_offload_to_is_refused(options, message) -> None:
    with pytest.raises(remat.OptionError, match=message):
        offload_wrapper(nn.Linear(1, 1), **options)


# --- whole models ------------------------------------------------------------------------------------------------


def wrapped_paths(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, ActivationWrapper)]


def policies_of_torch() -> dict[str, dict[str, Any]]:
    return {
        "check_fn": {"check_fn": lambda module: isinstance(module, nn.Linear)},
        "default": {},
        "always": {"auto_wrap_policy": always_wrap_policy},
        "classes": {"auto_wrap_policy": ModuleWrapPolicy({Block, nn.BatchNorm1d})},
        "large": {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=80)},
        "custom": {"auto_wrap_policy": CustomPolicy(lambda m: {"preserve_rng_state": False} if is_block(m) else False)},
        "first": {"check_fn": is_block, "auto_wrap_policy": ModuleWrapPolicy({nn.Dropout})},
    }


@pytest.mark.parametrize("name", policies_of_torch())
def test_same_modules_are_wrapped_as_by_torch(name) -> None:
    ours, theirs = (nn.ModuleDict({"a": make_model(), "b": Block()}) for _ in range(2))
    assert apply_activation_checkpointing(ours, **policies_of_torch()[name]) is None
    torch_wrappers.apply_activation_checkpointing(theirs, **policies_of_torch()[name])
    expected = [n for n, m in theirs.named_modules() if isinstance(m, torch_wrappers.ActivationWrapper)]
    assert wrapped_paths(ours) == expected and expected


def test_keywords_of_a_custom_policy_reach_the_wrapper() -> None:
    model = make_model()
    policy = CustomPolicy(lambda module: {"preserve_rng_state": False} if is_block(module) else False)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    assert model[0].checkpoint_fn.region.preserve_rng_state is False


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected 3 to be callable or be a pre-defined wrap policy"):
        apply_activation_checkpointing(make_model(), auto_wrap_policy=3)  # type: ignore[arg-type]


def test_shared_module_is_wrapped_once_in_all_its_places() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        shared = Block()
        return nn.Sequential(shared, nn.Sequential(shared), shared)

    model = make()
    apply_activation_checkpointing(model, check_fn=is_block)
    assert isinstance(model[0], CheckpointWrapper)
    assert model[0] is model[2] is model[1][0]
    assert_same(run_step(model), run_step(make()))
    unwrap(model)
    assert isinstance(model[0], Block) and model[0] is model[2] is model[1][0]


def test_wrapping_twice_is_safe() -> None:
    model = make_model(checkpoint_wrapper)
    apply_activation_checkpointing(model, offload_wrapper, is_block)
    apply_activation_checkpointing(model, checkpoint_wrapper, lambda m: isinstance(m, OffloadWrapper))
    assert_same(run_step(model), run_step(make_model()))
    assert list(model.state_dict()) == list(make_model().state_dict())


@each_wrapper
def test_unwrapped_model_is_the_plain_one(wrap) -> None:
    model = wrap(make_model(wrap))
    plain = unwrap(model)
    assert isinstance(plain, nn.Sequential) and wrapped_paths(plain) == []
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in make_model().named_modules()]
    assert_same(run_step(plain), run_step(make_model()))


def test_import_brings_no_compiler_and_no_distributed_wrappers() -> None:
    code = (
        "import sys, remat.wrappers\n"
        "found = [m for m in ('torch._dynamo', 'torch.distributed.fsdp') if m in sys.modules]\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
