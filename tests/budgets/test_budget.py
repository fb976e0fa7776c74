"""Budgets: what users may say, that the measured peak keeps within them, and what happens where none can."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.joints import capture
from support.measure import activation_peak
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import remat
from remat.compiled.options import Options
from remat.passes.budgets.budget import Budget
from remat.passes.budgets.infeasible import alive_lines, lowest_or_error
from remat.passes.budgets.text import parse_budget
from remat.passes.graph.constraints import find_constraints
from remat.passes.memory.storage import find_storages
from remat.passes.prices.cost import Machine, Roofline, price
from remat.passes.search.bench import Bench
from remat.passes.search.planner import Planner, peak_stage
from remat.passes.search.problem import FlowProblem
from remat.passes.shared.errors import OptionError
from remat.passes.shared.executor import Executor
from remat.passes.shared.readable import size

# --- what users may say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "fraction", "num_bytes"),
    [
        (0.5, 0.5, None),
        (1.0, 1.0, None),
        ("35%", 0.35, None),
        (" 35 % ", 0.35, None),
        (4096, None, 4096),
        ("2GiB", None, 2 * 2**30),
        ("2 gib", None, 2 * 2**30),
        ("500MB", None, 500_000_000),
        ("1.5KiB", None, 1536),
        ("4096B", None, 4096),
    ],
)
def test_budget_is_a_fraction_or_bytes(value: Any, fraction: float | None, num_bytes: int | None) -> None:
    budget = parse_budget(value)
    assert budget is not None
    assert budget.fraction == (None if fraction is None else pytest.approx(fraction))
    assert budget.num_bytes == num_bytes


NONSENSE = [-1, -0.5, 0, 0.0, 1, 1023, 1.5, True, False, float("nan"), float("inf"), "", "2 GiBs", "fast", "120%", "0%",
            "-2GiB", "1B", b"2GiB", [0.5], {"a": 1}, 1j]  # fmt: skip


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_nonsense_is_refused_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(OptionError, match=r"memory_budget=.*: expected None .*; a float above 0\.0 and up to 1\.0"):
        parse_budget(value)


def test_one_is_said_to_be_ambiguous() -> None:
    with pytest.raises(OptionError, match=r"for a fraction write 1\.0, for bytes a whole number from 1024"):
        parse_budget(1)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("2G", "write 2GiB or 2GB"),
        ("1.5m", "write 1.5MiB or 1.5MB"),
        ("3ti", "write 3TiB or 3TB"),
        ("2 Gx", "units are"),
    ],
)
def test_unit_that_may_mean_two_things_is_refused_with_both(text: str, hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        parse_budget(text)


def test_unknown_unit_is_refused_with_the_units() -> None:
    with pytest.raises(OptionError, match=r"units are %, B, KB, MB"):
        parse_budget("2 GiBs")


def test_wrong_way_out_is_refused() -> None:
    with pytest.raises(OptionError, match=r"on_infeasible='panic': expected 'error' or 'minimum'"):
        Options.parse({"memory_budget": 0.5, "on_infeasible": "panic"})


def test_plan_and_budget_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _plan_of(_layers(), torch.randn(8, 32), path).save(path)
    with pytest.raises(OptionError, match="give one or the other"):
        Options.parse({"memory_budget": 0.5, "plan": path})


# --- the promise -------------------------------------------------------------------------------------------------

BUDGETS = (0.9, 0.5, 0.25)
TOLERANCE = 1.02


def _compiled(loss: Callable[[], torch.Tensor], **options: Any) -> Callable[[], torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(loss, backend="remat", options={"inner": "aot_eager", **options})


def _peak(loss: Callable[[], torch.Tensor], model: nn.Module) -> int:
    return activation_peak(loss, model.parameters(), counter="dispatch").activation_bytes


def _gradients(loss: Callable[[], torch.Tensor], model: nn.Module) -> list[torch.Tensor | None]:
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = None
    loss().backward()
    return [parameter.grad for parameter in model.parameters()]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


def _layers(num_layers: int = 6, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[_Block(width) for _ in range(num_layers)])


@pytest.fixture(scope="module")
def stack() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A model whose activations are many times its weights, and its loss."""
    model, x = _layers(), torch.randn(4096, 32)
    return model, lambda: model(x).square().mean()


@pytest.mark.parametrize("budget", BUDGETS)
def test_measured_peak_keeps_within_the_budget(stack: Any, budget: float) -> None:
    model, loss = stack
    whole = remat.pareto(loss, inner="aot_eager", num_budgets=1).largest.peak_without_recompute_bytes
    peak = _peak(_compiled(loss, memory_budget=budget), model)
    assert peak <= TOLERANCE * budget * whole
    assert peak >= 0.5 * min(budget, 0.3) * whole, "the budget is not used: nothing but recomputation is left"


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_are_the_same_at_every_budget(stack: Any, budget: float) -> None:
    model, loss = stack
    expected = _gradients(_compiled(loss), model)
    found = _gradients(_compiled(loss, memory_budget=budget), model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_smaller_budget_never_has_a_larger_peak(stack: Any) -> None:
    model, loss = stack
    peaks = [_peak(_compiled(loss, memory_budget=budget), model) for budget in BUDGETS]
    assert peaks == sorted(peaks, reverse=True)


def test_budget_in_bytes_means_those_bytes(stack: Any) -> None:
    model, loss = stack
    assert _peak(_compiled(loss, memory_budget="9MiB"), model) <= TOLERANCE * 9 * 2**20


def test_tight_budget_goes_below_what_one_recomputation_reaches(stack: Any) -> None:
    """Blocks are recomputed several times where that is what fits."""
    _, loss = stack
    frontier = remat.pareto(loss, inner="aot_eager", num_budgets=2).largest
    assert max(d.num_recomputes for d in frontier.points[-1].plan.decisions) > 1


@pytest.mark.parametrize("name", ["llama", pytest.param("resnet", marks=pytest.mark.slow)])
def test_prediction_is_what_is_measured(name: str, tmp_path: Path) -> None:
    built = zoo.get(name).build("tiny")
    batch = built.make_batch(0)

    def loss() -> torch.Tensor:
        return built.loss_fn(built.model, batch)

    peak = _peak(_compiled(loss, memory_budget=0.8, dump=tmp_path), built.model)
    plans = [remat.Plan.load(path) for path in tmp_path.glob("*.json")]
    assert peak == pytest.approx(max(plan.peak.num_bytes for plan in plans), rel=0.05)


# --- no plan fits ------------------------------------------------------------------------------------------------


def test_budget_that_cannot_be_met_names_the_minimum_and_what_sets_it(stack: Any) -> None:
    _, loss = stack
    with pytest.raises(BackendCompilerFailed) as caught:
        _compiled(loss, memory_budget=0.001)()
    text = str(caught.value.inner_exception)
    assert isinstance(caught.value.inner_exception, remat.InfeasibleBudget)
    found = re.search(
        r"memory_budget=0\.001: that is .* \((\d+) bytes\) of (.*) without recomputation, "
        r"but the lowest activation peak found is .* \((\d+) bytes\), (\d+\.\d)% of that\.",
        text,
    )
    assert found is not None, text
    assert 1000 * int(found[1]) == pytest.approx(int(found[3]) / (float(found[4]) / 100), rel=0.01)
    assert "It is set by `" in text
    assert 'on_infeasible="minimum"' in text


def test_minimum_is_taken_with_a_warning_where_asked(stack: Any) -> None:
    model, loss = stack
    compiled = _compiled(loss, memory_budget=0.001, on_infeasible="minimum")
    with pytest.warns(UserWarning, match="Taking the lowest plan"):
        compiled()
    assert _peak(compiled, model) < 0.5 * _peak(_compiled(loss), model)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> remat.CheckpointPolicy:
    policy = remat.CheckpointPolicy
    return policy.MUST_SAVE if op is torch.ops.aten.addmm.default else policy.PREFER_RECOMPUTE


def test_policies_that_keep_the_minimum_up_are_named_with_line_bytes_and_regions(stack: Any) -> None:
    model, _ = stack
    x = torch.randn(4096, 32)
    regions = [remat.checkpoint_region(policy=keep_products, name="mine")] * 3
    regions += [remat.checkpoint_region(policy=remat.policies.save_matmuls(), name="other")]

    def loss() -> torch.Tensor:
        h = x
        for keep, block in zip(regions, model, strict=False):
            h = keep(block.forward)(h)
        return h.square().mean()

    with pytest.raises(BackendCompilerFailed) as caught:
        _compiled(loss, memory_budget=0.01)()
    text = str(caught.value.inner_exception)
    assert re.search(r"Policies insist on keeping \d+\.\d\d MiB of that:\n", text), text
    line = keep_products.__code__.co_firstlineno
    mine = rf"MiB  keep_products \({__file__}:{line}\) says MUST_SAVE: `addmm.*` and \d+ more in 3 regions from mine to"
    assert re.search(mine, text), text
    assert re.search(r"MiB  save_matmuls\(\) says MUST_SAVE: `addmm_\d+`.* in region other", text), text
    stated = [float(number) for number in re.findall(r"(\d+\.\d\d) MiB  (?:keep_products|save_matmuls)", text)]
    total = re.search(r"keeping (\d+\.\d\d) MiB", text)
    assert total is not None
    assert sum(stated) == pytest.approx(float(total[1]), abs=0.02)


def test_minimum_without_policies_names_none(stack: Any) -> None:
    _, loss = stack
    with pytest.raises(BackendCompilerFailed) as caught:
        _compiled(loss, memory_budget=0.001)()
    assert "insist" not in str(caught.value.inner_exception)


# --- stored plans ------------------------------------------------------------------------------------------------


def _plan_of(model: nn.Module, x: torch.Tensor, folder: Path) -> remat.Plan:
    compiled = _compiled(lambda: model(x).square().mean(), memory_budget=0.8, dump=folder.with_suffix(""))
    compiled()
    (path,) = folder.with_suffix("").glob("*.json")
    return remat.Plan.load(path)


def test_stored_plan_is_applied_as_it_is(stack: Any, tmp_path: Path) -> None:
    model, loss = stack
    _compiled(loss, memory_budget=0.4, dump=tmp_path / "first")()
    (path,) = (tmp_path / "first").glob("*.json")
    expected = _gradients(_compiled(loss), model)
    applied = _compiled(loss, plan=path, dump=tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(_gradients(applied, model), expected, strict=True))
    (again,) = (tmp_path / "again").glob("*.json")
    assert remat.Plan.load(again) == remat.Plan.load(path)


def test_plan_for_another_graph_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    plan = _plan_of(_layers(2), torch.randn(8, 32), tmp_path / "plan.json")
    model, x = _layers(2), torch.randn(16, 32)
    with pytest.raises(BackendCompilerFailed) as caught:
        _compiled(lambda: model(x).square().mean(), plan=plan)()
    text = str(caught.value.inner_exception)
    assert isinstance(caught.value.inner_exception, remat.PlanMismatch)
    assert "made for another graph; the first difference is at node" in text
    assert "float32[8, 32]" in text
    assert "float32[16, 32]" in text


def test_damaged_plan_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 1, "decisions": []}')
    with pytest.raises(OptionError, match=r"plan=.*plan\.json' cannot be read: .*this plan is damaged"):
        Options.parse({"plan": path})


# --- a margin for what a compiler does --------------------------------------------------------------------------------


def test_reading_a_budget_loads_no_planner() -> None:
    found = "[name for name in sys.modules if name.startswith('remat.passes.search')]"
    code = f"import sys, remat.passes.budgets.budget; found = {found}; assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


def _planner(function: Any, *args: torch.Tensor, fuses: bool) -> Planner:
    graph = capture(function, *args).classify()
    costs = price(graph, Roofline({"cpu": Machine(2.0**35, 2.0**34)}, fuses=fuses), fuses=fuses)
    storages = find_storages(graph, Executor(fuses=fuses, overwrites=not fuses))
    return Planner(Bench(FlowProblem.build(graph, find_constraints(graph), costs), storages))


def _products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x.sum()


def test_least_budget_that_an_error_names_for_a_compiler_that_fuses_is_accepted() -> None:
    x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    planner = _planner(_products, x, weight, fuses=True)
    predicted = planner.lowest.peak_bytes
    with pytest.raises(remat.InfeasibleBudget) as caught:
        lowest_or_error(Budget("tight", num_bytes=predicted, margin=0.07), planner, predicted)
    text = str(caught.value)
    assert f"({predicted} bytes), to which the compiler may add " in text
    least = int(re.search(r"Give at least (\d+) bytes", text)[1])
    assert predicted < least < 1.1 * predicted
    budget = Budget("least", num_bytes=least, margin=0.07)
    assert lowest_or_error(budget, planner, least) is planner.lowest
    assert planner.within_if_any(budget.safe_bytes(planner.storages, least)).peak_bytes <= least * 0.93


def test_budget_that_is_a_byte_too_small_can_be_told_from_the_lowest_peak() -> None:
    planner = _planner(_products, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)), fuses=False)
    lowest = planner.lowest.peak_bytes
    with pytest.raises(remat.InfeasibleBudget) as caught:
        lowest_or_error(Budget("tight", num_bytes=lowest - 1), planner, lowest - 1)
    text = str(caught.value)
    assert f"({lowest - 1} bytes), but the lowest" in text and f"({lowest} bytes)." in text
    assert "0.00 MiB" not in text


def test_error_says_how_much_of_what_is_alive_it_does_not_list_and_where_the_rest_comes_from() -> None:
    planner = _planner(_products, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)), fuses=False)
    whole = planner.without_recompute
    alive = whole.simulation.alive_at(whole.simulation.peak_moment)
    *lines, last = alive_lines(planner.problem.graph, alive)
    assert len(lines) == 5 < len(alive)
    assert all(f"{__file__}:" in line for line in lines)
    assert last == f"  ... and {len(alive) - 5} more, {size(sum(m.num_bytes for m in alive[5:]))}"
    assert len(list(alive_lines(planner.problem.graph, alive[:5]))) == 5


@pytest.mark.parametrize("fuses", [False, True])
def test_least_fraction_that_an_error_names_is_accepted(fuses: bool) -> None:
    planner = _planner(_products, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)), fuses=fuses)
    budget = Budget("0.01", fraction=0.01, margin=0.07 * fuses)
    with pytest.raises(remat.InfeasibleBudget) as caught:
        lowest_or_error(budget, planner, budget.resolve(planner))
    given = float(re.search(r"Give at least (0\.\d+) or \d+ bytes", str(caught.value))[1])
    least = replace(budget, fraction=given)
    assert lowest_or_error(least, planner, least.resolve(planner)) is planner.lowest


def test_warning_that_the_lowest_plan_is_taken_does_not_advise_to_ask_for_it() -> None:
    planner = _planner(_products, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)), fuses=False)
    with pytest.warns(UserWarning, match="the lowest activation peak found") as caught:
        lowest_or_error(Budget("1KiB", num_bytes=1024, take_minimum=True), planner, 1024)
    assert not re.search("Give at least|or set", str(caught[0].message))


def test_all_that_a_step_takes_is_a_budget_without_a_margin() -> None:
    planner = _planner(lambda x: x.sort(0).values.sum(), torch.randn(64, 64, requires_grad=True), fuses=True)
    assert planner.lowest.peak_bytes == planner.without_recompute.peak_bytes
    budget = Budget("1.0", fraction=1.0, margin=0.07)
    assert lowest_or_error(budget, planner, budget.resolve(planner)) is planner.lowest


def test_least_budget_that_an_error_names_may_be_given() -> None:
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    planner = _planner(_products, x, weight, fuses=True)
    with pytest.raises(remat.InfeasibleBudget, match="Give at least 1024 bytes"):
        lowest_or_error(Budget("1B", num_bytes=1), planner, 1)
    assert parse_budget(1024).num_bytes == 1024


def test_plan_says_what_it_adds_and_what_no_plan_within_its_budget_undercuts() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layers(x).sum()

    (plan,) = remat.explain(loss, torch.randn(64, 32), memory_budget=0.6, inner="aot_eager").plans
    assert 0 < plan.least_extra_seconds <= plan.extra_seconds
    assert f"adds {1e3 * plan.extra_seconds:.2f} ms (estimated), no plan within it less than" in str(plan)
    (free,) = remat.explain(loss, torch.randn(64, 32), inner="aot_eager").plans
    assert free.least_extra_seconds is None
    assert "no plan within it" not in str(free)


def _classified() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A few layers, and a loss over so many classes that it sets the peak."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(8)))
    head = nn.Linear(64, 400)

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(blocks(x)), labels)

    return loss, torch.randn(512, 64), torch.randint(400, (512,))


def test_of_stages_in_a_row_that_are_as_high_the_last_has_the_peak() -> None:
    """The gradient of a loss and the softmax are alive at two of them; only after the second is the softmax free."""
    planner = _planner(*_classified(), fuses=False)
    for offer in (planner.without_recompute, *planner.dearer_cuts[:2]):
        stage = peak_stage(planner.bench, offer.simulation)
        root = planner.problem.graph.nodes[planner.bench.scheduler.roots[stage]]
        assert planner.problem.graph.nodes[offer.simulation.order[offer.simulation.peak_moment]] is not root
        assert root.target is torch.ops.aten._log_softmax_backward_data.default


def test_bound_counts_what_the_stage_of_the_peak_takes() -> None:
    loss, *args = _classified()
    (plan,) = remat.explain(loss, *args, memory_budget=0.5, inner="aot_eager").plans
    assert plan.peak.node == "nll_loss_backward"
    assert plan.extra_seconds <= 1.1 * plan.least_extra_seconds
