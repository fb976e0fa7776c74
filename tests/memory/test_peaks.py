"""The peak as an expression: at any sizes it is the simulator's, and the measured one."""

from __future__ import annotations

import random

import pytest
import torch
from support.dynamic_programs import PROGRAMS, WIDTH, Net, batch, data_dependence_captured, unmarked
from support.joints import capture
from support.symbolic import problem, symbol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import remat
from remat.passes.graph.constraints import find_constraints
from remat.passes.memory.peaks import peak_terms
from remat.passes.memory.schedule import Schedule, schedule_backward
from remat.passes.memory.simulate import simulate
from remat.passes.memory.storage import find_storages
from remat.passes.prices.cost import Roofline, price
from remat.passes.search.bench import Bench
from remat.passes.search.planner import Planner
from remat.passes.search.problem import FlowProblem
from remat.passes.shared.executor import Executor
from remat.passes.sizes.expressions import evaluate
from remat.passes.sizes.symbols import Sizes
from remat.report.data.collecting import collected
from remat.report.observed.counting import activation_peak


def schedules(found: FlowProblem, rng: random.Random) -> list[Schedule]:
    """The plain cut, and two that keep values at random."""
    planner = Planner(Bench(found, find_storages(found.graph, Executor())))
    legal = [i for v, i in enumerate(found.bases) if found.constraint(v).no_save is None]
    kept = [sorted(rng.sample(legal, rng.randint(0, len(legal)))) for _ in range(2)]
    at_random = [schedule_backward(found.graph, found.constraints, saved) for saved in kept]
    return [planner.fastest.schedule, *at_random]


@pytest.mark.parametrize("number", [*range(11), *(pytest.param(n, marks=pytest.mark.slow) for n in range(11, 88))])
def test_expression_is_the_peak_of_the_same_graph_with_fixed_sizes(number: int) -> None:
    rng = random.Random(number)
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        batch_size, length = symbol(env, "b", 4), symbol(env, "l", 16)
        symbolic = problem(number, batch_size * length)
    storages = find_storages(symbolic.graph, Executor())
    names = {s.name: "b" if storages.sizes.values[s] == 4 else "l" for s in storages.sizes.symbols}
    for schedule in schedules(symbolic, rng):
        text = peak_terms(simulate(symbolic.graph, storages, schedule), storages.sizes).text()
        for _ in range(3):
            sizes = {"b": rng.randint(1, 9), "l": rng.randint(2, 300)}
            with FakeTensorMode():
                fixed = problem(number, sizes["b"] * sizes["l"])
            expected = simulate(fixed.graph, find_storages(fixed.graph, Executor()), schedule).peak_bytes
            assert evaluate(text, {name: sizes[which] for name, which in names.items()}) == expected


@pytest.mark.parametrize("fuses", [pytest.param(False, marks=pytest.mark.slow), True], ids=["node by node", "fused"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_expression_is_the_simulated_peak_at_random_sizes(name: str, fuses: bool) -> None:
    if name == "masked_select":
        pytest.skip("AOTAutograd makes the size of what is selected from a constant")
    rng = random.Random(name)
    with data_dependence_captured():
        graph = capture(PROGRAMS[name].make(unmarked), batch(12), dynamic=True).classify()
    sizes = Sizes.find(graph.nodes)
    assert sizes.symbols
    costs = price(graph, Roofline(fuses=fuses), sizes)
    found = FlowProblem.build(graph, find_constraints(graph), costs)
    storages = find_storages(graph, Executor(fuses=fuses), sizes=sizes)
    for schedule in schedules(found, rng):
        peak = peak_terms(simulate(graph, storages, schedule), sizes)
        for _ in range(4):
            other = sizes.at({s: rng.randint(3, 400) for s in sizes.backed})
            at_other = find_storages(graph, Executor(fuses=fuses), sizes=other)
            expected = simulate(graph, at_other, schedule).peak_bytes
            values = {s.name: n for s, n in other.values.items()}
            assert peak.at(other) == evaluate(peak.text(), values) == expected


@pytest.mark.parametrize(
    ("name", "budget"),
    [("attention", 0.6), ("nested_regions", None), ("sizes_in_arithmetic", None)],
)
def test_expression_is_what_is_measured(name: str, budget: float | None) -> None:
    model = PROGRAMS[name].make(remat.checkpoint_region)
    options = {"inner": "aot_eager", "memory_budget": budget}
    compiled = torch.compile(model, backend="remat", options=options, dynamic=True, fullgraph=True)
    with collected() as graphs:
        compiled(batch(40)).backward()
    (graph,) = graphs
    (symbol,) = graph.plan.symbols
    for size in (17, 40, 133):
        x = batch(size)
        measured = activation_peak(lambda x=x: compiled(x), [x, *model.parameters()], counter="dispatch")
        # Autograd itself makes the gradient of the loss, one number.
        assert measured.activation_bytes - 4 == graph.plan.at({symbol.name: size}).peak.num_bytes
    assert len(graphs) == 1, "planned again"


def test_sizes_alike_at_the_example_alone_are_not_written_over() -> None:
    """Eight rows of sixteen numbers take what sixteen of eight do, but no other number of rows does."""

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        fixed = torch.ones(WIDTH, 8).exp()
        return (x.sin() @ fixed).cos()

    graph = capture(Net(body), batch(8), dynamic=True).classify()
    storages = find_storages(graph, Executor(fuses=True))
    table = {storages.own_sizes[i] for i, own in enumerate(storages.own_bytes) if own == (4 * 8 * WIDTH,)}
    assert len(table) == 2


@pytest.mark.parametrize("has_symbols", [False, True])
def test_number_of_a_size_says_which_size_it_is_with_symbols_and_without(has_symbols: bool) -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        found = problem(0, symbol(env, "b", 4) if has_symbols else 4)
    storages = find_storages(found.graph, Executor())
    assert bool(storages.sizes.symbols) == has_symbols
    simulation = Bench(found, storages).without_recompute.simulation
    rows = zip(storages.own_bytes, storages.own_sizes, strict=True)
    pairs = [pair for taken, numbers in rows for pair in zip(taken, numbers, strict=True)]
    pairs += [(memory.num_bytes, memory.size) for memory in simulation.memory]
    table_bytes = storages.sizes.table_bytes
    assert pairs
    assert all(table_bytes[number] == num_bytes for num_bytes, number in pairs)
