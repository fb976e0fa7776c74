"""What gives memory back runs early in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.joints import Joint, capture, named
from torch import nn

from remat.passes.graph.joint_graph import JointGraph, Role
from remat.passes.memory.backward_order import roots
from remat.passes.memory.schedule import Scheduler
from remat.passes.memory.storage import find_storages
from remat.passes.prices.cost import Flops, price
from remat.passes.search.bench import Bench
from remat.passes.search.planner import Planner
from remat.passes.search.problem import FlowProblem
from remat.passes.shared.executor import Executor
from remat.passes.sizes.symbols import Sizes

ATEN = torch.ops.aten


def mlp(width: int = 64) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)), torch.randn(32, width)


def captured() -> Joint:
    model, x = mlp()
    return capture(lambda: model(x).square().sum())


def position_of_each(order: list[int]) -> dict[int, int]:
    return {i: k for k, i in enumerate(order)}


def test_order_holds_every_node_once_and_after_what_it_reads() -> None:
    graph = captured().classify()
    order = roots(graph)
    place = position_of_each(order)
    assert sorted(order) == sorted(graph.backward_order)
    for i in order:
        assert all(place[j] < place[i] for j in graph.inputs[i] if j in place)


def test_gradient_of_a_weight_is_finished_before_that_of_the_input() -> None:
    graph = captured().classify()
    shapes = [tuple(graph.nodes[i].meta["val"].shape) for i in roots(graph) if is_product(graph, i)]
    assert shapes == [(64, 256), (32, 256), (256, 64)]  # the second weight, the way down, the first weight
    traced = [tuple(graph.nodes[i].meta["val"].shape) for i in graph.backward_order if is_product(graph, i)]
    assert traced[0] == (32, 256)


def is_product(graph: JointGraph, i: int) -> bool:
    return graph.nodes[i].target is torch.ops.aten.mm.default


def peak_of(graph: JointGraph, joint: Joint) -> int:
    _, constraints = joint.constraints()
    sizes = Sizes.find(graph.nodes, None)
    problem = FlowProblem.build(graph, constraints, price(graph, Flops(), sizes))
    return Planner(Bench(problem, find_storages(graph, Executor(overwrites=True), sizes=sizes))).lowest.peak_bytes


def test_lowest_peak_holds_two_wide_values_and_not_three() -> None:
    """As traced, an activation, what it is made of and the new gradient would be alive at once."""
    joint = captured()
    wide = 32 * 256 * 4
    assert peak_of(joint.classify(), joint) < 3 * wide


def test_sum_that_alone_reads_a_value_runs_right_after_it() -> None:
    scale, weight = nn.Parameter(torch.randn(32, 1)), nn.Parameter(torch.randn(64, 64))
    x = torch.randn(32, 64)
    graph = capture(lambda: (F.gelu(x @ weight) * scale).square().sum()).classify()
    order = roots(graph)
    total = named(graph, "sum", 1)
    before = order[order.index(total) - 1]
    assert graph.roles[total] is Role.BACKWARD
    assert before in graph.inputs[total]


def gated(num_branches: int) -> Joint:
    """A value that is the product of branches, each with a weight of its own."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(num_branches)]
    x = torch.randn(32, 64)

    def product() -> torch.Tensor:
        h = torch.ones(())
        for weight in weights:
            h = h * (x @ weight).sin()
        return h.square().sum()

    return capture(product)


def test_gradients_of_two_branches_are_computed_before_either_is_read() -> None:
    graph = gated(2).classify()

    def last_loop_is_before_products(order: list[int]) -> bool:
        loops = [k for k, i in enumerate(order) if graph.nodes[i].target is ATEN.mul.Tensor]
        return max(loops) < min(k for k, i in enumerate(order) if is_product(graph, i))

    assert not last_loop_is_before_products(list(graph.backward_order))
    assert last_loop_is_before_products(list(roots(graph)))


def test_sum_that_lets_go_of_a_value_runs_before_loops_that_only_replace_theirs() -> None:
    scale, weight = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64, 64))
    x = torch.randn(32, 64)
    graph = capture(lambda: ((x @ weight).sin() * scale).square().sum()).classify()
    order = roots(graph)
    total = next(k for k, i in enumerate(order) if graph.nodes[i].target is ATEN.sum.dim_IntList)
    product = next(k for k, i in enumerate(order) if is_product(graph, i))
    assert total < product


class Scaled(torch.autograd.Function):
    """Computes the gradient of its input first, as the formulas of normalisations do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


def test_product_that_only_a_sum_reads_runs_before_what_follows_from_the_same_gradient() -> None:
    """Otherwise the gradient is alive until all that is done, and no loop is made of its readers."""
    scale, weights = nn.Parameter(torch.randn(64)), [nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    x = torch.randn(32, 64)

    def loss() -> torch.Tensor:
        return (Scaled.apply((x @ weights[0]).sin(), scale) @ weights[1]).sin().sum()

    graph = capture(loss).classify()
    order = roots(graph)
    total = next(k for k, i in enumerate(order) if graph.nodes[i].target is ATEN.sum.dim_IntList)
    (product,) = graph.inputs[order[total]]
    gradient = next(j for j in graph.inputs[product] if is_product(graph, j))
    others = [k for k, i in enumerate(order) if gradient in graph.inputs[i] and i != product]
    assert len(others) == 1
    assert total == order.index(product) + 1 == order.index(gradient) + 2 < others[0]


def test_order_is_left_alone_if_backward_writes_in_place() -> None:
    """Who reads before and who after the write is said by nothing but the order."""
    joint = captured()
    plain = joint.classify()
    assert list(roots(plain)) != list(plain.backward_order)
    product = next(plain.nodes[i] for i in plain.backward_order if is_product(plain, i))
    with joint.module.graph.inserting_after(product):
        write = joint.module.graph.call_function(ATEN.mul_.Tensor, (product, 2.0))
    write.meta = dict(product.meta)
    for reader in [user for user in product.users if user is not write]:
        reader.replace_input_with(product, write)
    graph = joint.classify()
    assert any(op.is_mutating for i in graph.backward_order if (op := graph.facts[i]) is not None)
    assert list(roots(graph)) == list(graph.backward_order)


def test_what_needs_little_is_recomputed_shortly_before_its_reader() -> None:
    """A mask, which needs nothing but a seed, is not drawn before all that it masks is recomputed."""
    weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(3)]
    x, mask = torch.randn(8, 16), torch.rand(16)

    def masked() -> torch.Tensor:
        h = x
        for weight in weights:
            h = (mask > 0.5) * (h @ weight).sin()
        return h.square().sum()

    joint = capture(masked)
    graph, constraints = joint.constraints()
    scheduler = Scheduler(graph, constraints)
    last = [
        i for i, role in enumerate(graph.roles) if role is Role.FORWARD and graph.nodes[i].target is ATEN.mul.Tensor
    ]
    writer = scheduler.writer([])
    writer.run(last[-1])
    kinds = [str(graph.nodes[i].target) for i in writer.events]
    products = [k for k, kind in enumerate(kinds) if kind == "aten.mm.default"]
    masks = [k for k, kind in enumerate(kinds) if kind == "aten.gt.Scalar"]
    assert len(products) == 3
    assert products[0] < masks[0]
    assert all(products[k] < masks[k] for k in range(len(masks)))
