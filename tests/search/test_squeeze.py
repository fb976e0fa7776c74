"""A squeeze lowers the peak of a schedule by forgetting what is not read at its highest moments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.instances import instance
from support.joints import capture
from torch import nn

from remat.passes.memory.legal import verify_schedule
from remat.passes.memory.storage import find_storages
from remat.passes.prices.cost import Flops, Roofline, price
from remat.passes.search.bench import Bench, Offer
from remat.passes.search.planner import Planner
from remat.passes.search.problem import FlowProblem
from remat.passes.shared.executor import Executor
from remat.passes.sizes.symbols import Sizes


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
    return Planner(Bench(problem, find_storages(graph, Executor(), sizes=sizes)))


def check(planner: Planner, offer: Offer) -> None:
    verify_schedule(planner.problem.graph, planner.problem.constraints, offer.schedule)
    assert offer.peak_bytes == planner.bench.simulator.run(offer.schedule).peak_bytes


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
    assert not planner.low.is_long
    assert planner.lowest.peak_bytes <= planner.low.peak_bytes
    assert planner.squeezer.squeeze_out(planner.lowest).peak_bytes == planner.lowest.peak_bytes


class Layers(nn.Module):
    """Equal layers, wide inside: their values change sides of a cut together."""

    def __init__(self, width: int = 16, depth: int = 8) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            x = x + down(F.gelu(up(norm(x))).sin())
        return x.square().mean()


@pytest.fixture(scope="module")
def layered() -> Planner:
    graph, constraints = capture(Layers(), torch.randn(64, 16)).constraints()
    sizes = Sizes.find(graph.nodes, None)
    problem = FlowProblem.build(graph, constraints, price(graph, Roofline(fuses=False), sizes))
    return Planner(Bench(problem, find_storages(graph, Executor(), sizes=sizes)))


def test_cuts_that_hardly_exceed_a_budget_are_squeezed_into_it(layered: Planner) -> None:
    assert not layered.bench.is_small
    num_fitting = 0
    for cut in layered.dearer_cuts:
        budget_bytes = int(0.97 * cut.peak_bytes)
        (squeezed,) = layered.squeezed([cut], budget_bytes)
        check(layered, squeezed)
        num_fitting += squeezed.peak_bytes <= budget_bytes
        found = layered.within(budget_bytes)
        if found is not None and squeezed.peak_bytes <= budget_bytes:
            assert found.extra_ticks <= squeezed.extra_ticks
    assert num_fitting


def test_only_what_nearly_fits_and_is_faster_than_all_that_fits_is_squeezed(layered: Planner) -> None:
    cut = max(layered.dearer_cuts, key=lambda offer: offer.peak_bytes)
    assert layered.fastest.extra_ticks < cut.extra_ticks
    assert layered.squeezed([layered.fastest, cut], layered.fastest.peak_bytes) == []
    assert layered.squeezed([cut], cut.peak_bytes // 2) == []


def test_value_computed_for_another_one_is_forgotten_within_the_stage_and_computed_again() -> None:
    """A chain is recomputed for its end, which backward reads first: what was passed on the way need not wait."""
    case = instance(82)
    small = Planner(Bench(case.problem, find_storages(case.graph, Executor())))
    start = min(small.dearer_cuts, key=lambda o: abs(o.peak_bytes - 5 * small.problem.num_bytes(0)))
    budget_bytes = start.peak_bytes - small.problem.num_bytes(0)
    squeezed = small.squeezer.squeeze(start, budget_bytes)
    check(small, squeezed)
    assert squeezed.peak_bytes <= budget_bytes
    found = small.within(budget_bytes)
    assert found is not None
    assert found.extra_ticks <= squeezed.extra_ticks
