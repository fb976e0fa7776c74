"""`remat.compat` offers what `torch.utils.checkpoint` offers, under the same names and signatures."""

from __future__ import annotations

import enum
import inspect
import warnings

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from remat import compat


@pytest.mark.parametrize("name", torch_checkpoint.__all__)
def test_every_public_name_of_torch_is_there(name):
    assert name in compat.__all__
    assert hasattr(compat, name)


@pytest.mark.parametrize(
    "name", [n for n in torch_checkpoint.__all__ if inspect.isfunction(getattr(torch_checkpoint, n))]
)
def test_functions_take_the_same_parameters(name):
    theirs = inspect.signature(getattr(torch_checkpoint, name)).parameters
    ours = inspect.signature(getattr(compat, name)).parameters

    def shape(parameters):
        defaults = {n: p.default for n, p in parameters.items()}
        defaults.pop("context_fn", None)  # each module's own do-nothing function
        return [(n, p.kind) for n, p in parameters.items()], defaults

    assert shape(ours) == shape(theirs)


def test_nothing_but_the_policy_enum_is_torchs_own():
    shared = [n for n in compat.__all__ if getattr(compat, n) is getattr(torch_checkpoint, n)]
    assert shared == ["CheckpointPolicy"]
    assert issubclass(compat.CheckpointPolicy, enum.Enum)


def test_ignored_ops_are_those_of_torch():
    assert torch_checkpoint.SAC_IGNORED_OPS == compat.SAC_IGNORED_OPS


def test_checkpoint_error_is_a_runtime_error():
    assert issubclass(compat.CheckpointError, RuntimeError)


@pytest.mark.parametrize("function", ["checkpoint", "checkpoint_sequential"])
def test_leaving_use_reentrant_out_warns(function):
    x = torch.randn(3, requires_grad=True)
    args = (torch.sin, x) if function == "checkpoint" else ([nn.Linear(3, 3), nn.Linear(3, 3)], 2, x)
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        getattr(compat, function)(*args)


def test_passing_use_reentrant_does_not_warn():
    x = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("options", [{"context_fn": lambda: None}, {"debug": True}])
def test_reentrant_variant_rejects_options_of_the_other(options):
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        compat.checkpoint(torch.sin, torch.ones(1), use_reentrant=True, **options)


def test_reentrant_variant_rejects_keyword_arguments_by_name():
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        compat.checkpoint(torch.sin, torch.ones(1), use_reentrant=True, scale=2)


def test_debug_rejects_a_context_function():
    context_fn = lambda: compat.noop_context_fn()  # noqa: E731
    with pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"):
        compat.checkpoint(torch.sin, torch.ones(1), use_reentrant=False, debug=True, context_fn=context_fn)


def test_unknown_determinism_check_is_rejected_with_the_known_ones():
    with pytest.raises(ValueError, match=r"should be one of \['default', 'none'.*but got wrong"):
        compat.checkpoint(torch.sin, torch.ones(1), use_reentrant=False, determinism_check="wrong")


def test_default_device_type_is_the_accelerator_or_the_cpu_and_can_be_set(monkeypatch):
    monkeypatch.setattr(compat.DefaultDeviceType, "_default_device_type", None)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert compat.DefaultDeviceType.get_device_type() == (accelerator.type if accelerator else "cpu")
    compat.DefaultDeviceType.set_device_type("meta")
    assert compat.DefaultDeviceType.get_device_type() == "meta"


def test_device_states_of_cpu_and_meta_tensors_are_empty():
    assert compat.get_device_states(torch.ones(1), {"x": torch.ones(1, device="meta")}, 3) == ([], [])
    compat.set_device_states([0], [torch.ones(1)], device_type="meta")


def test_detach_variable_cuts_history_and_keeps_the_wish_for_grad():
    x = torch.ones(2, requires_grad=True)
    detached, plain, other = compat.detach_variable((x * 2, torch.ones(1), "text"))
    assert detached.is_leaf
    assert detached.requires_grad
    assert not plain.requires_grad
    assert other == "text"
    with pytest.raises(RuntimeError, match=r"Only tuple of tensors is supported. Got Unsupported input type: list"):
        compat.detach_variable([x])


def test_check_backward_validity_warns_only_without_any_grad():
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        compat.check_backward_validity([torch.ones(1), 2])
    compat.check_backward_validity([torch.ones(1), torch.ones(1, requires_grad=True)])


@pytest.mark.parametrize(
    ("ops", "error", "match"),
    [
        ([2], ValueError, "Expected op in `op_list` to be an OpOverload"),
        ([torch.ops.aten.sin], ValueError, "update the OpOverloadPacket to a specific OpOverload"),
        (2, TypeError, "either a function or a list of ops."),
    ],
)
def test_selective_contexts_reject_what_is_no_policy(ops, error, match):
    with pytest.raises(error, match=match):
        compat.create_selective_checkpoint_contexts(ops)
