"""What may be saved and recomputed, with the reason that is given where it may not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.joints import capture, named
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from remat.passes.graph.constraints import Constraint, Reason
from remat.passes.pipeline import run
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Callback
from remat.passes.shared.errors import InfeasibleCut


def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad)


def constraint_of(function: object, op: str, *args: torch.Tensor, which: int = 0) -> Constraint:
    graph, constraints = capture(function, *args).constraints()
    found = constraints.of[named(graph, op, which)]
    assert found is not None
    return found


def test_plain_op_is_open() -> None:
    assert constraint_of(lambda x: x.exp().sum(), "exp", tensor(3)) == Constraint()


def test_top_k_is_not_recomputed() -> None:
    found = constraint_of(lambda x: x.topk(2).values.sum(), "topk", tensor(5))
    assert found.no_recompute is Reason.DISCRETE
    assert found.no_save is Reason.NOT_A_TENSOR


def test_random_op_may_be_recomputed_because_it_is_replayed() -> None:
    found = constraint_of(lambda x: (torch.rand_like(x) * x).sum(), "rand_like", tensor(5))
    assert found.no_recompute is None


def test_update_in_place_runs_once() -> None:
    buffer = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x + buffer).sin()
        buffer.add_(1)
        return y.sum()

    graph, constraints = capture(step, tensor(3)).constraints()
    update = constraints.of[named(graph, "copy_")]
    assert update is not None
    assert update.no_recompute is Reason.MUTATING
    overwritten = [graph.nodes[i].name for i in constraints.saved_by_copy if graph.nodes[i].op == "placeholder"]
    assert len(overwritten) == 1


def test_view_of_an_overwritten_input_is_saved_by_copy() -> None:
    buffer = torch.zeros(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x + buffer.view(2, 2)).sin()
        buffer.add_(1)
        return y.sum()

    graph, constraints = capture(step, tensor(2, 2)).constraints()
    assert named(graph, "view") in constraints.saved_by_copy


def test_size_that_depends_on_data_is_not_recomputed() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = constraint_of(lambda x: x[(x > 0).nonzero()[:, 0]].exp().sum(), "nonzero", tensor(5))
    assert found.no_recompute is Reason.DATA_DEPENDENT


def test_checkpointed_op_is_not_saved() -> None:
    found = constraint_of(lambda x: checkpoint(lambda y: y.exp().sin(), x, use_reentrant=False).sum(), "exp", tensor(3))
    assert found.no_save is Reason.POLICY_RECOMPUTE


def selective(policy: CheckpointPolicy) -> object:
    """A region that computes `exp(topk(x))` under one policy for every op."""

    def contexts() -> object:
        return create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: policy)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.topk(2).values.exp().sin()

    return lambda x: checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum()


def test_policy_that_saves_forbids_recomputation() -> None:
    assert constraint_of(selective(CheckpointPolicy.MUST_SAVE), "exp", tensor(5)).no_recompute is Reason.POLICY_SAVE


def test_discrete_choice_is_recomputed_only_if_the_policy_insists() -> None:
    insisting = constraint_of(selective(CheckpointPolicy.MUST_RECOMPUTE), "topk", tensor(5))
    preferring = constraint_of(selective(CheckpointPolicy.PREFER_RECOMPUTE), "topk", tensor(5))
    assert insisting.no_recompute is None
    assert preferring.no_recompute is Reason.DISCRETE


@torch.library.custom_op("remat_tests::write_once", mutates_args=("log",))
def write_once(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    log.add_(1)
    return x * 2


@write_once.register_fake
def _(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_contradiction_names_the_value_and_both_causes() -> None:
    log = torch.zeros(1)

    def contexts() -> object:
        return create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE)

    def body(x: torch.Tensor) -> torch.Tensor:
        return x * write_once(x.detach(), log)

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum()

    joint = capture(step, tensor(3))
    with pytest.raises(InfeasibleCut) as caught:
        run(joint.module, Request(Callback(function=lambda call: 0.0)), num_fwd_outputs=joint.num_fwd_outputs)
    text = str(caught.value)
    assert "is needed by backward but may be neither saved nor recomputed" in text
    assert f"  - not recomputed: {Reason.EFFECTFUL.value}" in text
    assert "  - not saved: " in text
    assert "test_constraints.py" in text
    assert "Let the policy save this op" in text


def test_dropout_mask_may_be_recomputed() -> None:
    found = constraint_of(lambda x: F.dropout(x, 0.5).sum(), "native_dropout", tensor(5))
    assert found.no_recompute is None
    assert found.no_save is Reason.NOT_A_TENSOR
