"""The simulated peak against what steps run for real hold in memory."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import measure
from support.tuned import search_less
from torch import nn

import remat.passes.pipeline
from remat.passes.plans.plan import Plan

RNG_STATE_BYTES = torch.get_rng_state().nbytes
SCALARS_BYTES = 64
"""What single numbers may add: the gradient that backward starts from, and counters."""

Loss = Callable[[], torch.Tensor]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are made, in order."""
    made: list[Plan] = []
    choose = remat.passes.pipeline.choose_plan

    def record(*args: Any, **kwargs: Any) -> Any:
        chosen = choose(*args, **kwargs)
        made.append(chosen.plan)
        return chosen

    monkeypatch.setattr(remat.passes.pipeline, "choose_plan", record)
    # What is tested is whether plans keep what they promise, not how good they are.
    search_less(monkeypatch, 10_000)
    return made


def measured(loss: Loss, parameters: list[nn.Parameter], budget: float | None) -> int:
    options = {"inner": "aot_eager", "memory_budget": budget, "on_infeasible": "minimum"}
    compiled = torch.compile(loss, backend="remat", options=options, fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "memory_budget", UserWarning)
        return measure.activation_peak(compiled, parameters, counter="dispatch").activation_bytes


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-0.1, 0.1, torch.Size(shape).numel()).view(shape))


def layers() -> tuple[Loss, list[nn.Parameter]]:
    """A chain of products."""
    x, weights = torch.ones(64, 32), [weight(32, 32) for _ in range(6)]

    def loss() -> torch.Tensor:
        h = x
        for w in weights:
            h = torch.tanh(h @ w)
        return h.sum()

    return loss, weights


def views() -> tuple[Loss, list[nn.Parameter]]:
    """Transposed, reshaped and cut views of activations."""
    x, a, b = torch.ones(48, 32), weight(32, 64), weight(48, 16)

    def loss() -> torch.Tensor:
        h = (x @ a).exp()
        left, right = h.view(48, 2, 32).unbind(1)
        mixed = (left * right).t().sin() @ b
        return (mixed.reshape(-1)[:100].exp() * 2.0).sum() + h.t()[3:5].sum()

    return loss, [a, b]


def parts() -> tuple[Loss, list[nn.Parameter]]:
    """Ops that return several tensors."""
    x, a, scale, shift = torch.linspace(0, 1, 64 * 32).view(64, 32), weight(32, 48), weight(48), weight(48)

    def loss() -> torch.Tensor:
        h = nn.functional.layer_norm(x @ a, (48,), scale, shift)
        values, _ = h.tanh().max(dim=1)
        spread, mean = torch.var_mean(h.exp(), dim=1)
        return (values * spread * mean).sum()

    return loss, [a, scale, shift]


def in_place() -> tuple[Loss, list[nn.Parameter]]:
    """Writes to activations and to a buffer."""
    x, a, b = torch.ones(64, 32), weight(32, 48), weight(48, 16)
    seen = torch.zeros(48)

    def loss() -> torch.Tensor:
        h = (x @ a).sin()
        h.mul_(2.0).add_(1.0)
        with torch.no_grad():
            seen.add_(h.sum(0))
        return ((h.tanh() @ b).exp()).sum()

    return loss, [a, b]


def dropout() -> tuple[Loss, list[nn.Parameter]]:
    """Random masks, which are drawn again."""
    x, weights = torch.ones(64, 32), [weight(32, 32) for _ in range(4)]

    def loss() -> torch.Tensor:
        h = x
        for w in weights:
            h = nn.functional.dropout((h @ w).tanh(), 0.5)
        return h.sum()

    return loss, weights


def batch_norm() -> tuple[Loss, list[nn.Parameter]]:
    """Statistics that move, and convolutions."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU()
    )
    x = torch.linspace(0, 1, 2 * 3 * 12 * 12).view(2, 3, 12, 12)
    return lambda: model(x).square().sum(), list(model.parameters())


def shared_input() -> tuple[Loss, list[nn.Parameter]]:
    """One input and one weight that many ops read."""
    x, a = torch.ones(64, 32), weight(32, 32)

    def loss() -> torch.Tensor:
        h = x @ a
        for _ in range(3):
            h = (h @ a).sin() * (x @ a).exp() + x
        return h.sum()

    return loss, [a]


PROGRAMS = (layers, views, parts, in_place, dropout, batch_norm, shared_input)


def random_program(seed: int) -> tuple[Loss, list[nn.Parameter]]:
    """Ops drawn at random, on whatever is there."""
    rng = random.Random(seed)
    rows, width = 32, 24
    weights = [weight(width, width) for _ in range(4)]
    x = torch.linspace(-1, 1, rows * width).view(rows, width)
    picks = [(rng.random(), rng.random(), rng.randrange(6)) for _ in range(8)]

    def loss() -> torch.Tensor:
        live = [x @ weights[0]]
        for first, second, op in picks:
            a, b = live[int(first * len(live))], live[int(second * len(live))]
            live.append(_OPS[op](a, b, weights[op % 4]))
        return torch.cat(live, 1).square().sum()

    return loss, weights


_OPS: tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b, w: a.tanh(),
    lambda a, b, w: a @ w,
    lambda a, b, w: a * b,
    lambda a, b, w: (a + b).sin(),
    lambda a, b, w: nn.functional.gelu(a @ w),
    lambda a, b, w: torch.cat([a[:, :12], b[:, 12:]], 1),
    lambda a, b, w: a.view(-1, 8).softmax(1).view_as(a),
    lambda a, b, w: (a @ b.t()) @ a,
)


def allowed_bytes(plan: Plan) -> int:
    """What the simulator leaves out on purpose: generator states, single numbers."""
    return SCALARS_BYTES + RNG_STATE_BYTES * sum("dropout" in d.op or "bernoulli" in d.op for d in plan.decisions)


def check(program: tuple[Loss, list[nn.Parameter]], budget: float | None, plans: list[Plan]) -> None:
    loss, parameters = program
    found = measured(loss, parameters, budget)
    plan = plans[-1]
    assert plan.peak is not None
    assert abs(found - plan.peak.num_bytes) <= allowed_bytes(plan), (found, plan.peak.num_bytes, plan.peak.node)


@pytest.mark.parametrize("budget", [None, 0.8, 0.5])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_predicted_peak_is_the_measured_one(program: Any, budget: float | None, plans: list[Plan]) -> None:
    check(program(), budget, plans)


@pytest.mark.parametrize("seed", range(6))
def test_predicted_peak_of_random_programs_is_the_measured_one(seed: int, plans: list[Plan]) -> None:
    for budget in (None, 0.7):
        torch._dynamo.reset()
        check(random_program(seed), budget, plans)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 100))
def test_predicted_peak_of_many_random_programs_is_the_measured_one(seed: int, plans: list[Plan]) -> None:
    for budget in (0.9, 0.7, 0.4):
        torch._dynamo.reset()
        check(random_program(seed), budget, plans)


def patches() -> tuple[Loss, list[nn.Parameter]]:
    """Patches of images, and a stream that several ops read and to which layers add."""
    images, filters, scale = torch.ones(8, 3, 32, 32), weight(48, 3, 4, 4), weight(48)
    weights = [(weight(48, 192), weight(192, 48)) for _ in range(5)]

    def loss() -> torch.Tensor:
        stream = torch.conv2d(images, filters, stride=4).flatten(2).transpose(1, 2)
        for up, down in weights:
            normal = nn.functional.layer_norm(stream, (48,), scale)
            stream = stream + nn.functional.gelu(normal @ up) @ down
        return stream.square().mean()

    return loss, [filters, scale, *(w for pair in weights for w in pair)]


def shared_bias() -> tuple[Loss, list[nn.Parameter]]:
    """Layers that add one bias to the products of two rows: its gradient is a sum of two terms per layer."""
    x, table, weights = torch.ones(2, 128, 8), weight(128, 128), [weight(8, 8) for _ in range(4)]

    def loss() -> torch.Tensor:
        stream, bias = x, table.sin()
        for w in weights:
            scores = (stream @ w) @ stream.transpose(1, 2) + bias
            stream = stream + scores.softmax(-1) @ stream
        return stream.square().mean()

    return loss, [table, *weights]


def normalized_images() -> tuple[Loss, list[nn.Parameter]]:
    """Residual blocks of convolutions: a normalized image is made of five buffers, two of them results of one op."""
    images = torch.linspace(-1, 1, 8 * 8 * 32 * 32).view(8, 8, 32, 32).sin()
    filters = [(weight(8, 8, 3, 3), weight(8), weight(8)) for _ in range(7)]

    def normal(h: torch.Tensor, kernel: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(torch.conv2d(h, kernel, padding=1), None, None, scale, shift, training=True)

    def loss() -> torch.Tensor:
        stream = normal(images, *filters[0]).relu()
        for first, second in zip(filters[1::2], filters[2::2], strict=True):
            stream = (stream + normal(normal(stream, *first).relu(), *second)).relu()
        return stream.square().mean()

    return loss, [p for group in filters for p in group]


def weighted_classes() -> tuple[Loss, list[nn.Parameter]]:
    """A loss whose gradient several loops read, and that is computed from four weights of rows and the tangent."""
    x, table = torch.linspace(-1, 1, 400 * 16).view(400, 16), weight(16, 500)
    rows = [torch.linspace(0.5, 1.5, 400).roll(k)[:, None] for k in range(4)]

    def loss() -> torch.Tensor:
        scores = (x @ table).log_softmax(-1)
        for row in rows:
            scores = scores * row
        return scores.sum()

    return loss, [table]


@pytest.mark.parametrize(
    ("program", "budget"),
    [
        (weighted_classes, 1.0),
        (patches, 1.0),
        (patches, 0.5),
        (shared_bias, 0.55),
        *[(normalized_images, b) for b in (0.9, 0.7, 0.5, 0.4)],
    ],
)
def test_predicted_peak_of_code_that_inductor_fuses_is_close(program: Any, budget: float, plans: list[Plan]) -> None:
    loss, parameters = program()
    compiled = torch.compile(loss, backend="remat", options={"memory_budget": budget}, fullgraph=True)
    compiled().backward()
    peak = measure.activation_peak(compiled, parameters, counter="allocator").activation_bytes
    assert plans[-1].peak.num_bytes == pytest.approx(peak, rel=0.05)
