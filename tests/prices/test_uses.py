"""What becomes of a value that a compiler that fuses computes again: inside which loop, and whether it is written."""

from __future__ import annotations

import pytest
import torch
from support.joints import capture, named

from remat.passes.graph.joint_graph import JointGraph
from remat.passes.prices.cost import Machine, Roofline, price
from remat.passes.prices.op_call import Use, call_of
from remat.passes.prices.uses import find_uses
from remat.passes.sizes.symbols import Sizes

MACHINE = Machine(2.0**35, 2.0**34)
ROWS, COLUMNS = 6, 50


def graph_of(function: object, *shapes: tuple[int, ...]) -> JointGraph:
    return capture(function, *[torch.randn(shape, requires_grad=True) for shape in shapes]).classify()  # type: ignore[arg-type]


def uses_of(graph: JointGraph) -> list[Use]:
    return find_uses(graph, Sizes.find(graph.nodes))


def elements(use: Use) -> int:
    assert use.loop is not None
    return int(use.loop.meta["val"].numel())


def test_value_that_a_product_of_backward_reads_is_written() -> None:
    graph = graph_of(lambda x, w: (x.sin() @ w).cos().sum(), (ROWS, COLUMNS), (COLUMNS, COLUMNS))
    uses = uses_of(graph)
    assert uses[named(graph, "sin")].is_written  # read through a transposition
    assert not uses[named(graph, "cos")].is_written


def test_value_that_only_forwards_products_read_is_not() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ w.detach()).sum()  # the gradient of x is made of w alone

    graph = graph_of(f, (ROWS, COLUMNS), (COLUMNS, COLUMNS))
    assert not uses_of(graph)[named(graph, "sin")].is_written


def test_value_of_rows_is_computed_for_every_column_that_reads_it() -> None:
    def f(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (x * rows.exp()[:, None]).sin().sum()

    graph = graph_of(f, (ROWS, COLUMNS), (ROWS,))
    uses = uses_of(graph)
    assert elements(uses[named(graph, "exp")]) == ROWS * COLUMNS
    assert uses[named(graph, "sin")] == Use()


def test_reduction_ends_a_loop_and_is_not_computed_in_the_next_one() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sum(-1, keepdim=True).log() * x).sin().sum()

    graph = graph_of(f, (ROWS, COLUMNS))
    uses = uses_of(graph)
    assert uses[named(graph, "exp")] == Use()
    assert uses[named(graph, "sum")] == Use()
    assert elements(uses[named(graph, "log")]) == ROWS * COLUMNS


def test_simple_arithmetic_on_rows_costs_a_loop_over_columns_nothing_more() -> None:
    def f(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (x * (2 * rows)[:, None]).sin().sum()

    graph = graph_of(f, (ROWS, COLUMNS), (ROWS,))
    assert uses_of(graph)[named(graph, "mul")] == Use()


def test_constant_is_part_of_every_loop() -> None:
    """Kept, it would be one more buffer for loops to read, and what reads many is written to memory."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x.sin(), torch.full((), 3.0)).square().sum()

    graph = graph_of(f, (ROWS, COLUMNS))
    assert uses_of(graph)[named(graph, "full")] == Use()
    costs = price(graph, Roofline({"cpu": MACHINE}), fuses=True)
    assert costs.recompute_ticks[named(graph, "full")] < costs.save_ticks[named(graph, "full")]


def test_what_is_written_is_not_computed_in_loops() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x.exp()  # a row, read by a product and by a loop over many rows
        return ((h @ w).sum() * (h * torch.ones(ROWS, 1)).sin()).sum()

    graph = graph_of(f, (1, COLUMNS), (COLUMNS, COLUMNS))
    assert uses_of(graph)[named(graph, "exp")] == Use(is_written=True)


@pytest.mark.parametrize("use", [Use(), Use(is_written=True)])
def test_writing_costs_what_moving_the_result_takes(use: Use) -> None:
    graph = graph_of(lambda x: x.exp().sum(), (ROWS, COLUMNS))
    node = graph.nodes[named(graph, "exp")]
    fused, alone = Roofline({"cpu": MACHINE}), Roofline({"cpu": MACHINE}, fuses=False)
    more = fused.recompute_seconds(call_of(node, use=use)) - fused.recompute_seconds(call_of(node))
    assert more == pytest.approx(use.is_written * 4 * ROWS * COLUMNS / MACHINE.bytes_per_second)
    assert alone.recompute_seconds(call_of(node, use=use)) == alone.recompute_seconds(call_of(node))


def test_row_is_kept_rather_than_computed_for_every_column() -> None:
    def f(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (x * rows.sin()[:, None]).sin().sum()

    graph = graph_of(f, (ROWS, COLUMNS), (ROWS,))
    alone, fused = (price(graph, Roofline({"cpu": MACHINE}), fuses=fuses) for fuses in (False, True))
    row = named(graph, "sin")
    assert fused.recompute_ticks[row] == pytest.approx(COLUMNS * alone.recompute_ticks[row], abs=COLUMNS)
    assert fused.recompute_ticks[row] > fused.save_ticks[row] > alone.recompute_ticks[row]
