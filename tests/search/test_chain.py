"""Chains of blocks: where they are cut, and what recomputing several times reaches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from support.instances import Program, instance
from support.joints import capture
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from remat.passes.graph.constraints import find_constraints
from remat.passes.graph.joint_graph import Role
from remat.passes.memory.backward_order import roots
from remat.passes.memory.legal import verify_schedule
from remat.passes.memory.schedule import Scheduler, schedule_backward
from remat.passes.memory.simulate import Simulator, simulate
from remat.passes.memory.storage import find_storages
from remat.passes.prices.cost import Machine, Roofline, price
from remat.passes.search.bench import Bench
from remat.passes.search.blocks import _forward_values_read, find_blocks
from remat.passes.search.chain import chain_offers, tell
from remat.passes.search.planner import Planner
from remat.passes.search.problem import FlowProblem
from remat.passes.search.table import NO_TIME, ChainProgramme
from remat.passes.search.tuning import MIDDLE, Tuning
from remat.passes.shared.executor import Executor

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
    *inner, last = find_blocks(problem, MIDDLE)
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
    blocks = find_blocks(problem, MIDDLE)
    assert len(blocks) > 1
    assert all(problem.num_bytes(v) < widest for block in blocks for v in block.crossing)


def test_blocks_are_all_of_forward_and_all_of_backward_in_order() -> None:
    problem = residual_blocks(4)
    blocks = find_blocks(problem, MIDDLE)
    values = [v for block in blocks for v in block.values]
    assert values == [v for v, i in enumerate(problem.bases) if problem.graph.roles[i] is Role.FORWARD]
    assert [i for block in reversed(blocks) for i in block.backward] == roots(problem.graph)


def test_node_of_backward_that_reads_no_value_belongs_to_the_block_before() -> None:
    """Nothing has to be recomputed for it; and as long as it has not run, what it reads is in memory."""
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(8)]

    def loss() -> torch.Tensor:
        stream = torch.ones(4 * WIDTH, WIDTH)
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            stream = (stream + (stream @ up).tanh() @ down) * 0.5
        return stream.sum()

    graph = capture(loss).classify()
    costs = price(graph, Roofline({"cpu": Machine(2.0**35, 2.0**34)}))
    problem = FlowProblem.build(graph, find_constraints(graph), costs)
    blocks = find_blocks(problem, MIDDLE)
    firsts = [block.backward[0] for block in blocks if block.backward and block.backward[0] != roots(graph)[0]]
    assert len(firsts) >= 2
    for i in firsts:
        assert _forward_values_read(graph, problem, i, constants=set()), graph.nodes[i]


def test_no_block_ends_where_a_value_crosses_that_may_not_be_saved() -> None:
    problem = residual_blocks(4, must_recompute=(1,))
    blocks = find_blocks(problem, MIDDLE)
    assert len(blocks) > 1
    for block in blocks:
        assert all(problem.constraint(v).no_save is None for v in block.crossing)


def best_without_forgetting(problem: FlowProblem) -> int:
    """The lowest peak of schedules that recompute from every n-th layer and keep what they recomputed."""
    storages = find_storages(problem.graph, Executor())
    peaks = []
    for step in range(1, len(problem.bases)):
        for first in range(step):
            saved = [i for i in problem.bases[first::step] if problem.graph.roles[i] is Role.FORWARD]
            schedule = schedule_backward(problem.graph, problem.constraints, saved)
            peaks.append(simulate(problem.graph, storages, schedule).peak_bytes)
    return min(peaks)


def test_recomputing_several_times_reaches_what_no_choice_of_saved_values_does() -> None:
    problem = equal_layers(16)
    planner = Planner(Bench(problem, find_storages(problem.graph, Executor())))
    lowest = planner.lowest
    verify_schedule(problem.graph, problem.constraints, lowest.schedule)
    assert lowest.peak_bytes < 0.75 * best_without_forgetting(problem)
    again = [i for i in lowest.schedule.events if problem.graph.roles[i] is Role.FORWARD]
    assert len(again) > len(set(again))


@pytest.mark.parametrize("fraction", [0.8, 0.6, 0.4])
def test_offers_of_the_chain_planner_are_legal_and_as_large_as_they_say(fraction: float) -> None:
    problem = residual_blocks(6)
    storages = find_storages(problem.graph, Executor())
    planner = Planner(Bench(problem, storages))
    offers = list(chain_offers(planner.bench, planner.chain, int(fraction * planner.without_recompute.peak_bytes)))
    assert offers
    for offer in offers:
        verify_schedule(problem.graph, problem.constraints, offer.schedule)
        assert simulate(problem.graph, storages, offer.schedule).peak_bytes == offer.peak_bytes


def test_more_memory_never_makes_a_plan_slower() -> None:
    problem = equal_layers(5)
    planner = Planner(Bench(problem, find_storages(problem.graph, Executor())))
    low, high = planner.lowest.peak_bytes, planner.fastest.peak_bytes
    offers = [planner.within(low + k * (high - low) // 2) for k in range(3)]
    ticks = [offer.extra_ticks for offer in offers if offer is not None]
    assert len(ticks) == len(offers)
    assert ticks == sorted(ticks, reverse=True)


class Unshared(ChainProgramme):
    """The programme with a row for each stretch, equal to others or not."""

    def _rows(self) -> list[list[int]]:
        num_blocks, rows = self.links.num_blocks, []
        following = NO_TIME + 1
        for length in range(num_blocks):
            rows.append(list(range(following, following + num_blocks - length)))
            following += num_blocks - length
        return rows


@pytest.mark.parametrize("problem", [residual_blocks(8), equal_layers(12)], ids=["residual", "layers"])
@pytest.mark.parametrize("fraction", [0.7, 0.4, 0.2])
def test_stretches_that_share_a_row_are_planned_as_each_would_be_alone(problem: FlowProblem, fraction: float) -> None:
    storages = find_storages(problem.graph, Executor())
    planner = Planner(Bench(problem, storages))
    chain, memory_bytes = planner.chain, int(fraction * planner.without_recompute.peak_bytes)
    shared, alone = (made(chain.links, memory_bytes, MIDDLE.grid_steps) for made in (ChainProgramme, Unshared))
    assert shared.table.shape[0] < alone.table.shape[0]
    assert shared.top_ticks == alone.top_ticks
    for length, rows in enumerate(shared.rows):
        for i, row in enumerate(rows):
            assert shared.choices[row] == alone.choices[alone.rows[length][i]]
    assert [tell(chain, shared, level) for level in shared.feasible_levels] == [
        tell(chain, alone, level) for level in alone.feasible_levels
    ]


@pytest.mark.parametrize("fuses", [False, True])
def test_one_scheduler_and_one_simulator_serve_any_number_of_schedules(fuses: bool) -> None:
    problem = residual_blocks(5)
    storages = find_storages(problem.graph, Executor(fuses=fuses))
    scheduler, simulator = Scheduler(problem.graph, problem.constraints), Simulator(problem.graph, storages)
    for step in (1, 2, 3, 5, 2, 1):
        saved = problem.bases[::step]
        schedule, alone = scheduler.backward(saved), schedule_backward(problem.graph, problem.constraints, saved)
        assert (schedule.forward, schedule.events) == (alone.forward, alone.events)
        assert (schedule.received, schedule.replayed) == (alone.received, alone.replayed)
        assert simulator.run(schedule).live_bytes == simulate(problem.graph, storages, alone).live_bytes


@pytest.mark.parametrize("fuses", [False, True])
def test_live_bytes_are_those_of_the_memory_that_is_listed(fuses: bool) -> None:
    problem = residual_blocks(5)
    simulation = Planner(Bench(problem, find_storages(problem.graph, Executor(fuses=fuses)))).lowest.simulation
    for moment, live in enumerate(simulation.live_bytes):
        assert live == sum(m.num_bytes for m in simulation.memory if m.first <= moment <= m.last)
    listed = sorted((m.first, m.last, m.num_bytes) for m in simulation.memory)
    assert listed == sorted(span for span in simulation.spans if span[2])


def work_done(problem: FlowProblem, tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many cuts are made and how many steps are simulated to plan for a third of the peak."""
    counts = {"cuts": 0, "steps": 0}
    cut, run = FlowProblem.cut, Simulator.run

    def counted_cut(*args: Any, **kwargs: Any) -> Any:
        counts["cuts"] += 1
        return cut(*args, **kwargs)

    def counted_run(*args: Any, **kwargs: Any) -> Any:
        counts["steps"] += 1
        return run(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(FlowProblem, "cut", counted_cut)
        patch.setattr(Simulator, "run", counted_run)
        planner = Planner(Bench(problem, find_storages(problem.graph, Executor()), tuning=tuning))
        assert planner.within(planner.without_recompute.peak_bytes // 3) is not None
    return counts["cuts"], counts["steps"]


def test_deep_models_take_hardly_more_cuts_and_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs time in proportion to the graph's size; what planning takes would be quadratic otherwise."""
    for num_blocks in (40, 160):
        problem = residual_blocks(num_blocks)
        num_cuts, num_steps = work_done(problem, replace(MIDDLE, near_misses=0), monkeypatch)
        assert num_cuts <= 90
        assert num_steps <= 90
        # Squeezing looks at so many nodes at most, whatever their number; it ends within one round of tries.
        most_squeezed = MIDDLE.near_misses * (MIDDLE.nodes_squeezed // len(problem.graph.nodes) + MIDDLE.few_moves)
        assert work_done(problem, MIDDLE, monkeypatch)[1] <= num_steps + most_squeezed
        assert work_done(problem, MIDDLE, monkeypatch)[0] <= num_cuts


@pytest.mark.parametrize("fuses", [False, True])
def test_no_schedule_has_a_peak_below_the_bound_that_all_have(fuses: bool) -> None:
    shares = []
    for number in range(40):
        problem = instance(number).problem
        storages = find_storages(problem.graph, Executor(fuses=fuses))
        simulator, rng = Simulator(problem.graph, storages), random.Random(number)
        schedules = [
            schedule_backward(problem.graph, problem.constraints, [i for i in problem.bases if rng.random() < share])
            for share in (0.0, 0.1, 0.3, 0.5, 1.0)
        ]
        lowest = min(simulator.run(schedule).peak_bytes for schedule in schedules)
        assert 0 < simulator.least_bytes() <= lowest
        shares.append(simulator.least_bytes() / lowest)
    assert max(shares) > 0.4  # a bound that says something


def test_hopeless_budget_is_given_up_at_once_and_has_the_same_lowest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = residual_blocks(5)
    storages = find_storages(problem.graph, Executor())
    thorough, quick = Planner(Bench(problem, storages)), Planner(Bench(problem, storages))
    least = quick.bench.simulator.least_bytes()
    assert thorough.within(least - 1) is None
    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "run", lambda *args: pytest.fail("simulates"))
        assert quick.within_if_any(least - 1) is None
    assert quick.lowest.schedule.events == thorough.lowest.schedule.events
