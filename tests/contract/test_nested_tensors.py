"""Jagged tensors, one of whose sizes is no number: the same bits in every engine, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat

pytestmark = [
    # torch's own: these tensors are a prototype, and caches do not know their like.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:NestedTensor does not implement _stable_hash_for_caching:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:graph break in region:UserWarning"),
]

WIDTH = 8
BATCHES = [(3, 1, 6), (2, 5, 4), (4, 4, 4, 1)]


def jagged(lengths: tuple[int, ...]) -> torch.Tensor:
    parts = [torch.randn(length, WIDTH) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def normalised(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(linear(x), (WIDTH,)).sigmoid() + x


def softmax_over_the_ragged_dimension(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(linear(x), 1) * x.sin()


def attention(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    heads = linear(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)


def unmarked(function: Any) -> Any:
    """Stand for `checkpoint_region` where there is to be no region."""
    return function


def results(program: Any, mark: Any, compiler: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Train a step per batch; return outputs and gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear, found = nn.Linear(WIDTH, WIDTH), []
    region = mark(lambda x: program(linear, x))
    run = compiler(lambda x: region(x.sin()).values())
    for lengths in BATCHES:
        x = jagged(lengths)
        out = run(x)
        out.square().sum().backward()
        assert x.grad is not None and linear.weight.grad is not None
        found += [out.detach(), x.grad.values(), linear.weight.grad.clone()]
    return found


def with_remat(**options: Any) -> Callable[[Any], Any]:
    return lambda run: torch.compile(run, backend="remat", options={"inner": "aot_eager", **options})


WAYS: dict[str, tuple[Any, Any]] = {
    "compiled": (unmarked, with_remat()),
    "compiled_region": (remat.checkpoint_region, with_remat()),
    "compiled_budget": (unmarked, with_remat(memory_budget=1.0)),
    "eager_region": (remat.checkpoint_region, lambda run: run),
    "eager_policy": (remat.checkpoint_region(policy=remat.policies.save_matmuls()), lambda run: run),
    "eager_budget": (remat.checkpoint_region(memory_budget=1.0), lambda run: run),
    "inductor": (unmarked, lambda run: torch.compile(run, backend="remat")),
}


def cases() -> list[Any]:
    programs = (normalised, softmax_over_the_ragged_dimension, attention)
    # On a CPU torch computes this attention by ops that no graph can hold.
    pairs = [(p, way) for p in programs for way in WAYS if (p, way) != (attention, "eager_budget")]
    marks = {way: [pytest.mark.slow] if way == "inductor" else [] for way in WAYS}
    return [pytest.param(p, way, id=f"{p.__name__}-{way}", marks=marks[way]) for p, way in pairs]


@pytest.mark.parametrize(("program", "way"), cases())
def test_outputs_and_gradients_are_those_of_plain_eager(program: Any, way: str) -> None:
    found, expected = results(program, *WAYS[way]), results(program, unmarked, lambda run: run)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if way == "inductor" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, expected, **tolerance)


def test_a_report_of_a_jagged_program(tmp_path: Any) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    report = remat.explain(
        lambda x: normalised(linear, x).values(), jagged(BATCHES[0]), memory_budget=1.0, inner="aot_eager"
    )
    report.save(str(tmp_path / "report.html"))
    assert report.plans[0].saved
    assert remat.Plan.from_json(report.plans[0].to_json()) == report.plans[0]


@pytest.mark.parametrize("program", [attention, lambda linear, x: torch.cat(linear(x).unbind())], ids=["op", "guard"])
def test_what_a_budget_cannot_be_planned_for_is_named(program: Any) -> None:
    region = remat.checkpoint_region(memory_budget=0.9, name="jagged")(program)
    reason = (
        "unsupported operator: aten._nested_tensor_from_tensor_list.default"
        if program is attention
        else "Could not guard on"
    )
    with pytest.raises(remat.RematError, match=f"region jagged has memory_budget=0.9.*{reason}"):
        region(nn.Linear(WIDTH, WIDTH), jagged(BATCHES[0]))
