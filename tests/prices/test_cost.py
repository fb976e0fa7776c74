"""Prices: what they depend on, how often a model is asked, and what a bad model is told."""

from __future__ import annotations

import pytest
import torch
from support.joints import capture, named
from torch.utils.flop_counter import flop_registry

from remat.compiled import calibration
from remat.compiled.calibration import Profile
from remat.passes.ops.op_facts import Kind
from remat.passes.prices.cost import (
    ATTENTION_ARITHMETIC,
    SLOW_PASSES,
    Callback,
    Flops,
    Machine,
    Roofline,
    flops_of,
    price,
    ticks,
)
from remat.passes.prices.op_call import OpCall, call_of
from remat.passes.shared.errors import OptionError, RematError
from remat.passes.sizes.tensor_specs import TensorSpec


def machine(flops: float = 1e9, num_bytes: float = 1e9) -> dict[str, Machine]:
    return {"cpu": Machine(flops, num_bytes)}


MACHINE = machine()


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x.sum()


@pytest.fixture
def graph():
    return capture(layers, torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)).classify()


def test_model_is_asked_once_per_distinct_call(graph) -> None:
    asked: list[OpCall] = []

    def count(call: OpCall) -> float:
        asked.append(call)
        return 1.0

    price(graph, Callback(MACHINE, function=count))
    assert len(asked) == len(set(asked))
    assert sum(call.target is torch.ops.aten.mm.default for call in asked) == 1


def test_call_depends_on_shapes_types_and_strides() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sum() + x.t().exp().sum()) + x.double().exp().sum().float()

    graph = capture(both, torch.randn(4, 6, requires_grad=True)).classify()
    calls = {call_of(node) for node in graph.nodes if str(node.target) == "aten.exp.default"}
    assert len(calls) == 3


def test_matrix_product_is_priced_by_its_flops(graph) -> None:
    call = call_of(graph.nodes[named(graph, "mm")])
    assert flops_of(call) == 2 * 8 * 16 * 16
    slow = machine(flops=1.0, num_bytes=1e30)
    assert Roofline(slow).recompute_seconds(call) == 2 * 8 * 16 * 16
    assert Flops(slow).recompute_seconds(call) == 2 * 8 * 16 * 16


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_is_priced_by_its_flops_whether_it_draws_numbers_or_not(dropout: float) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    query = TensorSpec((2, 4, 32, 8), (1024, 256, 8, 1), torch.float32, "cpu")
    call = OpCall(
        op, (query, query, query, dropout), (), (query, TensorSpec((2, 4, 32), (128, 32, 1), torch.float32, "cpu"))
    )
    assert flops_of(call) == 2 * (2 * 2 * 4 * 32 * 32 * 8)
    assert call.facts.kind is Kind.MATMUL
    assert call.facts.is_random is (dropout > 0)
    slow = machine(flops=1.0, num_bytes=1e30)
    assert Roofline(slow).recompute_seconds(call) == flops_of(call)
    # What draws numbers is not timed: that would move the user's generator.
    assert (Profile(slow).recompute_seconds(call) == flops_of(call)) is (dropout > 0)


def test_batch_normalisation_of_its_own_takes_many_passes() -> None:
    def normalised(x: torch.Tensor) -> torch.Tensor:
        return (torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False) * x).sum()

    graph = capture(normalised, torch.randn(8, 4, 6, 6, requires_grad=True)).classify()
    call = next(call_of(n) for n in graph.nodes if "batch_norm" in str(n.target) and "backward" not in str(n.target))
    alone, fused = Roofline(MACHINE, fuses=False), Roofline(MACHINE, fuses=True)
    assert alone.recompute_seconds(call) == pytest.approx(SLOW_PASSES["cpu"] * fused.recompute_seconds(call))


def test_products_are_priced_by_the_speed_of_their_precision() -> None:
    device = Machine(flops_per_second=100.0, bytes_per_second=1.0, half_speed=0.125)
    assert device.compute_seconds(100, torch.float32) == 1.0
    assert device.compute_seconds(100, torch.bfloat16) == 8.0
    assert device.compute_seconds(100, torch.float16) == 8.0
    assert device.compute_seconds(100, torch.float64) == 2.0


def test_attention_on_a_cpu_pays_for_every_pair_of_query_and_key() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    narrow, wide = (TensorSpec((2, 4, 32, d), (128 * d, 32 * d, d, 1), torch.float32, "cpu") for d in (8, 16))
    rows = TensorSpec((2, 4, 32), (128, 32, 1), torch.float32, "cpu")
    no_products = Roofline(machine(flops=1e30, num_bytes=4.0))
    prices = [no_products.recompute_seconds(OpCall(op, (x, x, x), (), (x, rows))) for x in (narrow, wide)]
    # What is left beside four tensors and the sums of rows is one price per pair, however wide heads are.
    moved = [4 * x.numel + rows.numel for x in (narrow, wide)]
    pairs = 2 * 4 * 32 * 32
    assert [p - m for p, m in zip(prices, moved, strict=True)] == [ATTENTION_ARITHMETIC["cpu"] * pairs] * 2


def test_products_of_groups_are_priced_by_their_flops() -> None:
    rows, experts = torch.empty(10, 16), torch.empty(4, 16, 24)
    ends = TensorSpec((4,), (1,), torch.int32, "cpu")
    specs = [TensorSpec(tuple(t.shape), t.stride(), torch.bfloat16, "cpu") for t in (rows, experts, rows @ experts[0])]
    call = OpCall(torch.ops.aten._grouped_mm.default, (*specs[:2], ends), (), (specs[2],))
    assert flops_of(call) == 2 * 10 * 16 * 24


def test_kernels_of_their_own_pay_for_exponentials() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.softmax(-1) * x.sigmoid() * (x + 1)).sum()

    graph = capture(f, torch.randn(10, 10, requires_grad=True)).classify()
    fused, alone = (
        {
            op: Roofline(MACHINE, fuses=fuses).recompute_seconds(call_of(graph.nodes[named(graph, op)]))
            for op in ("add", "sigmoid", "_softmax")
        }
        for fuses in (True, False)
    )
    assert alone["add"] < alone["sigmoid"] < alone["_softmax"]
    assert all(alone[op] > fused[op] for op in fused)


def test_profile_times_every_op_where_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(layers, torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)).classify()
    timed: list[str] = []
    monkeypatch.setattr(calibration, "measured_seconds", lambda call: timed.append(str(call.target)) or 1.0)
    price(graph, Profile(MACHINE, fuses=True))
    assert timed == ["aten.mm.default", "aten.sum.default"]
    timed.clear()
    price(graph, Profile(MACHINE, fuses=False))
    assert timed[:2] == ["aten.mm.default", "aten.tanh.default"]


def test_fused_op_is_cheaper_to_repeat_than_to_keep() -> None:
    graph = capture(lambda x: (x + 1).exp().sum(), torch.randn(1000, requires_grad=True)).classify()
    costs = price(graph, Roofline(MACHINE))
    value = named(graph, "exp")
    assert 0 < costs.recompute_ticks[value] < costs.save_ticks[value]


def test_fused_ops_are_priced_by_their_arithmetic() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.rand_like(x) * x.exp() * x.tanh() + x).sum()

    graph = capture(f, torch.randn(10, requires_grad=True)).classify()
    prices = [
        Roofline(MACHINE).recompute_seconds(call_of(graph.nodes[named(graph, op)]))
        for op in ("add", "exp", "tanh", "rand_like")
    ]
    assert prices == sorted(prices)
    assert len(set(prices)) == 4


def test_recomputing_random_numbers_costs_more_than_keeping_them() -> None:
    graph = capture(lambda x: (torch.rand_like(x) * x).sum(), torch.randn(10, requires_grad=True)).classify()
    costs = price(graph, Roofline(MACHINE))
    draw = named(graph, "rand_like")
    assert costs.recompute_ticks[draw] > costs.save_ticks[draw]


def test_op_of_unknown_cost_is_kept() -> None:
    graph = capture(lambda x: torch.linalg.inv(x).exp().sum(), torch.eye(64).requires_grad_()).classify()
    costs = price(graph, Roofline(MACHINE))
    inverse = named(graph, "linalg_inv_ex")
    parts = [i for i in range(len(graph.nodes)) if inverse in graph.inputs[i]]
    assert costs.recompute_ticks[inverse] > sum(costs.save_ticks[i] for i in parts)


def test_flops_model_takes_everything_else_for_free(graph) -> None:
    assert Flops(MACHINE).recompute_seconds(call_of(graph.nodes[named(graph, "tanh")])) == 0.0


def test_profile_measures_what_is_not_fused(graph) -> None:
    model = Profile(machine(1e-9, 1e-9))
    measured = model.recompute_seconds(call_of(graph.nodes[named(graph, "mm")]))
    assert 0 < measured < 1.0, "the constants would have given years"


def test_profile_leaves_the_generator_alone(graph) -> None:
    before = torch.get_rng_state()
    price(graph, Profile(MACHINE))
    assert torch.equal(before, torch.get_rng_state())


def test_saving_is_never_free() -> None:
    graph = capture(lambda x: x.exp().sum(), torch.randn((), requires_grad=True)).classify()
    costs = price(graph, Roofline(machine(1e18, 1e18)))
    assert costs.save_ticks[named(graph, "exp")] == 1


def test_value_that_only_backward_needs_adds_nothing_there() -> None:
    graph = capture(lambda x: x.sin().sum(), torch.randn(5, requires_grad=True)).classify()
    costs = price(graph, Callback(MACHINE, function=lambda call: 7.0))
    assert costs.recompute_ticks[named(graph, "cos")] == 0
    assert costs.recompute_ticks[named(graph, "sin")] == ticks(7.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300, 10**400])
def test_impossible_price_is_refused_with_the_op_that_got_it(graph, seconds: float) -> None:
    with pytest.raises(OptionError, match=r"returned .* for aten\..*; a price is a number of seconds from 0 to 1e\+09"):
        price(graph, Callback(MACHINE, function=lambda call: seconds))


def test_prices_may_be_kept_in_tensors(graph) -> None:
    table = torch.tensor([0.5])
    costs = price(graph, Callback(MACHINE, function=lambda call: table[0] + torch.tensor(0.5)))
    assert costs.recompute_ticks[named(graph, "mm")] == ticks(1.0)


def test_flop_formula_that_raises_is_named(graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> int:
        raise KeyError("oops")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, broken)
    with pytest.raises(RematError, match=r"the flop formula registered for aten.mm.default raised KeyError"):
        price(graph, Roofline(MACHINE))


def test_profile_never_runs_an_op_of_the_users_own() -> None:
    calls = []

    @torch.library.custom_op("remat_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return x * 2

    counted.register_fake(torch.empty_like)
    counted.register_autograd(lambda ctx, grad: grad * 2)
    price(capture(lambda x: counted(x).exp().sum(), torch.randn(3, requires_grad=True)).classify(), Profile(MACHINE))
    assert calls == []


@pytest.mark.parametrize("answer", ["fast", None, True])
def test_answer_that_is_no_number_is_refused(graph, answer: object) -> None:
    with pytest.raises(OptionError, match=r"it must return seconds as a number"):
        price(graph, Callback(MACHINE, function=lambda call: answer))


def test_models_have_different_keys() -> None:
    keys = {model(MACHINE).cache_key() for model in (Roofline, Flops, Profile)}
    assert len(keys) == 3


def test_machine_constants_are_in_the_key() -> None:
    assert Roofline(MACHINE).cache_key() != Roofline(machine(2e9)).cache_key()
