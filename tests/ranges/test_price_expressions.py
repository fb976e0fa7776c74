"""Prices as expressions: at any sizes they are the cost model's for the same graph with those sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.dynamic_programs import PROGRAMS, batch, data_dependence_captured, train, unmarked
from support.joints import capture
from support.symbolic import problem, symbol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import remat
from remat.compiled.calibration import Profile
from remat.passes.prices.cost import Callback, CostModel, Flops, Machine, Roofline, price
from remat.passes.prices.op_call import UNKNOWN_USE, call_of
from remat.passes.ranges.price_expressions import Price, Prices, general_prices, total_of, total_text
from remat.passes.sizes.expressions import evaluate_real
from remat.passes.sizes.symbols import Sizes
from remat.report.data.collecting import collected

MACHINES = {"cpu": Machine(flops_per_second=2.0**36, bytes_per_second=3.7e9)}
MODELS = {
    "roofline": Roofline(MACHINES),
    "node by node": Roofline(MACHINES, fuses=False),
    "flops": Flops(MACHINES),
}


def assert_is(found: Price | None, ticks: int, values: dict[str, int], *, is_kept: bool = False) -> None:
    """Fail unless a price is a number of whole nanoseconds; keeping a tensor is never free."""
    assert found is not None
    nanoseconds = evaluate_real(found.text(), values)
    nanoseconds = max(nanoseconds, 1.0) if is_kept and ticks else nanoseconds
    assert nanoseconds == pytest.approx(ticks, rel=1e-9, abs=0.5 + 1e-6)


def asked(graph: Any, model: CostModel, sizes: Sizes) -> Prices:
    return general_prices(graph, model, sizes, price(graph, model, sizes))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 66))])
def test_price_is_that_of_the_same_graph_with_fixed_sizes(number: int, name: str) -> None:
    rng, model, env = random.Random(number), MODELS[name], ShapeEnv()
    with FakeTensorMode(shape_env=env):
        symbolic = problem(number, symbol(env, "b", 4) * symbol(env, "l", 16)).graph
    sizes = Sizes.find(symbolic.nodes)
    names = {s.name: "b" if sizes.values[s] == 4 else "l" for s in sizes.symbols}
    prices = asked(symbolic, model, sizes)
    assert None not in (*prices.save, *prices.run)
    for _ in range(3):
        chosen = {"b": rng.randint(1, 9), "l": rng.randint(2, 300)}
        with FakeTensorMode():
            fixed = problem(number, chosen["b"] * chosen["l"]).graph
        costs = price(fixed, model)
        values = {s: chosen[which] for s, which in names.items()}
        for i in range(len(fixed.nodes)):
            assert_is(prices.save[i], costs.save_ticks[i], values, is_kept=True)
            assert_is(prices.run[i], costs.run_ticks[i], values)
            assert_is(prices.recompute[i], costs.recompute_ticks[i], values)
        total = evaluate_real(total_text(total_of((p, 2) for p in prices.run)), values)
        assert total == pytest.approx(2 * sum(costs.run_ticks), abs=len(fixed.nodes) + 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_price_of_programs_at_random_sizes(name: str) -> None:
    if name == "masked_select":
        pytest.skip("AOTAutograd makes the size of what is selected from a constant")
    rng, model = random.Random(name), MODELS["roofline"]
    with data_dependence_captured():
        graph = capture(PROGRAMS[name].make(unmarked), batch(12), dynamic=True).classify()
    sizes = Sizes.find(graph.nodes)
    prices = asked(graph, model, sizes)
    assert None not in (*prices.save, *prices.run)
    for _ in range(4):
        other = sizes.at({s: rng.randint(3, 4000) for s in sizes.backed})
        values = {s.name: n for s, n in other.values.items()}
        costs = price(graph, model, other)
        for i in range(len(graph.nodes)):
            assert_is(prices.save[i], costs.save_ticks[i], values, is_kept=True)
            assert_is(prices.run[i], costs.run_ticks[i], values)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        pytest.param(lambda x, w: torch.nn.functional.conv2d(x, w, padding=1), ((3, 4, 9, 7), (5, 4, 3, 3)), id="conv"),
        pytest.param(lambda x, w: torch.baddbmm(x, x, w), ((3, 5, 5), (3, 5, 5)), id="baddbmm"),
        pytest.param(
            lambda x, w: torch.ops.aten._scaled_dot_product_efficient_attention(x, w, w, None, False)[0],
            ((2, 4, 6, 8), (2, 4, 5, 8)),
            id="attention",
        ),
        pytest.param(lambda x, w: torch.linalg.inv(x) @ w, ((5, 5), (5, 5)), id="without a flop count"),
    ],
)
def test_flop_formulas_take_symbols(function: Any, shapes: Any) -> None:
    """Each size of the first tensor is a symbol, and the second one's like sizes are the same."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        known = {n: symbol(env, f"n{n}", n) for n in dict.fromkeys(n for shape in shapes for n in shape)}
        tensors = [torch.empty([known[n] for n in shape], device="meta", requires_grad=True) for shape in shapes]
        gm = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="symbolic")(*tensors)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert nodes
    sizes = Sizes.find(gm.graph.nodes)
    asker = remat.passes.ranges.price_expressions._Asked(Roofline({}), sizes)
    for node in nodes:
        found = asker.run(node, UNKNOWN_USE)
        call = call_of(node, sizes)
        assert found is not None
        assert found.at(sizes.value_of) == pytest.approx(1e9 * Roofline({}).recompute_seconds(call))


# ------------------------------------------------------------------------------------------------- what is not known


def test_model_that_measures_says_nothing_of_other_sizes() -> None:
    graph = capture(PROGRAMS["layers"].make(unmarked), batch(12), dynamic=True).classify()
    sizes = Sizes.find(graph.nodes)
    runs = asked(graph, Profile(MACHINES), sizes).run
    kinds = {str(node.target): p for node, p in zip(graph.nodes, runs, strict=True)}
    assert kinds["aten.addmm.default"] is None
    assert kinds["aten.gelu.default"] is not None, "what is fused is not measured"
    asked_about = Callback(MACHINES, function=lambda call: 1e-6 * len(call.inputs))
    runs = asked(graph, asked_about, sizes).run
    assert all(p is None for node, p in zip(graph.nodes, runs, strict=True) if "addmm" in str(node.target))


def test_model_whose_formula_has_another_case_at_the_example_is_not_believed() -> None:
    class Cases(Roofline):
        def recompute_seconds(self, call: Any) -> Any:
            is_number = all(isinstance(n, int) for spec in call.outputs for n in spec.shape)
            return 5e-6 if is_number else super().recompute_seconds(call)

    graph = capture(PROGRAMS["layers"].make(unmarked), batch(12), dynamic=True).classify()
    runs = asked(graph, Cases(MACHINES), Sizes.find(graph.nodes)).run
    assert all(p is None for node, p in zip(graph.nodes, runs, strict=True) if "addmm" in str(node.target))


# ------------------------------------------------------------------------------------------------- plans


def plan_for(name: str, size: int, **options: Any) -> remat.Plan:
    given = {"inner": "aot_eager", "cost_model": "roofline", **options}

    def with_remat(model: Any) -> Any:
        return torch.compile(model, backend="remat", options=given, fullgraph=True, dynamic=True)

    with collected() as graphs:
        train(with_remat, PROGRAMS[name].make, remat.checkpoint_region, (size,), False)
    return graphs[0].plan


@pytest.mark.parametrize(("name", "budget"), [("attention", None), ("layers", 0.6), ("policies", None)])
def test_plan_at_other_sizes_has_the_prices_of_those(name: str, budget: Any) -> None:
    plan, other = (plan_for(name, size, memory_budget=budget) for size in (40, 333))
    (found,) = plan.symbols
    assert plan.times is not None
    assert not plan.times.note
    moved = plan.at({found.name: 333})
    expected = {d.value: d for d in other.decisions}
    for d in moved.decisions:
        assert d.recompute_seconds == pytest.approx(expected[d.value].recompute_seconds, abs=1.1e-9)
        assert d.save_seconds == pytest.approx(expected[d.value].save_seconds, abs=1.1e-9)
    assert moved.forward_seconds == pytest.approx(other.forward_seconds, abs=1e-9 * plan.num_nodes)
    again = evaluate_real(plan.times.recompute, {found.name: 333}) / 1e9
    assert again == pytest.approx(moved.recompute_seconds, abs=1e-9 * plan.num_nodes)
    assert remat.Plan.from_json(moved.to_json()) == moved


def test_plan_shows_times_as_expressions() -> None:
    plan = plan_for("attention", 40)
    name = plan.symbols[0].name
    text = str(plan)
    assert f"ns, {1e3 * plan.forward_seconds:.3g} ms at {name}=40" in text
    assert f"{name}**2" in text.partition("forward time")[2].partition("\n")[0]
    assert f"at {name}=400" in str(plan.at({name: 400})).partition("forward time")[2].partition("\n")[0]


@pytest.mark.parametrize("model", ["profile", lambda call: 1e-6])
def test_plan_says_which_times_are_the_examples(model: Any) -> None:
    plan = plan_for("layers", 40, cost_model=model)
    assert plan.times is not None
    assert not plan.times.forward
    assert (
        "known at the sizes of the example only" in plan.times.note or "says nothing of other sizes" in plan.times.note
    )
    assert plan.times.note in str(plan)
    moved = plan.at({plan.symbols[0].name: 400})
    unknown = [d for d in plan.decisions if not d.recompute_expression]
    assert unknown
    at_other = {d.value: d for d in moved.decisions}
    assert all(at_other[d.value].recompute_seconds == d.recompute_seconds for d in unknown)


def test_plan_for_fixed_sizes_has_times_and_no_expressions() -> None:
    torch._dynamo.reset()
    plan = remat.explain(PROGRAMS["layers"].make(unmarked), batch(12), inner="aot_eager").plans[0]
    assert plan.times is None
    assert plan.forward_seconds > 0
    assert not any(d.recompute_expression or d.save_expression for d in plan.decisions)
