"""Gradients lie in memory like their parameters, so that nothing they were parts of waits for the end of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.joints import capture
from torch import nn

import remat
from remat.passes.pipeline import prepare
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Roofline
from remat.passes.rewrites.gradients import gradients_of, is_taken_over, lay_out_gradients, telling_intermediates
from remat.passes.shared.executor import Executor
from remat.report.observed.counting import activation_peak

Step = Callable[[], torch.Tensor]
aten = torch.ops.aten


def cat_columns() -> tuple[Step, list[nn.Parameter]]:
    """Three weights side by side: their gradients are columns of one."""
    weights = [nn.Parameter(torch.randn(48, 48) / 8) for _ in range(9)]
    x = torch.randn(48, 48)

    def step() -> torch.Tensor:
        h = x
        for k in range(0, 9, 3):
            q, key, v = (h @ torch.cat(weights[k : k + 3], 1)).chunk(3, 1)
            h = h + torch.sigmoid(q) * torch.tanh(key) * v
        return h.square().mean()

    return step, weights


def cat_rows_with_a_constant() -> tuple[Step, list[nn.Parameter]]:
    """A weight above something that needs no gradient: half of what is computed is of no use."""
    weights = [nn.Parameter(torch.randn(24, 48) / 8) for _ in range(4)]
    x, fixed = torch.randn(48, 48), torch.randn(24, 48)

    def step() -> torch.Tensor:
        h = x
        for weight in weights:
            h = h + (h @ torch.cat([weight, fixed], 0)).tanh()
        return h.square().mean()

    return step, weights


def turned_by_einsum() -> tuple[Step, list[nn.Parameter]]:
    """Weights whose gradients are computed with their dimensions in another order."""
    into = [nn.Parameter(torch.randn(4, 32, 8) / 5) for _ in range(4)]
    out = [nn.Parameter(torch.randn(32, 4, 8) / 5) for _ in range(4)]
    x = torch.randn(2, 16, 32)

    def step() -> torch.Tensor:
        h = x
        for w, o in zip(into, out, strict=True):
            q = torch.einsum("bsd,hde->bhse", h, w)
            y = torch.einsum("bhst,bhte->bshe", torch.einsum("bhse,bhte->bhst", q, q).softmax(-1), q)
            h = h + torch.einsum("bshe,dhe->bsd", y, o)
        return h.square().mean()

    return step, [*into, *out]


def channels_last() -> tuple[Step, list[nn.Parameter]]:
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(4)])
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 12, 12)
    return lambda: model(x).square().mean(), list(model.parameters())


PROGRAMS = [cat_columns, cat_rows_with_a_constant, turned_by_einsum, channels_last]


def gradients(make: Any, **how: Any) -> tuple[list[torch.Tensor], Step, list[nn.Parameter]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    step, parameters = make()
    compiled = torch.compile(step, fullgraph=True, **how)
    compiled().backward()
    return [p.grad.clone() for p in parameters], compiled, parameters


@pytest.mark.filterwarnings("ignore:memory_budget=")
@pytest.mark.parametrize("budget", [None, 0.5, 1024])
@pytest.mark.parametrize("make", PROGRAMS)
def test_peak_is_the_predicted_one_and_gradients_have_memory_of_their_own(make: Any, budget: Any) -> None:
    expected, *_ = gradients(make, backend="aot_eager")
    options = {"inner": "aot_eager", "memory_budget": budget, "on_infeasible": "minimum"}
    found, step, parameters = gradients(make, backend="remat", options=options)
    assert all(map(torch.equal, found, expected))
    for p in parameters:
        assert p.grad is not None
        assert p.grad.stride() == p.stride()
        assert p.grad.untyped_storage().nbytes() == p.grad.nbytes
    measured = activation_peak(step, parameters, counter="dispatch").activation_bytes
    plan = remat.explain(step, inner="aot_eager", memory_budget=budget, on_infeasible="minimum").plans[0]
    assert measured - plan.peak.num_bytes in (0, 4), "backward() starts with a one of its own"


@pytest.mark.parametrize("make", [cat_columns, turned_by_einsum])
def test_budget_holds_with_inductor(make: Any) -> None:
    expected, *_ = gradients(make, backend="inductor")
    plan = remat.explain(make()[0], memory_budget=0.6).plans[0]
    found, step, parameters = gradients(make, backend="remat", options={"memory_budget": 0.6})
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(found, expected, strict=True))
    assert plan.budget_bytes is not None
    assert activation_peak(step, parameters, counter="allocator").activation_bytes <= 1.02 * plan.budget_bytes


def copies_in(step: Step) -> list[str]:
    joint = capture(step)
    lay_out_gradients(joint.module, joint.num_fwd_outputs)
    joint.module.graph.lint()
    pairs = list(gradients_of(joint.module, joint.num_fwd_outputs))
    assert pairs
    assert all(is_taken_over(gradient, value) for gradient, value in pairs)
    return [node.name for node in joint.module.graph.nodes if node.name.endswith("_copy")]


def test_gradients_that_lie_as_they_should_are_not_copied() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    assert copies_in(lambda: model(x).square().mean()) == []


def test_slices_that_are_all_there_is_of_a_gradient_are_not_copied() -> None:
    weights, x = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)], torch.randn(4, 24)
    assert copies_in(lambda: (x @ torch.cat(weights, 0)).square().mean()) == []
    fixed = torch.randn(8, 8)
    assert len(copies_in(lambda: (x @ torch.cat([*weights[:2], fixed], 0)).square().mean())) == 2


def test_expanded_gradient_is_left_to_autograd_and_its_memory_counted() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    step = lambda: weight.sum()  # noqa: E731
    joint = capture(step)
    prepared = prepare(
        joint.module, Request(Roofline(), executor=Executor(overwrites=True)), num_fwd_outputs=joint.num_fwd_outputs
    )
    nodes = prepared.problem.graph.nodes
    assert not any(node.target is aten.clone.default for node in nodes)
    assert [nodes[i].target for i in prepared.storages.left_over] == [aten.expand.default]


def test_gradients_of_sizes_that_change_are_laid_out_too() -> None:
    weights = [nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.cat(weights, 1)).tanh().square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="remat", dynamic=True, options={"inner": "aot_eager", "memory_budget": 0.9})
    for rows in (5, 9, 33):
        x = torch.randn(rows, 16, requires_grad=True)
        found = torch.autograd.grad(compiled(x), [x, *weights])
        expected = torch.autograd.grad(loss(x), [x, *weights])
        assert all(map(torch.equal, found, expected))
        assert [g.stride() for g in found] == [(16, 1)] * 3


TURNED = torch.randn(65, 7, 129, generator=torch.Generator().manual_seed(0)).permute(1, 2, 0)


def turning(x: torch.Tensor) -> torch.Tensor:
    """Something whose gradient does not lie in memory like `x`."""
    return (TURNED * x).cos().square().sum()


ENGINES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "aot_eager": lambda f: torch.compile(f, backend="remat", options={"inner": "aot_eager"}),
    "aot_eager, budget": lambda f: torch.compile(
        f, backend="remat", options={"inner": "aot_eager", "memory_budget": 1.0}
    ),
    "eager region, budget": lambda f: remat.checkpoint_region(memory_budget=1.0)(f),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("engine", ENGINES)
def test_gradient_of_an_intermediate_is_handed_on_as_it_lies(engine: str) -> None:
    """The gradient of a bias is a sum over it, which is rounded in the order in which it lies in memory."""
    layer, x = nn.Linear(33, 65), torch.randn(7, 129, 33)

    def gradients(f: Callable[..., Any]) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        strides: list[tuple[int, ...]] = []
        hidden = layer(x)
        hidden.register_hook(lambda gradient: strides.append(gradient.stride()))
        return list(torch.autograd.grad(f(hidden), layer.parameters())), strides

    expected, expected_strides = gradients(torch.compile(turning, backend="aot_eager"))
    found, strides = gradients(ENGINES[engine](turning))
    assert all(map(torch.equal, found, expected))
    assert strides == expected_strides == [(129, 1, 903)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_memory_that_a_part_of_it_keeps_to_the_end_is_counted() -> None:
    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.ones(4, 60)], 1).tanh().square().sum()

    def waiting(function: Callable[..., Any], x: torch.Tensor) -> list[Any]:
        joint = capture(function, x)
        telling_intermediates(lambda joint, *_: (joint, joint), [x])(joint.module)
        prepared = prepare(joint.module, Request(Roofline()), num_fwd_outputs=joint.num_fwd_outputs)
        return [prepared.problem.graph.nodes[i].target for i in prepared.storages.left_over]

    leaf = torch.randn(4, 4, requires_grad=True)
    assert waiting(lambda x: x.sin().sum(), leaf) == waiting(lambda x: x.sin().sum(), leaf.exp()) == []
    assert waiting(part, leaf) == [], "which is copied"
    assert waiting(part, leaf.exp()) == [aten.slice.Tensor]
