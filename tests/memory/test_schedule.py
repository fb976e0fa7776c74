"""What a schedule of backward hands over from forward is what backward reads."""

from __future__ import annotations

import torch
from support.joints import capture, named

from remat.passes.memory.schedule import Scheduler


def test_value_made_ready_for_a_reader_that_does_not_come_is_not_handed_over() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().cos().sum()

    graph, constraints = capture(step, torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)).constraints()
    scheduler = Scheduler(graph, constraints)
    product, sine = named(graph, "mm"), named(graph, "sin")
    writer = scheduler.writer([product, sine])
    writer.run(sine)  # as a search may ask for
    writer.drop([sine])  # and whoever reads it computes it again
    for root in scheduler.roots:
        writer.run(root)
    assert product in writer.finish().received
    assert sine not in writer.finish().received


def test_gradient_that_is_a_forward_value_is_handed_over() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin() * w).sum()

    graph, constraints = capture(step, torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)).constraints()
    sine = named(graph, "sin")
    assert sine in Scheduler(graph, constraints).backward([sine]).received
