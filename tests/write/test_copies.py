"""What waits for backward as a copy comes back with the strides it had: to the last bit, steps are those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import recompute_is_free
from torch import nn

import remat

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns left out": lambda x: x[:, ::2],
    "part": lambda x: x[:, :100].mT,
    "expanded": lambda x: x[:1].expand(65, -1),
}
ENGINES: dict[str, Callable[..., Any]] = {
    "eager": lambda f: f,
    "aot_eager": lambda f: torch.compile(f, backend="remat", options={"inner": "aot_eager"}),
    "aot_eager, budget": lambda f: torch.compile(
        f, backend="remat", options={"inner": "aot_eager", "memory_budget": 1.0}
    ),
}
every_engine = pytest.mark.parametrize("engine", ENGINES)


VIEWS = (torch.ops.aten.slice.Tensor, torch.ops.aten.transpose.int, torch.ops.aten.expand.default)


def offload_views(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> remat.CheckpointPolicy:
    """Ready-made policies leave views alone; this one does not."""
    policies = remat.CheckpointPolicy
    return policies.MUST_CPU_OFFLOAD if op in VIEWS else policies.PREFER_RECOMPUTE


def step(program: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[torch.Tensor]:
    torch._dynamo.reset()
    leaves = [a for a in args if a.requires_grad]
    out = program(*args)
    return [out.detach(), *torch.autograd.grad(out, leaves)]


@pytest.mark.parametrize("layout", ["columns left out", "part"])
def test_input_that_forward_overwrites_is_read_as_it_lay(layout: str) -> None:
    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x.sum() * 1e-3 + x + w)
        x.mul_(0.5)
        return y.square().sum()

    def inputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = LAYOUTS[layout](torch.randn(65, 258))
        return [x, torch.randn(x.shape, requires_grad=True)]

    expected = step(torch.compile(scaled, backend="aot_eager"), *inputs())
    options = {"inner": "aot_eager", "cost_model": recompute_is_free}
    assert all(map(torch.equal, step(torch.compile(scaled, backend="remat", options=options), *inputs()), expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("shape", [(65, 258), (65, 102)], ids=["large", "small"])
@every_engine
def test_offloaded_value_comes_back_as_it_lay(
    layout: str, place: str, shape: tuple[int, int], engine: str, tmp_path: Path
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        part = LAYOUTS[layout](x * 1.5)
        scale = part.sum() * 1e-3  # rounded in the order in which the part lies
        return nn.functional.dropout(x.exp() * scale, 0.3).square().sum()

    disk: dict[str, Any] = {"offload": "disk", "offload_folder": tmp_path} if place == "disk" else {}
    region = remat.checkpoint_region(policy=offload_views, **disk)(body)
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    expected = step(body if engine == "eager" else torch.compile(body, backend="aot_eager"), x)
    torch.manual_seed(0)
    assert torch.equal(torch.randn(shape), x)
    assert all(map(torch.equal, step(ENGINES[engine](region), x), expected))


@pytest.mark.parametrize("name", ["columns left out", "part"])
def test_buffer_that_a_region_changes_is_read_again_as_it_lay(name: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.register_buffer("state", LAYOUTS[name](torch.randn(65, 258)))
            self.weight = nn.Parameter(torch.randn(self.state.shape))

        def forward(self) -> torch.Tensor:
            y = torch.exp(self.state.sum() * 1e-3 + self.weight)
            self.state.mul_(0.5)
            return y.square().sum()

    def gradients(module: Any, model: nn.Module) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            found += torch.autograd.grad(module(), model.parameters())
        return found

    plain, marked = Scaled(), Scaled()
    expected = gradients(plain, plain)
    assert all(map(torch.equal, gradients(remat.checkpoint_region(marked), marked), expected))
