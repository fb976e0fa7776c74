"""Where a plan is the best one: what is proved holds at every size looked at, and ends where it does not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.dynamic_programs import PROGRAMS, Net, batch, unmarked
from support.joints import capture
from support.symbolic import problem, symbol
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat.passes.budgets.budget import Budget
from remat.passes.memory.simulate import simulate
from remat.passes.memory.storage import find_storages
from remat.passes.pipeline import choose, prepare
from remat.passes.plans.plan import SymbolRange
from remat.passes.plans.request import Prepared, Request
from remat.passes.plans.write_plan import Chosen
from remat.passes.prices.cost import Callback, Machine, Roofline
from remat.passes.ranges import best_range, validity
from remat.passes.ranges.best_range import CutProof
from remat.passes.ranges.polynomials import Line, NotPolynomial, bernstein, changes_of_sign, value_at
from remat.passes.ranges.price_expressions import general_prices
from remat.passes.ranges.ranges import at_sizes, problem_at
from remat.passes.ranges.validity import with_ranges
from remat.passes.search.planner import Planner, extra_ticks
from remat.passes.sizes.symbols import Sizes

pytestmark = pytest.mark.filterwarnings("ignore:memory_budget=")

MACHINES = {"cpu": Machine(flops_per_second=2.0**36, bytes_per_second=2.0**33)}


# ------------------------------------------------------------------------------------------------- polynomials


@pytest.mark.parametrize("number", range(20))
def test_polynomial_lies_between_its_bernstein_coefficients(number: int) -> None:
    rng = random.Random(number)
    polynomial = tuple(rng.uniform(-9, 9) for _ in range(rng.randint(1, 4)))
    low = rng.randint(0, 50)
    high = low + rng.randint(0, 80)
    for degree in (len(polynomial) - 1, 4):
        found = bernstein(polynomial, low, high, degree)
        values = [value_at(polynomial, n) for n in range(low, high + 1)]
        assert found[0] == pytest.approx(values[0])
        assert found[-1] == pytest.approx(values[-1])
        slack = 1e-9 * max(map(abs, values))
        assert min(found) - slack <= min(values)
        assert max(values) <= max(found) + slack


@pytest.mark.parametrize("number", range(20))
def test_signs_change_where_said(number: int) -> None:
    rng = random.Random(number)
    roots = sorted(rng.uniform(0, 100) for _ in range(rng.randint(1, 3)))
    polynomial = (1.0,)
    for root in roots:
        shifted = (0.0, *polynomial)
        polynomial = tuple(a - root * b for a, b in zip(shifted, (*polynomial, 0.0), strict=True))
    ends = [*changes_of_sign(polynomial, 0, 100), 100]
    start = 0
    for end in ends:
        signs = {value_at(polynomial, n) > 0 for n in range(start, end + 1)}
        assert len(signs) == 1, (roots, ends)
        start = end + 1
    assert ends == sorted(set(ends))


@pytest.mark.parametrize("roots", [[48], [47], [3], [48, 49], [10, 48, 90], [20, 20, 21]])
@pytest.mark.parametrize("high", [100, 1001, 2**40])
def test_sign_that_changes_at_a_whole_number_is_noticed(roots: list[int], high: int) -> None:
    polynomial: tuple[float, ...] = (1.0,)
    for root in roots:
        polynomial = tuple(a - root * b for a, b in zip((0.0, *polynomial), (*polynomial, 0.0), strict=True))
    start = 2
    for end in (*changes_of_sign(polynomial, 2, high), high):
        values = [value_at(polynomial, n) for n in range(start, min(end, 200) + 1)]
        assert not values or min(values) >= 0 or max(values) <= 0, (start, end)
        start = end + 1


# ------------------------------------------------------------------------------------------------- the plain cut


def line_of(graph: Any, sizes: Sizes) -> Line:
    return Line(sizes, sizes.backed[0])


@pytest.mark.parametrize("number", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 132))])
def test_cut_proved_for_a_range_is_the_cheapest_choice_at_sizes_in_it(number: int) -> None:
    rng, env = random.Random(number), ShapeEnv()
    model = Roofline({"cpu": Machine(2.0 ** rng.randint(28, 40), 2.0**33)}, fuses=rng.random() < 0.5)
    with FakeTensorMode(shape_env=env):
        found = problem(number, symbol(env, "n", rng.randint(8, 64)))
    sizes = Sizes.find(found.graph.nodes)
    found = problem_at(found, model, sizes)
    proof = CutProof(found, general_prices(found.graph, model, sizes, found.costs), line_of(found.graph, sizes))
    (row,) = validity._proved(proof, sizes, sizes.backed[0], "best", [sizes.values[sizes.backed[0]]])
    assert row.is_proved
    cut, highest = found.cut(), 10**5 if row.high is None else row.high
    rounding = 2 * len(found.bases)
    for value in (row.low, highest, *(rng.randint(row.low, highest) for _ in range(5))):
        other = problem_at(found, model, proof.line.at(value))
        assert other.price_of(cut) <= (1 + 1e-4) * other.cut().price + rounding
    for value in (row.low - 1, None if row.high is None else row.high + 1):
        if value is not None and value >= 2:
            assert not proof.holds_at(value)


def flipping(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).exp().sum()


def explained(function: Any, args: Any, request: Request) -> tuple[Prepared, Chosen]:
    joint = capture(function, *args, dynamic=True)
    prepared = prepare(joint.module, request, num_fwd_outputs=joint.num_fwd_outputs)
    return prepared, with_ranges(prepared, choose(prepared, request), request)


def best_of(chosen: Chosen) -> SymbolRange:
    (row,) = [row for row in chosen.plan.ranges if row.meaning == "best"]
    return row


LAST = 106
"""Reading the weights again costs the same however few the rows, so that keeping pays as long as
2 * 64 * n <= (1.6 * 64 + 16) * n + 16 * 64. An end is found to one part in 32."""


@pytest.mark.parametrize("size", [12, 200])
def test_range_ends_where_another_choice_gets_cheaper(size: int) -> None:
    machine = {"cpu": Machine(flops_per_second=1e30, bytes_per_second=2.0**20)}
    x, w = torch.randn(size, 16, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    torch._dynamo.mark_static(w)
    torch._dynamo.mark_static(x, 1)
    _, chosen = explained(flipping, (x, w), Request(Roofline(machine)))
    found = best_of(chosen)
    assert found.is_proved
    assert found.among == 0
    assert bool(chosen.plan.saved) is (size == 12)
    if size == 12:
        assert found.low == 2
        assert found.high is not None
        assert 31 / 32 * LAST <= found.high <= LAST
    else:
        assert LAST < found.low <= 33 / 32 * LAST + 1
        assert found.high is None


def test_size_that_is_no_polynomial_is_sampled_and_said_so() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.mlp(x[: x.shape[0] // 3]).exp()

    _, chosen = explained(Net(body), (batch(60),), Request(Roofline(MACHINES)))
    found = best_of(chosen)
    assert not found.is_proved
    assert 60 in found.sampled
    assert found.low == min(found.sampled)
    assert f"sampled at {', '.join(map(str, found.sampled))}" in str(chosen.plan)


def test_prices_of_a_users_function_are_sampled() -> None:
    model = Callback(MACHINES, function=lambda call: 1e-9 * call.output_bytes)
    _, chosen = explained(PROGRAMS["layers"].make(unmarked), (batch(60),), Request(model))
    assert not best_of(chosen).is_proved
    assert len(best_of(chosen).sampled) > 1


def test_proof_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_range, "VALUES_CUT", 20)
    _, chosen = explained(PROGRAMS["layers"].make(unmarked), (batch(60),), Request(Roofline(MACHINES)))
    assert not best_of(chosen).is_proved


def test_monomial_that_is_no_power_of_the_symbol_is_not_taken_for_one() -> None:
    graph = capture(Net(lambda net, x: net.up(x[: x.shape[0] // 3])), batch(60), dynamic=True).classify()
    sizes = find_storages(graph, fuses=False).sizes
    line = line_of(graph, sizes)
    strange = [m for terms in sizes.table for m, _ in terms if "//" in str(m) or "FloorDiv" in str(m)]
    assert strange
    with pytest.raises(NotPolynomial):
        line.monomial(strange[0])


# ------------------------------------------------------------------------------------------------- plans found


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("layers", Budget("bytes", num_bytes=60_000)),
        ("layers", Budget("part", fraction=0.7)),
        ("attention", Budget("part", fraction=0.7)),
        ("attention", Budget("bytes", num_bytes=150_000)),
    ],
)
def test_plan_is_the_fastest_found_in_all_of_its_range_and_not_beyond(name: str, budget: Budget, fuses: bool) -> None:
    request = Request(Roofline(MACHINES, fuses), replace(budget, take_minimum=True), fuses=fuses, take_minimum=True)
    prepared, chosen = explained(PROGRAMS[name].make(unmarked), (batch(60),), request)
    if not chosen.rivals:
        assert best_of(chosen).among == 0
        return
    found = best_of(chosen)
    assert found.is_proved
    assert found.among >= 3
    sizes, rng = prepared.storages.sizes, random.Random(0)
    (moving,) = sizes.backed
    highest = 20_000 if found.high is None else found.high
    for value in (found.low, highest, *(rng.randint(found.low, highest) for _ in range(4))):
        assert slower_by(prepared, chosen, request, sizes.at({moving: value})) <= 0
    ends = [n for n in (found.low - 1, None if found.high is None else found.high + 1) if n is not None and n > 2]
    for value in ends:
        assert slower_by(prepared, chosen, request, sizes.at({moving: value}), slack=0.0) > 0


def slower_by(prepared: Prepared, chosen: Chosen, request: Request, at: Sizes, slack: float = 60.0) -> float:
    """By how many ticks a plan is slower at some sizes than the fastest one found; very much if it does not fit."""
    problem, storages = at_sizes(prepared.problem, prepared.storages, request.cost_model, at)
    budget = request.budget
    assert budget is not None
    whole = Planner(problem, storages).without_recompute.peak_bytes
    limit = budget.num_bytes if budget.num_bytes is not None else budget.fraction * whole
    here = simulate(prepared.problem.graph, prepared.storages, chosen.schedule).peak_bytes
    at_home = (
        budget.num_bytes or budget.fraction * Planner(prepared.problem, prepared.storages).without_recompute.peak_bytes
    )
    if request.fuses and here <= int(0.93 * at_home):
        limit *= 0.93
    peaks = [simulate(problem.graph, storages, s).peak_bytes for s in (chosen.schedule, *chosen.rivals)]
    ticks = [extra_ticks(problem, s) for s in (chosen.schedule, *chosen.rivals)]
    if peaks[0] > limit:
        return float("inf")
    return ticks[0] - min(t for t, peak in zip(ticks, peaks, strict=True) if peak <= limit) - slack
