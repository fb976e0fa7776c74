"""For which sizes a plan says that its budget holds: it does at every size that is named, and where it is proved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.dynamic_programs import PROGRAMS, Net, batch, unmarked
from support.joints import capture
from torch import nn

from remat.passes.budgets.budget import Budget
from remat.passes.memory.simulate import simulate
from remat.passes.pipeline import choose, prepare
from remat.passes.plans.plan import Plan
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Machine, Roofline
from remat.passes.ranges.ranges import at_sizes
from remat.passes.ranges.validity import with_ranges
from remat.passes.search.bench import Bench

MODEL = Roofline({"cpu": Machine(flops_per_second=2.0**36, bytes_per_second=2.0**33)}, fuses=False)


def planned(model: nn.Module, budget: Budget | None) -> tuple[Plan, Callable[[int], tuple[int, int]]]:
    """Plan for 60 rows, with the bytes that the plan and one without recomputation take at other numbers of rows."""
    joint, request = capture(model, batch(60), dynamic=True), Request(MODEL, budget, take_minimum=True)
    prepared = prepare(joint.module, request, num_fwd_outputs=joint.num_fwd_outputs)
    chosen = with_ranges(prepared, choose(prepared, request), request)
    sizes = prepared.storages.sizes
    (symbol,) = sizes.backed

    def peaks_at(rows: int) -> tuple[int, int]:
        problem, storages = at_sizes(prepared.problem, prepared.storages, MODEL, sizes.at({symbol: rows}))
        own = simulate(problem.graph, storages, chosen.schedule).peak_bytes
        return own, Bench(problem, storages).without_recompute.peak_bytes

    return chosen.plan, peaks_at


def test_fraction_is_kept_at_the_sizes_that_are_named_and_not_below_the_first() -> None:
    plan, peaks_at = planned(PROGRAMS["layers"].make(unmarked), Budget("part", fraction=0.45))
    (found,) = plan.ranges
    assert not found.is_proved
    assert found.sampled == (found.low, 60, 240, 960, 3840)
    assert 15 < found.low < 60
    for rows in (*found.sampled, found.low - 1):
        peak_bytes, whole_bytes = peaks_at(rows)
        assert (peak_bytes <= int(0.45 * whole_bytes)) is (rows >= found.low)
    named = ", ".join(map(str, found.sampled))
    assert f"within the budget   {found.symbol} from {found.low} to 3840 (sampled at {named})" in str(plan)


def test_budget_in_bytes_is_sampled_where_a_larger_size_may_take_less() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.mlp(torch.cat([x, x.new_zeros(512 - x.shape[0], x.shape[1])])[: 512 - x.shape[0]]).exp()

    plan, peaks_at = planned(Net(body), Budget("bytes", num_bytes=240_000))
    (found,) = plan.ranges
    assert not found.is_proved
    assert 15 < found.low < 60
    assert peaks_at(found.low)[0] <= 240_000 < peaks_at(found.low - 1)[0]
    assert found.sampled == (found.low, 60, 240, 512), "no size is larger"


def test_plan_without_a_budget_says_nothing_of_ranges() -> None:
    plan, _ = planned(PROGRAMS["layers"].make(unmarked), None)
    assert plan.ranges == ()
    assert plan.times is not None
