"""A squeeze lowers the peak of a schedule by forgetting what is not read at its highest moments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from joints import capture
from remat.passes.cost import Flops, price
from remat.passes.flow import FlowProblem
from remat.passes.improve import has_few_tries
from remat.passes.planner import Offer, Planner
from remat.passes.storage import find_storages
from remat.passes.symbols import Sizes
from remat.passes.verify import verify_schedule
from torch import nn


class Residual(nn.Module):
    """Blocks whose inside is wider than what crosses between them, so that much is alive inside of one."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.second = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2 * depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms = iter(self.norms)
        for first, second in zip(self.first, self.second, strict=True):
            x = F.relu(x + next(norms)(second(F.relu(next(norms)(first(x))))))
        return x.square().mean()


@pytest.fixture(scope="module")
def planner() -> Planner:
    model, x = Residual(), torch.randn(4, 8, 16, 16)
    graph, constraints = capture(model, x).constraints()
    sizes = Sizes.find(graph.nodes, None)
    problem = FlowProblem.build(graph, constraints, price(graph, Flops(), sizes))
    return Planner(problem, find_storages(graph, fuses=False, sizes=sizes))


def check(planner: Planner, offer: Offer) -> None:
    verify_schedule(planner.problem.graph, planner.problem.constraints, offer.schedule)
    assert offer.peak_bytes == planner.simulator.run(offer.schedule).peak_bytes


def test_squeezing_the_fastest_plan_fits_a_budget_that_it_exceeds(planner: Planner) -> None:
    start = planner.fastest
    budget_bytes = int(0.7 * start.peak_bytes)
    squeezed = planner.squeezer.squeeze(start, budget_bytes)
    check(planner, squeezed)
    assert squeezed.peak_bytes <= budget_bytes
    assert squeezed.extra_ticks >= start.extra_ticks


def test_squeeze_stops_as_soon_as_the_budget_is_met(planner: Planner) -> None:
    start = planner.fastest
    little = planner.squeezer.squeeze(start, int(0.9 * start.peak_bytes))
    much = planner.squeezer.squeeze(start, int(0.6 * start.peak_bytes))
    assert much.peak_bytes < little.peak_bytes <= 0.9 * start.peak_bytes
    assert little.extra_ticks < much.extra_ticks


def test_squeeze_of_what_fits_is_the_same_plan(planner: Planner) -> None:
    assert planner.squeezer.squeeze(planner.fastest, planner.fastest.peak_bytes) is planner.fastest


def test_hopeless_budget_gives_the_lowest_plan_seen(planner: Planner) -> None:
    squeezed = planner.squeezer.squeeze(planner.fastest, 1)
    check(planner, squeezed)
    assert squeezed.peak_bytes < planner.fastest.peak_bytes


def test_squeezing_out_never_raises_the_peak_and_is_repeatable(planner: Planner) -> None:
    start = planner.dearer_cuts[-1]
    first, second = planner.squeezer.squeeze_out(start), planner.squeezer.squeeze_out(start)
    check(planner, first)
    assert first.peak_bytes < start.peak_bytes
    assert first.schedule.events == second.schedule.events


def test_lowest_plan_is_one_that_cannot_be_squeezed_further(planner: Planner) -> None:
    assert not has_few_tries(planner.low.simulation)
    assert planner.lowest.peak_bytes <= planner.low.peak_bytes
    assert planner.squeezer.squeeze_out(planner.lowest).peak_bytes == planner.lowest.peak_bytes
