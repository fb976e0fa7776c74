"""What gives memory back runs early in backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from joints import Joint, capture, named
from remat.passes.backward_order import roots
from remat.passes.budget import Planner
from remat.passes.cost import Flops, price
from remat.passes.flow import FlowProblem
from remat.passes.joint_graph import JointGraph, Role
from remat.passes.storage import find_storages
from remat.passes.symbols import Sizes
from torch import nn


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
    return Planner(problem, find_storages(graph, fuses=False, overwrites=True, sizes=sizes)).lowest.peak_bytes


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
