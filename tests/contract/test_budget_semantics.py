"""A budget changes what is kept and when things run, never a number: programs at every budget against no budget."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness import Record, assert_records_agree, take_step
from support.region_fuzz import STEPS_WITH_STATE, RandomProgram
from support.region_programs import PROGRAMS
from torch import nn

import remat

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")

BUDGETS = (0.9, 0.6, 0.35, 1e-9)
"""Of the peak without recomputation; the last one stands for the lowest peak there is, and takes longest to find."""

MUST_SAVE, PREFER_SAVE = remat.CheckpointPolicy.MUST_SAVE, remat.CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE, PREFER_RECOMPUTE = remat.CheckpointPolicy.MUST_RECOMPUTE, remat.CheckpointPolicy.PREFER_RECOMPUTE


def step(
    make: Any, *, inner: str = "aot_eager", compile_options: dict[str, Any] | None = None, **options: Any
) -> Record:
    """Take a step with a budget, or with the lowest peak if that is higher."""

    def compile_program(program: Any) -> Any:
        given = {"inner": inner, "on_infeasible": "minimum", **options}
        return torch.compile(
            program,
            backend="remat",
            options=given,
            **({"fullgraph": True} if compile_options is None else compile_options),
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory_budget=.*", category=UserWarning)
        return take_step(compile_program, make)


def assert_same_at_budgets(make: Any, budgets: Any = BUDGETS, **options: Any) -> None:
    expected = step(make, **options)
    for budget in budgets:
        assert_records_agree(step(make, memory_budget=budget, **options), expected, exact=True)


QUICK_PROGRAMS = ("in_place", "batch_norm", "dropout", "routing", "offload", "policies_at_three_levels")


@pytest.mark.parametrize("name", QUICK_PROGRAMS)
def test_programs_with_regions(name):
    assert_same_at_budgets(lambda: PROGRAMS[name].make(remat.checkpoint_region), [0.35])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_regions_at_every_budget(name):
    assert_same_at_budgets(lambda: PROGRAMS[name].make(remat.checkpoint_region))


def random_program(seed: int) -> Any:
    return RandomProgram(seed, remat.checkpoint_region, STEPS_WITH_STATE), (torch.randn(8, 8, requires_grad=True),)


@pytest.mark.parametrize("seed", [0, 2])
def test_random_programs_with_state_discrete_choices_and_policies(seed):
    assert_same_at_budgets(lambda: random_program(seed), [0.6])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_programs_at_every_budget(seed):
    assert_same_at_budgets(lambda: random_program(seed))


# ----------------------------------------------------------------------------------------------- without regions


class Layers(nn.Module):
    """Some layers with dropout and batch norm, one of them called twice."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(num_layers))
        self.register_buffer("num_steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = x + F.dropout(F.gelu(norm(linear(x))), 0.2, True) * self.num_steps
        return self.linears[0](x).tanh()


def layers() -> Any:
    return Layers(), (torch.randn(8, 16, requires_grad=True),)


def in_bfloat16() -> Any:
    return Layers().to(torch.bfloat16), (torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True),)


def complex_numbers() -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x)
        return (z.exp() * z.conj().sin()).abs().log1p() * z.angle().sin()

    return function, (torch.randn(8, 16, 2, requires_grad=True),)


def integer_outputs() -> Any:
    def function(x: torch.Tensor) -> Any:
        y = x.sin().exp().tanh()
        return y.argmax(1), y.exp(), (y > 0.5), y.topk(3)

    return function, (torch.randn(8, 16, requires_grad=True),)


def empty_tensors() -> Any:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sin().exp().tanh() @ x.t(), torch.cat([x, y]).sin().exp().sum()

    return function, (torch.randn(0, 16, requires_grad=True), torch.randn(2, 16, requires_grad=True))


def scalars() -> Any:
    return lambda x: x.sin().exp().tanh().cos(), (torch.randn((), requires_grad=True),)


def nothing_needed() -> Any:
    return lambda x: x + 1.0, (torch.randn(8, 16, requires_grad=True),)


def inputs_changed_in_place() -> Any:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = (x * y.clone()).sin()
        y.mul_(2.0)
        b = (a * y.clone()).exp().tanh()
        y.add_(b.detach())
        return b * y

    return function, (torch.randn(8, 16, requires_grad=True), torch.randn(8, 16))


def views_returned() -> Any:
    def function(x: torch.Tensor) -> Any:
        y = x.sin().exp()
        return y.t(), y[2:], y.view(-1), x[1:]

    return function, (torch.randn(8, 16, requires_grad=True),)


def parts_without_grad() -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.sin().exp().mean()
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.t()
        return (y.float() * scale).tanh().exp() * x.sum(1).detach()

    return function, (torch.randn(8, 16, requires_grad=True),)


OTHERS = [
    layers,
    in_bfloat16,
    complex_numbers,
    integer_outputs,
    empty_tensors,
    scalars,
    nothing_needed,
    inputs_changed_in_place,
    views_returned,
    parts_without_grad,
]


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_programs_without_regions(make):
    assert_same_at_budgets(make, [1e-9] if make is layers else [0.35])


@pytest.mark.slow
@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_programs_without_regions_at_every_budget(make):
    assert_same_at_budgets(make)


@pytest.mark.parametrize("make", [layers, inputs_changed_in_place], ids=lambda make: make.__name__)
def test_with_dynamic_shapes(make):
    assert_same_at_budgets(make, [0.35], compile_options={"dynamic": True})


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo looks at it, at breaks
def test_with_a_graph_break_each_graph_has_the_budget():
    def make() -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = F.dropout(x.sin().exp(), 0.3, True).tanh()
            torch._dynamo.graph_break()
            return F.dropout(y.cos().exp(), 0.3, True).tanh()

        return function, (torch.randn(8, 16, requires_grad=True),)

    assert_same_at_budgets(make, [0.35], compile_options={})


@pytest.mark.parametrize("make", [pytest.param(layers, marks=pytest.mark.slow), inputs_changed_in_place])
def test_inductor_agrees_up_to_rounding(make):
    expected = step(make, inner="inductor")
    assert_records_agree(step(make, inner="inductor", memory_budget=0.35), expected, exact=False)


# ----------------------------------------------------------------------------------------------- policies


def by_op(answers: dict[str, Any]) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return answers.get(op._opname, PREFER_RECOMPUTE)

    return policy


def with_policies() -> Any:
    orders = by_op({"sin": MUST_SAVE, "exp": MUST_RECOMPUTE, "tanh": MUST_SAVE})
    wishes = by_op({"sin": PREFER_SAVE, "exp": PREFER_RECOMPUTE, "tanh": PREFER_SAVE})

    @remat.checkpoint_region(name="orders", policy=orders)
    def ordered(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().exp() * x).tanh().sin().exp()

    @remat.checkpoint_region(name="wishes", policy=wishes)
    def wished(x: torch.Tensor) -> torch.Tensor:
        return ordered((x.sin().exp() * x).tanh().sin().exp().sigmoid())

    return lambda x: wished(ordered(wished(x)).sigmoid()).cos(), (torch.randn(8, 16, requires_grad=True),)


@pytest.mark.parametrize("budget", [0.6, 1e-9])
def test_orders_hold_at_every_budget_and_lost_wishes_are_told(budget, tmp_path: Path):
    expected = step(with_policies)
    assert_records_agree(step(with_policies, memory_budget=budget, dump=str(tmp_path)), expected, exact=True)
    (file,) = tmp_path.glob("*.json")
    decisions = remat.Plan.load(file).decisions
    ordered = [d for d in decisions if d.policy.startswith("MUST")]
    assert {d.policy for d in ordered} == {"MUST_SAVE", "MUST_RECOMPUTE"}
    for d in ordered:
        assert (d.num_recomputes == 0) if d.policy == "MUST_SAVE" else (d.action.name == "RECOMPUTE"), d
    for d in decisions:
        is_lost = d.policy.startswith("PREFER") and (d.action.name == "SAVE") != (d.policy == "PREFER_SAVE")
        told = {"AGAINST_SAVE", "AGAINST_RECOMPUTE", "VIEW", "REGION_OUTPUT"}
        assert not is_lost or d.reason.name in told, d


def test_a_small_budget_overrules_wishes_and_a_large_one_does_not(tmp_path: Path):
    def lost(budget: float, folder: str) -> list[Any]:
        step(with_policies, memory_budget=budget, dump=str(tmp_path / folder))
        (file,) = (tmp_path / folder).glob("*.json")
        return [d for d in remat.Plan.load(file).decisions if d.reason.name == "AGAINST_SAVE"]

    assert lost(1e-9, "small") and not lost(1.0, "large")


def test_second_backward_under_a_budget_with_inductor_is_right_or_one_error() -> None:
    def gradient(**how: Any) -> torch.Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        w, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
        loss = torch.compile(lambda x, w: (((x @ w).sin() @ w).cos() @ w).sum(), **how)(x, w)
        loss.backward(retain_graph=True)
        loss.backward()
        assert w.grad is not None
        return w.grad

    expected = gradient(backend="inductor")
    how = {"backend": "remat", "options": {"memory_budget": 0.95, "on_infeasible": "minimum"}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="memory_budget=.*", category=UserWarning)
        # Kernels are compared with the budget before anybody knows of a second backward.
        with pytest.raises(RuntimeError, match=r"set torch._functorch.config.donated_buffer=False"):
            gradient(**how)
        with torch._functorch.config.patch(donated_buffer=False):
            assert torch.allclose(gradient(**how), expected, rtol=1e-4)
