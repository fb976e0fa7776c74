"""What a kernel and a loop both read is in memory once under a budget, so that its parts need not live on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.joints import rewritten
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat.passes import pipeline as partition
from remat.passes.inductor import order
from remat.passes.inductor.rewrites import write_once
from remat.passes.torch_private import REALIZE_TAG
from remat.report.observed.counting import activation_peak


def written(function: Any, *args: torch.Tensor) -> list[str]:
    graph = make_fx(function)(*args).graph
    rewritten(write_once, graph)
    return [str(node.target) for node in graph.nodes if node.meta.get(REALIZE_TAG)]


def test_result_read_by_a_kernel_through_a_view_and_by_a_loop_is_written() -> None:
    x = torch.randn(2, 4, 4)
    both = written(lambda x: x.sin().view(8, 4).mm(x[0]).sum() + x.sin().exp().sum(), x)
    assert both == [], "two results, each with one reader"

    def shared(x: torch.Tensor) -> Any:
        y = x.sin()
        return y.view(8, 4).mm(x[0]), y.exp()

    assert written(shared, x) == ["aten.sin.default"]
    assert written(lambda x: (x.sin().view(8, 4).mm(x[0]), x), x) == []


class SharedBias(nn.Module):
    """Attention whose bias is learned once for all layers: its gradient is a sum over them."""

    def __init__(self, num_layers: int, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(num_layers)])
        self.bias = nn.Parameter(torch.randn(length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
            x = x + ((h @ h.mT + self.bias).softmax(-1) @ h).transpose(1, 2).flatten(2)
        return x.pow(2).sum()


def measured_peak(model: nn.Module, x: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    torch._dynamo.reset()
    options = {"inner": "inductor", "memory_budget": 1024, "on_infeasible": "minimum"}
    compiled = torch.compile(model, backend="remat", options=options)
    parameters = list(model.parameters())
    model.zero_grad()
    compiled(x).backward()
    gradients = [p.grad.clone() for p in parameters]
    return activation_peak(lambda: compiled(x), parameters, counter="allocator").activation_bytes, gradients


@pytest.mark.filterwarnings("ignore:memory_budget=")
def test_gradient_summed_over_layers_takes_less_memory_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # What else keeps kernels where they are would help here, too.
    monkeypatch.setattr(order, "_reduces_before", lambda slot, nodes: False)
    monkeypatch.setattr(order, "_is_read_before", lambda slot, nodes: False)
    torch.manual_seed(0)
    model, x = SharedBias(5, 128).double(), torch.randn(2, 128, 16, dtype=torch.float64)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    peak, gradients = measured_peak(model, x)
    torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(partition, "write_once", lambda halves: halves)
    more, gradients = measured_peak(model, x)
    torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-6)
    assert peak <= 0.8 * more, (peak, more)
