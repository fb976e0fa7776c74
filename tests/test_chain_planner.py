"""Chains of blocks: where they are cut, and what recomputing several times reaches."""

from __future__ import annotations

import pytest
import torch.fx as fx
from instances import Program
from remat.passes.blocks import find_blocks
from remat.passes.budget import Planner
from remat.passes.flow import FlowProblem
from remat.passes.joint_graph import Role
from remat.passes.schedule import roots, schedule_backward
from remat.passes.simulate import simulate
from remat.passes.storage import find_storages
from remat.passes.verify import verify_schedule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

WIDTH = 32


def residual_blocks(num_blocks: int, *, must_recompute: tuple[int, ...] = ()) -> FlowProblem:
    """A stream to which wide blocks add; streams after some of the blocks may not be saved."""
    with FakeTensorMode():
        p = Program()
        x = p.linear(p.given(WIDTH), WIDTH)
        for block in range(num_blocks):
            x = p.add(x, p.linear(p.tanh(p.linear(x, 4 * WIDTH)), WIDTH))
            if block in must_recompute:
                x.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return p.problem(p.tanh(x))


def equal_layers(num_layers: int) -> FlowProblem:
    with FakeTensorMode():
        p = Program()
        x: fx.Node = p.given(WIDTH)
        for _ in range(num_layers):
            x = p.gelu(p.linear(x, WIDTH))
        return p.problem(x)


def names(problem: FlowProblem, values: frozenset[int]) -> list[str]:
    return [problem.graph.nodes[problem.bases[v]].name for v in sorted(values)]


def test_blocks_end_where_only_the_stream_crosses() -> None:
    problem = residual_blocks(4)
    *inner, last = find_blocks(problem)
    assert len(inner) >= 3
    for block in inner:
        assert [name.split("_")[0] for name in names(problem, block.crossing)] in (["add"], ["mm"])
    assert not last.crossing


def test_no_block_ends_on_a_hill_between_narrow_points() -> None:
    with FakeTensorMode():
        p = Program()
        stream = p.linear(p.given(WIDTH), WIDTH)
        hill = p.linear(stream, 16 * WIDTH)
        for _ in range(3):  # two hill values are alive while one is made of the other, then one: a high valley
            hill = p.tanh(hill)
        stream = p.linear(hill, WIDTH)
        problem = p.problem(p.tanh(p.linear(p.tanh(stream), WIDTH)))
    widest = max(problem.num_bytes(v) for v in range(len(problem.bases)))
    blocks = find_blocks(problem)
    assert len(blocks) > 1
    assert all(problem.num_bytes(v) < widest for block in blocks for v in block.crossing)


def test_blocks_are_all_of_forward_and_all_of_backward_in_order() -> None:
    problem = residual_blocks(4)
    blocks = find_blocks(problem)
    values = [v for block in blocks for v in block.values]
    assert values == [v for v, i in enumerate(problem.bases) if problem.graph.roles[i] is Role.FORWARD]
    assert [i for block in reversed(blocks) for i in block.backward] == roots(problem.graph)


def test_no_block_ends_where_a_value_crosses_that_may_not_be_saved() -> None:
    problem = residual_blocks(4, must_recompute=(1,))
    blocks = find_blocks(problem)
    assert len(blocks) > 1
    for block in blocks:
        assert all(problem.constraint(v).no_save is None for v in block.crossing)


def best_without_forgetting(problem: FlowProblem) -> int:
    """The lowest peak of schedules that recompute from every n-th layer and keep what they recomputed."""
    storages = find_storages(problem.graph, fuses=False)
    peaks = []
    for step in range(1, len(problem.bases)):
        for first in range(step):
            saved = [i for i in problem.bases[first::step] if problem.graph.roles[i] is Role.FORWARD]
            schedule = schedule_backward(problem.graph, problem.constraints, saved)
            peaks.append(simulate(problem.graph, storages, schedule).peak_bytes)
    return min(peaks)


def test_recomputing_several_times_reaches_what_no_choice_of_saved_values_does() -> None:
    problem = equal_layers(16)
    planner = Planner(problem, find_storages(problem.graph, fuses=False))
    lowest = planner.lowest
    verify_schedule(problem.graph, problem.constraints, lowest.schedule)
    assert lowest.peak_bytes < 0.75 * best_without_forgetting(problem)
    again = [i for i in lowest.schedule.events if problem.graph.roles[i] is Role.FORWARD]
    assert len(again) > len(set(again))


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.4])
def test_offers_of_the_chain_planner_are_legal_and_as_large_as_they_say(fraction: float) -> None:
    problem = residual_blocks(6)
    storages = find_storages(problem.graph, fuses=False)
    planner = Planner(problem, storages)
    offers = list(planner._chain_offers(int(fraction * planner.without_recompute.peak_bytes)))
    assert offers
    for offer in offers:
        verify_schedule(problem.graph, problem.constraints, offer.schedule)
        assert simulate(problem.graph, storages, offer.schedule).peak_bytes == offer.peak_bytes


def test_more_memory_never_makes_a_plan_slower() -> None:
    problem = equal_layers(5)
    planner = Planner(problem, find_storages(problem.graph, fuses=False))
    low, high = planner.lowest.peak_bytes, planner.fastest.peak_bytes
    offers = [planner.within(low + k * (high - low) // 2) for k in range(3)]
    ticks = [offer.extra_ticks for offer in offers if offer is not None]
    assert len(ticks) == len(offers)
    assert ticks == sorted(ticks, reverse=True)
