"""Roles by data flow and tags, duplicates, and what backward needs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from support.joints import capture, named

from remat.passes.graph.joint_graph import JointGraph, Role


def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad)


def names_with(graph: JointGraph, role: Role) -> list[str]:
    return [graph.nodes[i].name for i, r in enumerate(graph.roles) if r is role]


def test_forward_backward_and_inputs_are_told_apart() -> None:
    graph = capture(lambda x, w: (x @ w).tanh().sum(), tensor(3, 4), tensor(4, 5)).classify()
    assert names_with(graph, Role.INPUT) == ["primals_1", "primals_2"]
    assert names_with(graph, Role.BACKWARD_INPUT) == ["tangents_1"]
    assert graph.roles[named(graph, "mm")] is Role.FORWARD
    assert graph.roles[named(graph, "mm", 1)] is Role.BACKWARD


def test_formula_that_needs_no_tangent_may_run_on_either_side() -> None:
    graph = capture(lambda x: x.sin().sum(), tensor(3)).classify()
    assert graph.roles[named(graph, "cos")] is Role.EITHER


def test_untagged_backward_of_a_custom_function_is_backward() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x.exp()

    graph = capture(lambda x: Double.apply(x).sum(), tensor(3)).classify()
    (gradient,) = graph.backward_outputs
    assert graph.roles[graph.resolve(gradient)] is Role.BACKWARD
    assert graph.roles[named(graph, "exp")] is Role.EITHER


def test_backward_needs_the_values_its_formulas_read() -> None:
    graph = capture(lambda x: (x.exp() * x.sin()).sum(), tensor(3)).classify()
    needed = {graph.nodes[i].name for i in graph.needed}
    assert {"exp", "sin"} <= needed


def test_repeated_computation_is_one_value() -> None:
    graph = capture(lambda x: (x.sin() * x.cos()).sum(), tensor(3)).classify()
    twice = [i for i, node in enumerate(graph.nodes) if str(node.target) == "aten.cos.default"]
    assert len(twice) == 2, "forward's cosine and the one of sine's formula"
    assert {graph.same_as[i] for i in twice} == {twice[0]}


def test_number_one_and_true_are_different_arguments() -> None:
    graph = capture(lambda x: (x * 1 + x * 1.0 + x * True).sum(), tensor(3)).classify()
    products = [i for i in range(len(graph.nodes)) if str(graph.nodes[i].target) == "aten.mul.Tensor"][:3]
    assert len({graph.same_as[i] for i in products}) == 3


def test_two_equal_outputs_keep_their_own_memory() -> None:
    graph = capture(lambda x: (x.sin(), x.sin()), tensor(3)).classify()
    first, second = (graph.resolve(o) for o in graph.forward_outputs)
    assert first != second


def test_random_draws_are_never_one_value() -> None:
    graph = capture(lambda x: F.dropout(x, 0.5).sum() + F.dropout(x, 0.5).sum(), tensor(4)).classify()
    draws = [i for i, op in enumerate(graph.facts) if op is not None and op.is_random]
    assert len(draws) == 2
    assert len({graph.same_as[i] for i in draws}) == 2


def test_gradient_that_is_a_forward_value_is_needed() -> None:
    graph = capture(lambda x, y: (x.detach().exp() * y).sum(), tensor(3), tensor(3)).classify()
    assert "exp" in {graph.nodes[i].name for i in graph.needed}


def test_in_place_update_of_a_buffer_runs_in_forward() -> None:
    buffer = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        buffer.add_(1)
        return y.sum()

    graph = capture(step, tensor(3)).classify()
    assert graph.roles[named(graph, "copy_")] is Role.FORWARD
