"""Sizes that change from call to call, and sizes that only the data tells: gradients are those of static shapes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.dynamic_programs import PROGRAMS, Program, batch, data_dependence_captured, train, unmarked
from torch._dynamo.exc import BackendCompilerFailed

import remat
from remat.passes.shared.errors import InfeasibleBudget, OptionError
from remat.report.data.collecting import collected

SIZES = (12, 7, 30)
MODES = ("dynamic=True", "mark_dynamic", "automatic")
BUDGETS: tuple[Any, ...] = (None, 0.45, 12_000)


def assert_gradients_agree(program: Program, mode: str, inner: str, budget: Any) -> None:
    """Fail unless every step's gradients are those of the engine without remat and without regions, and eager's."""
    dynamic = True if mode == "dynamic=True" else None
    marks = mode == "mark_dynamic"
    options = {"inner": inner, "memory_budget": budget, "on_infeasible": "minimum"}

    def with_remat(model: Any) -> Any:
        return torch.compile(model, backend="remat", options=options, dynamic=dynamic, fullgraph=True)

    def without(model: Any) -> Any:
        return torch.compile(model, backend=inner, dynamic=dynamic, fullgraph=True)

    with data_dependence_captured() if program.is_unbacked else nullcontext():
        ours = train(with_remat, program.make, remat.checkpoint_region, SIZES, marks)
        theirs = train(without, program.make, unmarked, SIZES, marks)
    exact = {"rtol": 0, "atol": 0} if inner == "aot_eager" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **exact)
    if not program.is_random:
        eager = train(lambda model: model, program.make, unmarked, SIZES, False)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


QUICK = {
    "aot_eager": {
        ("layers", "automatic", 12_000),
        ("attention", "mark_dynamic", None),
        ("sizes_in_arithmetic", "dynamic=True", None),
        ("region", "automatic", 0.45),
        ("policies", "mark_dynamic", 0.45),
        ("nested_regions", "dynamic=True", None),
        ("shared_module_called_twice", "automatic", None),
        ("dropout_in_a_region", "dynamic=True", 0.45),
        ("nonzero", "dynamic=True", 12_000),
        ("nonzero_inside_a_region", "automatic", None),
        ("masked_select", "automatic", None),
        ("boolean_index", "dynamic=True", 12_000),
        ("item", "mark_dynamic", None),
        ("dropout_of_unknown_size", "dynamic=True", None),
    },
    "inductor": {("nonzero", "dynamic=True", None)},
}
"""What runs by default: a budget takes seconds to plan, and inductor takes them to compile."""


def cases(inner: str) -> list[Any]:
    """All programs, modes and budgets."""
    rows = [(name, mode, budget) for name in PROGRAMS for mode in MODES for budget in BUDGETS]
    # AOTAutograd itself makes a constant of the size that it selects from, which the mark forbids.
    rows = [row for row in rows if row[:2] != ("masked_select", "mark_dynamic")]
    return [pytest.param(*row, marks=() if row in QUICK[inner] else (pytest.mark.slow,)) for row in rows]


@pytest.mark.filterwarnings("ignore:memory_budget=")
@pytest.mark.parametrize(("name", "mode", "budget"), cases("aot_eager"))
def test_gradients_do_not_depend_on_how_sizes_are_known(name: str, mode: str, budget: Any) -> None:
    assert_gradients_agree(PROGRAMS[name], mode, "aot_eager", budget)


@pytest.mark.filterwarnings("ignore:memory_budget=")
@pytest.mark.parametrize(("name", "mode", "budget"), cases("inductor"))
def test_gradients_do_not_depend_on_how_sizes_are_known_to_inductor(name: str, mode: str, budget: Any) -> None:
    assert_gradients_agree(PROGRAMS[name], mode, "inductor", budget)


# ------------------------------------------------------------------------------------------------- symbolic numbers


def planned(name: str, sizes: Any = (12,), **options: Any) -> list[remat.Plan]:
    """The plans that compiling a program for some sizes leads to."""
    program = PROGRAMS[name]

    def with_remat(model: Any) -> Any:
        given = {"inner": "aot_eager", **options}
        return torch.compile(model, backend="remat", options=given, dynamic=True, fullgraph=True)

    with data_dependence_captured(), collected() as graphs:
        train(with_remat, program.make, remat.checkpoint_region, sizes, False)
    return [graph.plan for graph in graphs]


@pytest.mark.parametrize("name", ["sizes_in_arithmetic", "item", "nonzero"])
def test_symbolic_number_is_free_and_no_tensor_is_kept_in_its_stead(name: str) -> None:
    """If running anything again costs nothing, nothing that is only needed for a size is kept."""
    (plan,) = planned(name, cost_model=lambda call: 0.0)
    assert not [d for d in plan.decisions if d.op.startswith(("aten.sym_", "<built-in", "_operator"))]
    assert all(d.reason is not remat.passes.graph.constraints.Reason.ON_CUT for d in plan.saved)


# ------------------------------------------------------------------------------------------------- sizes of data


def unbounded(x: torch.Tensor) -> torch.Tensor:
    num_rows = x.abs().sum().ceil().to(torch.int64).item()
    return (x.sum(0).expand(num_rows, -1).sin().exp() * x.mean()).sum()


def compile_unbounded(**options: Any) -> remat.Plan:
    with data_dependence_captured(), collected() as graphs:
        step = torch.compile(unbounded, backend="remat", options={"inner": "aot_eager", **options}, fullgraph=True)
        step(batch(12)).backward()
    return graphs[0].plan


def test_size_of_a_selection_is_bounded_by_what_is_selected_from() -> None:
    (plan,) = planned("nonzero", memory_budget="1MB")
    known = {symbol.origin: symbol for symbol in plan.symbols}
    rows, found = known["size of the example"], known["upper bound"]
    assert found.bound == rows.name
    assert found.value == rows.value == 12
    assert plan.at({rows.name: 50}).symbols[-1].value == 50, "the bound moves with the size"
    assert all(found.name not in guard for guard in plan.guards), "what only the data tells cannot be guarded on"


def test_mask_selects_no_more_than_it_has_elements() -> None:
    (plan,) = planned("boolean_index", memory_budget="1MB")
    known = {symbol.origin: symbol for symbol in plan.symbols}
    assert known["upper bound"].bound == known["size of the example"].name


def test_asserted_bound_is_taken_for_a_size_of_data() -> None:
    (plan,) = planned("item", memory_budget="1MB")
    assert {s.bound for s in plan.symbols if s.origin == "upper bound"} == {plan.symbols[0].name}


def test_budget_with_a_size_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        compile_unbounded(memory_budget=0.5)
    text = str(caught.value.inner_exception)
    assert isinstance(caught.value.inner_exception, OptionError)
    assert "memory_budget=0.5: the sizes of some values are known only once the data is there" in text
    assert "(aten.expand.default)" in text
    assert "test_dynamic.py:" in text
    assert 'options={"unbacked_hint": n}' in text


def test_size_of_which_nothing_is_known_is_owned_up_to_without_a_budget() -> None:
    plan = compile_unbounded()
    assert [symbol.origin for symbol in plan.symbols] == ["nothing is known of it; a guess"]
    assert "= 4096 (nothing is known of it; a guess)" in str(plan)


def test_option_says_how_large_a_size_of_data_gets() -> None:
    plan = compile_unbounded(memory_budget="1MB", unbacked_hint=100)
    (symbol,) = plan.symbols
    assert (symbol.value, symbol.origin) == (100, "option unbacked_hint")
    assert "= 100 (option unbacked_hint)" in str(plan)
    assert plan.at({symbol.name: 200}).peak.num_bytes > plan.peak.num_bytes


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "many"])
def test_wrong_hint_says_what_is_allowed(value: Any) -> None:
    with pytest.raises(OptionError, match=r"unbacked_hint=.*: expected None, or a whole number from 1"):
        remat.partitioner(unbacked_hint=value)


def test_budget_that_no_size_of_the_stated_range_may_exceed() -> None:
    """`mark_dynamic(min, max)` asks for one graph: the plan is made for the largest size, or refused."""

    def step(num_bytes: int, **more: Any) -> list[remat.Plan]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = PROGRAMS["layers"].make(unmarked)
        options = {"inner": "aot_eager", "memory_budget": num_bytes, **more}
        compiled = torch.compile(model, backend="remat", options=options, fullgraph=True)
        with collected() as graphs:
            for size in (12, 100, 7):
                x = batch(size)
                torch._dynamo.mark_dynamic(x, 0, min=2, max=200)
                compiled(x).backward()
        return [graph.plan for graph in graphs]

    (plan,) = step(150_000)
    assert plan.guards == ()
    assert plan.at({plan.symbols[0].name: 200}).peak.num_bytes <= 150_000
    with pytest.raises(BackendCompilerFailed) as caught:
        step(50_000)
    assert isinstance(caught.value.inner_exception, InfeasibleBudget)
    with pytest.warns(UserWarning, match="Taking the lowest plan"):
        (plan,) = step(50_000, on_infeasible="minimum")
    assert plan.guards == ()
