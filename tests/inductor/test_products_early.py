"""A product of backward runs when the plan runs it, although its result is added to something that comes much later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from support.joints import rewritten
from torch import nn

from remat.passes import pipeline as partition
from remat.passes.inductor.rewrites import keep_products_early
from remat.passes.memory.moments import MOMENT_TAG, Moment
from remat.report.observed.counting import activation_peak

ATEN = torch.ops.aten


def summed(*slots: int) -> fx.Graph:
    """A product and a sine at the first two slots, and their sum at the third."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(ATEN.mm.default, (x, x))
    late = graph.call_function(ATEN.sin.default, (x,))
    total = graph.call_function(ATEN.add.Tensor, (product, late))
    graph.output(total)
    for node, slot in zip((product, late, total), slots, strict=True):
        node.meta[MOMENT_TAG] = Moment(0, slot)
    return graph


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


def test_loop_without_effect_separates_a_product_from_a_late_sum() -> None:
    graph = summed(1, 7, 7)
    rewritten(keep_products_early, graph)
    assert names(graph) == ["mm_default", "sin_default", "mm_default_apart", "add_tensor"]
    x = torch.randn(3, 3)
    assert torch.equal(fx.GraphModule(nn.Module(), graph)(x), x @ x + x.sin())


def test_product_and_sum_of_one_moment_are_left_alone() -> None:
    for slots in ((7, 1, 7), (7, 7, 7)):
        graph = summed(*slots)
        rewritten(keep_products_early, graph)
        assert names(graph) == ["mm_default", "sin_default", "add_tensor"]


class Tied(nn.Module):
    """A language model with one matrix for words in and words out: its gradient is a sum of two."""

    def __init__(self, num_words: int = 600, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.layers = nn.ModuleList([nn.Linear(width, 8 * width) for _ in range(depth)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x).sin().unflatten(-1, (8, -1)).sum(-2)
        return (x @ self.words.weight.T).log_softmax(-1).square().mean()


@pytest.mark.filterwarnings("ignore:memory_budget=")
def test_gradient_of_scores_is_not_held_to_the_end_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = Tied().double(), torch.randint(0, 600, (4, 64))
    parameters = list(model.parameters())
    model(tokens).backward()
    expected = [p.grad.clone() for p in parameters]

    def last_reader_of_scores() -> tuple[int, float]:
        torch._dynamo.reset()
        seen: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr("remat.compiled.kernel_check.KernelCheck.check", lambda _, half: seen.append(_orders(half)))
            compiled = torch.compile(model, backend="remat", options={"memory_budget": 0.9})
            model.zero_grad()
            compiled(tokens).backward()
        torch.testing.assert_close([p.grad for p in parameters], expected, rtol=1e-6, atol=1e-9)
        peak = activation_peak(lambda: compiled(tokens), parameters, counter="allocator").activation_bytes
        backward = seen[-1]
        return peak, max(k for k, makes in enumerate(backward) if makes == (600, 16)) / len(backward)

    _, place = last_reader_of_scores()
    monkeypatch.setattr(partition, "keep_products_early", lambda halves: halves)
    _, late = last_reader_of_scores()
    assert place < 0.5 < late


def _orders(half: Any) -> list[tuple[int, ...]]:
    """Per kernel, the shape of the product that it is; nothing for others."""
    return [
        tuple(map(int, kernel.node.get_size())) if kernel.is_extern() and "mm" in str(kernel.node) else ()
        for kernel in half.kernels
    ]
