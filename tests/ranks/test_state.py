"""A model's state has the same names and values whether it is marked, sharded or compiled, in every direction."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support import rank_programs as programs
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

FULL = StateDictOptions(full_state_dict=True)
KINDS = ("plain", "marked", "sharded", "marked sharded", "marked sharded compiled", "marked compiled")


def build(kind, seed):
    """Make a model of one kind with weights of its own."""
    torch.manual_seed(seed)
    model = programs.Model(dropout=0.0)
    if "marked" in kind:
        programs.mark(model, "bare")
    if "sharded" in kind:
        programs.shard(model)
    if "compiled" in kind:
        model = torch.compile(model, backend="remat", options={"inner": "aot_eager"})
    return model


def outcome(model, x):
    """Run a step; return its output and whole gradients, by the names that users know."""
    model.zero_grad(set_to_none=True)
    out = model(x)
    out.sum().backward()
    gradients = {name.replace("_orig_mod.", ""): programs.whole(p.grad) for name, p in model.named_parameters()}
    return programs.whole(out), gradients


def round_trips():
    """Carry state from a model of every kind to one of every other."""
    x = torch.randn(4, programs.HIDDEN)
    reference = build("plain", 0)
    names = list(reference.state_dict())
    expected = outcome(reference, x)
    for source_kind in KINDS:
        source = build(source_kind, 0)
        state = get_model_state_dict(source, options=FULL)
        if dist.get_rank() == 0 or "sharded" not in source_kind:
            assert list(state) == names, source_kind
        shared = [state]
        dist.broadcast_object_list(shared)
        for target_kind in KINDS:
            target = build(target_kind, 1)
            set_model_state_dict(target, dict(shared[0]), options=FULL)  # which renames entries for compiled models
            if "compiled" in target_kind and source_kind != "marked sharded":
                continue  # the state is what counts; one step of each compiled kind is enough
            out, gradients = outcome(target, x)
            torch.testing.assert_close(out, expected[0])
            assert list(gradients) == list(expected[1])
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[1][name], msg=f"{source_kind} to {target_kind}: {name}")


def test_state_goes_from_every_kind_of_model_to_every_other(two_ranks):
    two_ranks.run(round_trips)


def saved_and_loaded(folder, source_kind, target_kind):
    """Write a checkpoint of shards with one kind of model, and read it with another."""
    source, target = build(source_kind, 0), build(target_kind, 1)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    outcome(source, torch.randn(4, programs.HIDDEN))
    optimizer.step()
    momenta = get_optimizer_state_dict(source, optimizer)["state"]
    assert set(momenta) == {name.replace("_orig_mod.", "") for name, _ in source.named_parameters()}
    checkpoint.save(get_model_state_dict(source), checkpoint_id=folder)
    state = get_model_state_dict(target)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(target, state)
    wholes = [
        {n.replace("_orig_mod.", ""): programs.whole(p) for n, p in m.named_parameters()} for m in (source, target)
    ]
    for name, value in wholes[0].items():
        assert torch.equal(wholes[1][name], value), name


@pytest.mark.parametrize(
    ("source", "target"),
    [("marked sharded", "plain"), ("plain", "marked sharded"), ("marked sharded compiled", "marked sharded")],
)
def test_a_checkpoint_of_one_kind_is_read_by_another(two_ranks, tmp_path, source, target):
    two_ranks.run(saved_and_loaded, str(tmp_path / "checkpoint"), source, target)
