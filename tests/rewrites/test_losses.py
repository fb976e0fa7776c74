"""Memory that kernels take beyond their results: it is counted, and a loss does not hold it through backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.joints import capture
from torch import nn

import remat
from remat.passes.pipeline import run
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Roofline
from remat.passes.shared.executor import Executor
from remat.report.observed.counting import activation_peak

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES = [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss, F.l1_loss, F.huber_loss]


def assert_same_bits_at_the_predicted_peak(
    make: Callable[[], tuple[Callable[[], torch.Tensor], list[nn.Parameter]]], budget: Any
) -> None:
    """The same bits as without remat, and the predicted peak."""

    def gradients(**how: Any) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor], list[nn.Parameter]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        step, parameters = make()
        compiled = torch.compile(step, fullgraph=True, **how)
        loss = compiled()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in parameters)], compiled, parameters

    expected, *_ = gradients(backend="aot_eager")
    options = {"inner": "aot_eager", "memory_budget": budget, "on_infeasible": "minimum"}
    found, step, parameters = gradients(backend="remat", options=options)
    assert all(map(torch.equal, found, expected))
    measured = activation_peak(step, parameters, counter="dispatch").activation_bytes
    plan = remat.explain(step, inner="aot_eager", memory_budget=budget, on_infeasible="minimum").plans[0]
    assert measured - plan.peak.num_bytes in (0, 4), "backward() starts with a one of its own"


@pytest.mark.filterwarnings("ignore:memory_budget=")
@pytest.mark.parametrize("budget", [None, 0.6])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_keeps_more_alive_than_a_number(loss: Any, reduction: str, budget: float | None) -> None:
    def make() -> tuple[Callable[[], torch.Tensor], list[nn.Parameter]]:
        layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid()) for _ in range(3)]
        model, x, target = nn.Sequential(*layers), torch.randn(64, 32), torch.rand(64, 32)
        return lambda: loss(model(x), target, reduction=reduction), list(model.parameters())

    assert_same_bits_at_the_predicted_peak(make, budget)


def test_loss_of_each_element_is_left_alone() -> None:
    joint = capture(lambda x, w: F.mse_loss(x @ w, x, reduction="none").sum(), *_matrices())
    halves = run(
        joint.module, Request(Roofline(), executor=Executor(overwrites=True)), num_fwd_outputs=joint.num_fwd_outputs
    )
    assert torch.ops.aten.clone.default not in [node.target for node in halves.forward.graph.nodes]


def _matrices() -> list[torch.Tensor]:
    return [torch.randn(16, 16, requires_grad=True) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:memory_budget=")
@pytest.mark.parametrize("budget", [None, 0.8, 0.5])
def test_memory_of_assignments_to_slices_is_counted(budget: float | None) -> None:
    """Copies of a slice are as large as what it is a slice of, kernel by kernel."""

    def make() -> tuple[Callable[[], torch.Tensor], list[nn.Parameter]]:
        layers, x = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)]), torch.randn(64, 32)

        def step() -> torch.Tensor:
            h = x
            for layer in layers:
                y = layer(h).sigmoid() + 0
                y[:, :4] += 1
                y[:, ::2].sin_()
                y.t()[3].add_(2.0)
                h = h + F.silu(y)
            return h.square().mean()

        return step, list(layers.parameters())

    assert_same_bits_at_the_predicted_peak(make, budget)


@pytest.mark.filterwarnings("ignore:memory_budget=")
@pytest.mark.parametrize("budget", [None, 0.8, 1024])
def test_nothing_is_written_over_views_that_say_they_are_none(budget: Any) -> None:
    """`unsafe_chunk` returns parts of its input's memory; recurrent cells are made of it."""

    def make() -> tuple[Callable[[], torch.Tensor], list[nn.Parameter]]:
        layer, cell = nn.Linear(16, 16), nn.GRUCell(16, 16)
        x = torch.randn(64, 16)

        def step() -> torch.Tensor:
            y = layer(x).sin()
            a, b = torch.unsafe_chunk(y, 2, 0)
            parts = a.sigmoid().exp() * b.tanh()  # `a` is not read later, what it is a part of is
            h = cell(y, y)
            return (y * y.detach().cos()).sum() + parts.sum() + cell(h, y).square().sum()

        return step, [*layer.parameters(), *cell.parameters()]

    assert_same_bits_at_the_predicted_peak(make, budget)


class Normed(nn.Module):
    """Batch norm over a transposed input: its kernel lays out the result in another way than tracing says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.norm(x.mT).mT
        return y + F.dropout(self.layer(y).tanh(), 0.3)  # a product views `y` as rows, which lie so if it lies like `x`


@pytest.mark.filterwarnings("ignore:memory_budget=")
@pytest.mark.parametrize("budget", [None, 0.9, 1024])
def test_nothing_is_written_over_what_lies_in_memory_in_another_way_than_traced(budget: Any) -> None:
    def make() -> tuple[Callable[[], torch.Tensor], list[nn.Parameter]]:
        model, x = nn.Sequential(Normed(), Normed()), torch.randn(4, 12, 32)
        return lambda: model(x).square().mean(), list(model.parameters())

    assert_same_bits_at_the_predicted_peak(make, budget)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_region_with_a_budget_returns_what_lies_in_memory_as_eagers_result_does() -> None:
    """What lies in another order has its numbers drawn in another order by the dropout that comes next."""

    def step(**how: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(Normed(), Normed()), torch.randn(4, 12, 32)
        if how:
            remat.apply(model, "*", **how)
        out = model(x)
        out.square().mean().backward()
        assert out.is_contiguous()
        return [out.detach(), torch.rand(2), *(p.grad for p in model.parameters()), *model.buffers()]

    assert all(map(torch.equal, step(memory_budget=1.0), step()))


@pytest.mark.parametrize("budget", [None, 0.8, "1MiB"])
def test_batch_without_rows_is_planned_for(budget: Any) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32))
    compiled = torch.compile(model, backend="remat", options={"inner": "aot_eager", "memory_budget": budget})
    compiled(torch.randn(0, 32)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
