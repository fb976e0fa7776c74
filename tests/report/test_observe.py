"""`remat.observe`: one real step, counted, beside what was predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness import recompute_is_free, recompute_is_ruinous
from support.reported import Plain, Stack
from torch import nn

import remat
from remat.report.observed.counting import MemoryEvent, MemoryLog, activation_peak, alive_at_peak


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="remat", options={"inner": "aot_eager", **options})


@pytest.mark.parametrize("cost_model", [recompute_is_free, recompute_is_ruinous])
def test_measured_peak_of_a_graph_run_node_by_node_is_the_predicted_one(cost_model: Any) -> None:
    seen = remat.observe(compiled(Plain(depth=4), cost_model=cost_model), torch.randn(64, 32))
    assert seen.counter == "dispatch"
    assert seen.predicted_bytes is not None
    assert seen.measured.activation_bytes == pytest.approx(seen.predicted_bytes, rel=0.05)
    assert sum(value.num_bytes for value in seen.alive) == seen.measured.activation_bytes


def test_values_alive_at_the_peak_have_names_and_lines() -> None:
    model = compiled(Plain(depth=4), cost_model=recompute_is_ruinous)
    seen = remat.observe(model, torch.randn(64, 32))
    largest = seen.alive[0]
    assert largest.node
    assert "reported.py:" in largest.source
    assert "aten." in largest.op
    assert "predicted peak" in str(seen)


def test_values_of_compiled_regions_have_region_and_name() -> None:
    seen = remat.observe(compiled(Stack(num_blocks=2)), torch.randn(2, 16, 64))
    assert any(value.label == "attn_out" and value.region.startswith("block") for value in seen.alive)
    assert any(value.is_recomputed for value in seen.alive)


def test_values_of_eager_regions_have_region_and_name() -> None:
    seen = remat.observe(Stack(num_blocks=2), torch.randn(2, 16, 64))
    assert seen.plans == ()
    assert seen.predicted_bytes is None
    assert "give report= to compare" in str(seen)
    assert any(value.label == "attn_out" for value in seen.alive)
    assert any(value.is_recomputed and value.region.startswith("block") for value in seen.alive)


def test_inductor_is_measured_by_the_allocator() -> None:
    step = torch.compile(Plain(depth=4), backend="remat")
    seen = remat.observe(step, torch.randn(256, 32))
    assert seen.counter == "allocator"
    assert seen.predicted_bytes is not None
    assert seen.measured.activation_bytes == pytest.approx(seen.predicted_bytes, rel=0.25)


def test_values_that_inductor_allocates_have_the_names_of_its_code() -> None:
    model, x = Stack(num_blocks=2), torch.randn(2, 16, 64)
    step = torch.compile(model, backend="remat")
    seen = remat.observe(step, x)
    assert any(value.label == "attn_out" and value.region.startswith("block") for value in seen.alive)
    assert all(value.node for value in seen.alive)
    assert all(value.op for value in seen.alive if value.node.startswith("buf") and value.num_bytes > 64)
    # Following the generated code must not keep its buffers alive.
    unfollowed = activation_peak(lambda: step(x), model.parameters(), counter="allocator")
    assert seen.measured.activation_bytes == unfollowed.activation_bytes


def test_report_stands_in_for_a_step_that_was_compiled_before() -> None:
    model, x = Plain(depth=4), torch.randn(64, 32)
    step = compiled(model)
    step(x).backward()
    report = remat.explain(model, x, inner="aot_eager")
    assert remat.observe(step, x).predicted_bytes is None
    assert remat.observe(step, x, report=report).predicted_bytes == report.plans[0].peak.num_bytes


def test_gradients_that_were_there_are_put_back() -> None:
    model = Plain()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    seen = remat.observe(model, torch.randn(4, 32))
    assert all(bool((p.grad == 7.0).all()) for p in model.parameters() if p.grad is not None)
    assert seen.measured.gradient_bytes == sum(p.nbytes for p in model.parameters())


def test_step_must_return_its_loss() -> None:
    with pytest.raises(remat.OptionError, match=r"a tensor of shape \(4, 32\); it must return the loss"):
        remat.observe(nn.Linear(32, 32), torch.randn(4, 32))
    with pytest.raises(remat.OptionError, match="returned NoneType"):
        remat.observe(lambda: None)


def test_alive_at_peak_is_what_hand_counting_gives() -> None:
    events = (MemoryEvent(1, 100), MemoryEvent(2, 50), MemoryEvent(1, -100), MemoryEvent(3, 60), MemoryEvent(4, 10))
    log = MemoryLog(events, backward_start=3, gradient_bytes={4: 10})
    assert alive_at_peak(log) == {1: 100, 2: 50}
