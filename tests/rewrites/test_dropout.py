"""Dropout that is taken apart draws the same numbers, gives the same bits, and lets its mask be kept alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from support.joints import capture
from torch import nn
from torch.utils._pytree import tree_leaves

import remat
from remat.passes.ops.mask_op import bernoulli_like_op
from remat.passes.pipeline import run
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Roofline
from remat.passes.rewrites.dropout import take_dropout_apart
from remat.passes.shared.executor import Executor
from remat.report.observed.counting import activation_peak

aten = torch.ops.aten


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def taken_apart(function: Callable[..., Any], *args: Any) -> list[Any]:
    joint = capture(function, *args).module
    take_dropout_apart(joint)
    joint.graph.lint()
    return targets(joint.graph)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 5), (64, 1000)], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_give_the_bits_of_the_whole_and_leave_the_generator_where_it_was(
    shape: tuple[int, ...], rate: float, dtype: torch.dtype
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, rate, True).sum()

    x = torch.randn(shape, dtype=dtype)
    x[..., 0] = float("nan")

    def run(module: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        return [*tree_leaves(module([x], [torch.ones((), dtype=dtype)])), torch.get_rng_state()]

    joint = capture(step, x.clone().requires_grad_()).module
    whole = run(joint)
    take_dropout_apart(joint)
    assert aten.native_dropout.default not in targets(joint.graph)
    parts = run(joint)
    for expected, found in zip(whole, parts, strict=True):
        assert torch.equal(expected.nan_to_num(7.0), found.nan_to_num(7.0))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda x: x.transpose(1, 2),
    "reversed": lambda x: x.permute(2, 1, 0),
    "gaps": lambda x: x[:, ::2, 1:5],
    "expanded": lambda x: x[:1].expand(3, -1, -1),
    "expanded within": lambda x: x[:, :, :1].expand(-1, -1, 4).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_is_drawn_where_the_kernel_draws_it(layout: str) -> None:
    """Whatever tracing says of the input: the mask lies like the input that is there."""
    x = LAYOUTS[layout](torch.randn(4, 6, 8))
    torch.manual_seed(1)
    expected, expected_mask = aten.native_dropout.default(x, 0.3, True)
    torch.manual_seed(1)
    mask = bernoulli_like_op()(x, 1.0 - 0.3)
    found = x * mask * (1.0 / (1.0 - 0.3))
    assert torch.equal(mask, expected_mask)
    assert torch.equal(found, expected)
    assert mask.stride() == expected_mask.stride()
    assert found.stride() == expected.stride()
    assert torch.rand(1) == (torch.manual_seed(1), aten.native_dropout.default(x, 0.3, True), torch.rand(1))[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [None, 1024])
@pytest.mark.filterwarnings("ignore:memory_budget=")
def test_dropout_of_any_layout_has_the_bits_of_the_whole(layout: str, budget: int | None) -> None:
    x, w = torch.randn(4, 6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def step() -> torch.Tensor:
        return F.dropout(LAYOUTS[layout]((x @ w).sin()), 0.3).cos().sum()

    def gradients(**how: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        out = torch.compile(step, fullgraph=True, **how)()
        return [out.detach(), *torch.autograd.grad(out, [x, w]), torch.get_rng_state()]

    expected = gradients(backend="aot_eager")
    options = {"inner": "aot_eager", "memory_budget": budget, "on_infeasible": "minimum"}
    assert all(map(torch.equal, gradients(backend="remat", options=options), expected))


def test_kernels_that_do_something_else_stay_whole() -> None:
    def dropped(x: torch.Tensor, rate: float = 0.3) -> torch.Tensor:
        return torch.dropout(x, rate, True).sum()

    whole = aten.native_dropout.default
    x = torch.randn(6, 8, requires_grad=True)
    assert whole not in taken_apart(dropped, x)
    assert whole in taken_apart(dropped, torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True))
    assert whole in taken_apart(lambda x: dropped(x, 1.0), x)


def test_compilers_that_fuse_get_it_whole() -> None:
    joint = capture(lambda x, w: torch.dropout(x @ w, 0.3, True).sin().sum(), *_matrices())
    halves = run(
        joint.module, Request(Roofline(), executor=Executor(fuses=True)), num_fwd_outputs=joint.num_fwd_outputs
    )
    assert aten.native_dropout.default in targets(halves.forward.graph)


def _matrices() -> list[torch.Tensor]:
    return [torch.randn(32, 32, requires_grad=True) for _ in range(2)]


class Attention(nn.Module):
    """Probabilities with dropout: their mask is much smaller than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 96) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + F.dropout((q @ k.mT).softmax(-1), 0.2) @ v
        return x.square().mean()


@pytest.mark.parametrize("budget", [None, 0.7, 0.5])
def test_gradients_are_those_without_remat_and_masks_are_drawn_once(budget: float | None) -> None:
    model, x = Attention(), torch.randn(2, 200, 32)
    parameters = list(model.parameters())

    def gradients(**how: Any) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
        torch._dynamo.reset()
        compiled = torch.compile(model, **how)
        found = []
        for seed in (0, 1):
            model.zero_grad()
            torch.manual_seed(seed)
            compiled(x).backward()
            found += [*(p.grad.clone() for p in parameters), torch.get_rng_state()]
        return found, lambda: compiled(x)

    expected, _ = gradients(backend="aot_eager")
    options = {"inner": "aot_eager"} | ({} if budget is None else {"memory_budget": budget})
    found, step = gradients(backend="remat", options=options)
    assert all(map(torch.equal, found, expected))
    report = remat.explain(model, x, inner="aot_eager", memory_budget=budget)
    plan = report.plans[0]
    peak = activation_peak(step, parameters, counter="dispatch").activation_bytes
    assert peak - plan.peak.num_bytes in (0, 4), "backward() starts with a one of its own"
    drawn = [d for d in plan.decisions if d.op == "remat.bernoulli_like.default"]
    assert len(drawn) == 3
    assert all(not d.num_recomputes for d in drawn)


def test_policy_for_dropout_holds_for_its_parts() -> None:
    def must_recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> remat.CheckpointPolicy:
        return remat.CheckpointPolicy.MUST_RECOMPUTE

    @remat.checkpoint_region(policy=must_recompute)
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.dropout((x @ w).sin(), 0.3, True).cos()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return region(x, w).sum()

    plan = remat.explain(step, *_matrices(), inner="aot_eager").plans[0]
    parts = [d for d in plan.decisions if d.value.startswith("native_dropout")]
    assert parts
    assert all(d.num_recomputes == 1 and d.region for d in parts)
