"""Budgets of regions: what is refused, whose memory counts, that each bound holds, and that eager obeys them too."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import measure
from support.harness import count_backward_ops
from support.tuned import search_less
from torch import nn

import remat
from remat.passes.budgets.budget import RegionShare
from remat.passes.graph.constraints import Reason
from remat.passes.plans.contents import Action
from remat.passes.shared.errors import InfeasibleBudget, OptionError, RematError
from remat.passes.shared.readable import size
from remat.regions.carrier import operator_name
from remat.regions.region_options import RegionOptions

MUST_SAVE, PREFER_SAVE = remat.CheckpointPolicy.MUST_SAVE, remat.CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE, PREFER_RECOMPUTE = remat.CheckpointPolicy.MUST_RECOMPUTE, remat.CheckpointPolicy.PREFER_RECOMPUTE
aten = torch.ops.aten

# Dynamo looks at the `.grad` of every tensor that it is given, and hides a warning that is an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search less: bounds must hold however long the planner looks for something faster."""
    search_less(monkeypatch, 20_000)


class Block(nn.Module):
    """Normalise, widen, narrow, drop, add: the shape of a transformer's layer."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = norm(16), dropout
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Stack(nn.Sequential):
    """Some blocks, one after the other."""

    def __init__(self, num_blocks: int = 3, **options: Any) -> None:
        super().__init__(*(Block(**options) for _ in range(num_blocks)))


def batch() -> torch.Tensor:
    return torch.randn(128, 16, generator=torch.Generator().manual_seed(7)).requires_grad_()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def plan_of(folder: Path) -> remat.Plan:
    (file,) = folder.glob("*.json")
    return remat.Plan.from_json(file.read_text())


def compiled(model: Any, folder: Path | None = None, **options: Any) -> Any:
    options = {"inner": "aot_eager", **options, **({} if folder is None else {"dump": str(folder)})}
    return torch.compile(model, backend="remat", options=options, fullgraph=True)


def compiled_plan(model: Any, folder: Path, **options: Any) -> remat.Plan:
    compiled(model, folder, **options)(batch()).sum().backward()
    return plan_of(folder)


def gradients(model: nn.Module, call: Any = None, seed: int = 3) -> list[torch.Tensor]:
    """Output, gradients, buffers and the next random number of a step."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = batch()
    out = (call or model)(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *[p.grad for p in model.parameters()], *model.buffers(), torch.rand(2)]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def share_without_recompute(make: Callable[[], nn.Module], pattern: str, folder: Path) -> tuple[RegionShare, ...]:
    """What the regions take if nothing is recomputed: the budgets that 100 % stands for."""
    model = made(make)
    remat.apply(model, pattern, memory_budget=1.0)
    return compiled_plan(model, folder).shares


def prefer_save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return PREFER_SAVE


# -------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, float("nan"), True, 1, -4096, "2 GiBs", "0%", [0.5]])
def test_nonsense_is_refused_where_the_region_is_marked(budget: Any) -> None:
    with pytest.raises(OptionError, match=r"memory_budget=.*expected None .*a float above 0\.0 .*\"2GiB\""):
        remat.checkpoint_region(memory_budget=budget)(lambda x: x)
    with pytest.raises(OptionError, match="memory_budget="):
        remat.apply(Stack(), "*", memory_budget=budget)


def test_regions_that_differ_in_budget_are_different_text_to_caches() -> None:
    budgets = (None, 0.5, 0.25, "50%", "1MiB", 4096)
    assert len({operator_name(RegionOptions(name="r", memory_budget=b)) for b in budgets}) == len(budgets)


def test_refused_budget_leaves_the_model_unmarked() -> None:
    model = Stack()
    with pytest.raises(OptionError):
        remat.apply(model, "*", memory_budget=2.0)
    assert len(remat.remove(model)) == 0


# -------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize("fraction", [0.9, 0.6, 0.45])
def test_share_of_a_single_region_holds_in_what_is_measured(fraction: float, tmp_path: Path) -> None:
    model = made(Stack)
    remat.apply(model, "", memory_budget=fraction, policy=prefer_save)
    call = compiled(model, tmp_path)
    assert_same(gradients(model, call), gradients(made(Stack)))
    (share,) = plan_of(tmp_path).shares
    peak = measure.activation_peak(lambda: call(batch()).sum(), model.parameters(), counter="dispatch")
    outside = batch().nbytes + 64  # the batch itself, made within the step, and the scalars of the loss
    assert peak.activation_bytes - outside <= share.predicted_bytes <= share.budget_bytes


def test_fraction_is_of_the_share_without_recompute(tmp_path: Path) -> None:
    whole = share_without_recompute(Stack, "0", tmp_path / "whole")
    model = made(Stack)
    remat.apply(model, "0", memory_budget="95%")
    plan = compiled_plan(model, tmp_path / "part")
    assert plan.shares[0].budget_bytes == int(0.95 * whole[0].budget_bytes)


def test_each_of_several_regions_keeps_within_its_own_budget(tmp_path: Path) -> None:
    make = functools.partial(nn.Sequential, Stack(), Stack())
    budgets = {"0": 0.5, "1": 0.7}
    model = made(make)
    for path, budget in budgets.items():
        remat.apply(model, path, memory_budget=budget, policy=prefer_save)
    plan = compiled_plan(model, tmp_path)
    assert [share.path for share in plan.shares] == ["0", "1"]
    assert all(0 < share.predicted_bytes <= share.budget_bytes for share in plan.shares)
    assert plan.shares[0].budget_bytes < plan.shares[1].budget_bytes


def test_budget_binds_its_region_only(tmp_path: Path) -> None:
    """Outside a budgeted region what a policy prefers is as good as an order, as it is without any budget."""
    model = made(functools.partial(nn.Sequential, Stack(2), Stack(2)))
    remat.apply(model, "0", memory_budget=0.6, policy=prefer_save)
    remat.apply(model, "1", policy=prefer_save)
    plan = compiled_plan(model, tmp_path)
    reasons = {path: {d.reason for d in plan.decisions if d.region == path} for path in ("0", "1")}
    assert Reason.AGAINST_SAVE in reasons["0"]
    assert Reason.POLICY_SAVE in reasons["1"] and Reason.AGAINST_SAVE not in reasons["1"]
    saved = [d for d in plan.decisions if d.region == "1" and d.reason is Reason.POLICY_SAVE]
    assert len(saved) > 6 and all(d.action is Action.SAVE for d in saved)


def test_nested_budgets_all_hold(tmp_path: Path) -> None:
    model = made(Stack)
    remat.apply(model, "1", memory_budget=0.95)
    remat.apply(model, "", memory_budget=0.45, name="stack")
    call = compiled(model, tmp_path)
    assert_same(gradients(model, call), gradients(made(Stack)))
    plan = plan_of(tmp_path)
    assert [share.path for share in plan.shares] == ["stack", "stack/1"]
    assert all(share.predicted_bytes <= share.budget_bytes for share in plan.shares)
    assert plan.shares[1].predicted_bytes < plan.shares[0].predicted_bytes


def test_region_and_graph_budgets_hold_together(tmp_path: Path) -> None:
    make = functools.partial(nn.Sequential, Stack(), Stack())
    model = made(make)
    remat.apply(model, "0", memory_budget=0.5, policy=prefer_save)
    call = compiled(model, tmp_path, memory_budget=0.45)
    assert_same(gradients(model, call), gradients(made(make)))
    plan = plan_of(tmp_path)
    assert plan.budget_bytes is not None and plan.peak.num_bytes <= plan.budget_bytes
    assert plan.shares[0].predicted_bytes <= plan.shares[0].budget_bytes
    peak = measure.activation_peak(lambda: call(batch()).sum(), model.parameters(), counter="dispatch")
    assert peak.activation_bytes - batch().nbytes - 64 <= plan.budget_bytes


def test_calls_of_one_region_are_bounded_one_by_one(tmp_path: Path) -> None:
    stack = made(Stack)
    part = remat.checkpoint_region(name="part", memory_budget=0.6)(stack.forward)
    plan = compiled_plan(lambda x: part(part(x)), tmp_path)
    assert [share.path for share in plan.shares] == ["part", "part#2"]
    assert all(0 < share.predicted_bytes <= share.budget_bytes for share in plan.shares)


def save_narrow(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_SAVE if op is aten.gelu.default else PREFER_RECOMPUTE


def recompute_gelu(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_RECOMPUTE if op is aten.gelu.default else PREFER_SAVE


def test_must_save_holds_under_a_budget(tmp_path: Path) -> None:
    model = made(Stack)
    remat.apply(model, "", memory_budget=0.7, policy=save_narrow)
    plan = compiled_plan(model, tmp_path)
    gelus = [d for d in plan.decisions if d.op == "aten.gelu.default"]
    assert len(gelus) == 3 and all(d.action is Action.SAVE and d.num_recomputes == 0 for d in gelus)


def test_must_recompute_holds_where_memory_is_plenty(tmp_path: Path) -> None:
    model = made(Stack)
    remat.apply(model, "", memory_budget=1.0, policy=recompute_gelu)
    plan = compiled_plan(model, tmp_path)
    gelus = [d for d in plan.decisions if d.op == "aten.gelu.default"]
    assert len(gelus) == 3 and all(d.action is Action.RECOMPUTE for d in gelus)


def test_preference_that_loses_to_the_budget_says_so(tmp_path: Path) -> None:
    model = made(Stack)
    remat.apply(model, "", memory_budget=0.5, policy=prefer_save)
    plan = compiled_plan(model, tmp_path)
    lost = [d for d in plan.decisions if d.reason is Reason.AGAINST_SAVE]
    assert lost and all(d.action is Action.RECOMPUTE and d.policy == "PREFER_SAVE" for d in lost)


def test_budget_below_the_minimum_names_region_share_and_op() -> None:
    model = made(Stack)
    remat.apply(model, "1", memory_budget="4KiB")
    with pytest.raises(Exception, match="lowest share found") as caught:
        compiled(model)(batch())
    text = str(caught.value)
    assert "InfeasibleBudget: memory_budget='4KiB' of region 1: that is 4.00 KiB (4096 bytes), but the" in text
    assert "It is set by `" in text and "where these of the region are alive:" in text
    assert 'on_infeasible="minimum"' in text


def test_fraction_below_the_minimum_of_a_region_says_of_what_it_is_one() -> None:
    model = made(Stack)
    remat.apply(model, "1", memory_budget=0.01)
    with pytest.raises(Exception, match="lowest share found") as caught:
        compiled(model)(batch())
    pattern = r"bytes\) of \S+ KiB without recomputation, but the lowest share found is .*, \d+\.\d% of that\."
    assert re.search(pattern, str(caught.value))


def test_policy_that_keeps_a_share_up_is_named() -> None:
    model = made(Stack)
    remat.apply(model, "", memory_budget="40KiB", policy=save_narrow)
    with pytest.raises(Exception, match="lowest share found") as caught:
        compiled(model)(batch())
    line = save_narrow.__code__.co_firstlineno
    assert re.search(rf"KiB  save_narrow \({__file__}:{line}\) says MUST_SAVE: .*`gelu", str(caught.value))


def test_lowest_plan_is_taken_if_asked_for(tmp_path: Path) -> None:
    model = made(Stack)
    remat.apply(model, "1", memory_budget="4KiB")
    call = compiled(model, tmp_path, on_infeasible="minimum")
    with pytest.warns(UserWarning, match=r"of region 1.*lowest share found"):
        ours = gradients(model, call)
    assert_same(ours, gradients(made(Stack)))
    (share,) = plan_of(tmp_path).shares
    assert share.budget_bytes == 4096 < share.predicted_bytes


def test_graph_budget_that_region_budgets_rule_out_names_the_regions() -> None:
    model = made(Stack)
    remat.apply(model, "1", memory_budget=0.95)
    with pytest.raises(Exception, match="have to hold at the same time: 1"):
        compiled(model, memory_budget="16KiB")(batch())


def test_shares_are_part_of_the_stored_plan_and_its_summary(tmp_path: Path) -> None:
    (share,) = (plan := _stored(tmp_path)).shares
    assert remat.Plan.from_json(plan.to_json()) == plan
    assert f"region              0: {size(share.predicted_bytes)} of {size(share.budget_bytes)}\n" in plan.summary()


def _stored(folder: Path) -> remat.Plan:
    model = made(Stack)
    remat.apply(model, "0", memory_budget=0.95)
    return compiled_plan(model, folder)


def test_plan_with_shares_can_be_applied_again(tmp_path: Path) -> None:
    plan = _stored(tmp_path / "first")
    model = made(Stack)
    remat.apply(model, "0", memory_budget=0.95)
    torch._dynamo.reset()
    assert compiled_plan(model, tmp_path / "second", plan=plan).decisions == plan.decisions


def test_region_budget_holds_for_inductor(tmp_path: Path) -> None:
    model = made(Stack)
    remat.apply(model, "", memory_budget=0.8, policy=prefer_save)
    call = compiled(model, tmp_path, inner="inductor")
    torch.testing.assert_close(gradients(model, call), gradients(made(Stack)))
    (share,) = plan_of(tmp_path).shares
    peak = measure.activation_peak(lambda: call(batch()).sum(), model.parameters(), counter="allocator")
    assert peak.activation_bytes - batch().nbytes - 64 <= share.budget_bytes


# -------------------------------------------------------------------------------------------------- eager


@pytest.mark.parametrize("fraction", [0.8, 0.5])
def test_eager_region_keeps_within_its_budget_and_gives_the_same_bits(fraction: float, tmp_path: Path) -> None:
    (whole,) = share_without_recompute(Stack, "", tmp_path)
    model = made(Stack)
    remat.apply(model, "", memory_budget=fraction)
    assert_same(gradients(model), gradients(made(Stack)))
    peak = measure.activation_peak(lambda: model(batch()).sum(), model.parameters(), counter="dispatch")
    assert peak.activation_bytes - batch().nbytes - 64 <= fraction * whole.budget_bytes


def test_eager_region_decides_as_the_compiled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = remat.policies.save_matmuls()
    eager = made(Stack)
    remat.apply(eager, "", memory_budget=0.7, policy=policy, name="stack")
    monkeypatch.setenv("REMAT_DUMP", str(tmp_path / "eager"))
    gradients(eager)
    monkeypatch.delenv("REMAT_DUMP")
    whole = made(Stack)
    remat.apply(whole, "", policy=policy, name="stack")
    theirs = compiled_plan(whole, tmp_path / "compiled", memory_budget=0.7)
    ours = plan_of(tmp_path / "eager")
    assert ours.budget_bytes == theirs.budget_bytes and ours.order == theirs.order
    assert _without_lines(ours) == _without_lines(theirs)


def _without_lines(plan: remat.Plan) -> list[dict[str, Any]]:
    """Decisions, without how the compiler names modules that it reaches by different ways."""
    rows = json.loads(plan.to_json())["decisions"]
    return [{key: value for key, value in row.items() if key != "module"} for row in rows]


@pytest.mark.parametrize("pattern", ["", "*"])
def test_eager_region_moves_state_once_and_replays_randomness(pattern: str) -> None:
    make = functools.partial(Stack, norm=nn.BatchNorm1d, dropout=0.3)
    model = made(make)
    remat.apply(model, pattern, memory_budget=0.98)
    other = made(make)
    for seed in range(2):
        assert_same(gradients(model, seed=seed), gradients(other, seed=seed))
    assert model.eval() and other.eval()
    assert_same(gradients(model), gradients(other))


def test_eager_regions_nest() -> None:
    model = made(Stack)
    remat.apply(model, "1", memory_budget=0.95)
    remat.apply(model, "", memory_budget=0.5)
    assert_same(gradients(model), gradients(made(Stack)))


@pytest.mark.parametrize("policy", [None, remat.policies.save_matmuls()])
def test_budgeted_region_works_inside_an_eager_region_without_budget(policy: Any) -> None:
    make = functools.partial(Stack, dropout=0.3)
    model = made(make)
    remat.apply(model, "1", memory_budget=0.95)
    remat.apply(model, "", policy=policy)
    assert_same(gradients(model), gradients(made(make)))


def test_eager_region_is_planned_once_per_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_DUMP", str(tmp_path))
    region = remat.checkpoint_region(memory_budget=0.9)(lambda x: x.sin().exp().tanh())
    sizes = (8, 16, 8, 16, 8)
    for length in sizes:
        region(torch.randn(length, 4, requires_grad=True)).sum().backward()
    assert len(list(tmp_path.glob("*.json"))) == len(set(sizes))


def test_method_of_many_modules_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_DUMP", str(tmp_path))

    class Layer(nn.Linear):
        @remat.checkpoint_region(memory_budget=0.9)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.sin()).exp().tanh()

    model = made(lambda: nn.Sequential(*(Layer(16, 16) for _ in range(12))))
    model(batch()).sum().backward()
    # The first layer's input is a leaf, which the compiler tells apart.
    assert 1 <= len(list(tmp_path.glob("*.json"))) <= 2


def test_eager_region_runs_backward_twice() -> None:
    region = remat.checkpoint_region(memory_budget=0.9)(lambda x: x.sin().exp().tanh())
    x = batch()
    out = region(x).sum()
    out.backward(retain_graph=True)
    first, x.grad = x.grad, None
    out.backward()
    assert torch.equal(first, x.grad)


def test_eager_region_without_gradients_or_under_transforms_is_plain_code() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    region, x = remat.checkpoint_region(memory_budget=0.9)(function), batch()
    with torch.no_grad():
        assert torch.equal(region(x), function(x))
    ours = torch.func.grad(lambda x: region(x).sum())(x.detach())
    assert torch.equal(ours, torch.func.grad(lambda x: function(x).sum())(x.detach()))


def test_eager_policy_orders_hold_under_the_budget() -> None:
    def make(answer: Any) -> tuple[Any, list[torch.Tensor]]:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            return answer if op is aten.exp.default else PREFER_SAVE

        region = remat.checkpoint_region(memory_budget=1.0, policy=policy)(lambda x: x.cos().exp().sin())
        return region, [batch()]

    def identity(program: Any) -> Any:
        return program

    saved = count_backward_ops(identity, lambda: make(MUST_SAVE))
    again = count_backward_ops(identity, lambda: make(MUST_RECOMPUTE))
    assert saved["aten.exp"] == 0 and again["aten.exp"] == 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    if y.sum() > 0:
        y = y.exp()
    return y


def test_eager_region_that_cannot_be_traced_names_the_line_and_the_way_out() -> None:
    region = remat.checkpoint_region(memory_budget=0.9)(broken)
    line = broken.__code__.co_firstlineno + 2
    pattern = rf"region broken has memory_budget=0.9.*{Path(__file__).name}:{line} cannot be captured: Data-dependent.*"
    with pytest.raises(RematError, match=pattern + "leave out memory_budget"):
        region(batch())


def test_graph_break_in_a_compiled_budgeted_region_is_refused() -> None:
    region = remat.checkpoint_region(memory_budget=0.9)(broken)
    call = torch.compile(lambda x: region(x) * 2, backend="remat", options={"inner": "aot_eager"})
    with pytest.raises(RematError, match=r"region broken has memory_budget=0.9.*cannot be captured"):
        call(batch())


def test_error_of_the_program_is_the_programs_own() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        remat.checkpoint_region(memory_budget=0.9)(fails)(batch())


def test_eager_budget_below_the_minimum_names_the_region() -> None:
    region = remat.checkpoint_region(name="mlp", memory_budget="2KiB")(made(Stack))
    with pytest.raises(InfeasibleBudget, match=r"region mlp: memory_budget='2KiB'.*lowest activation peak found"):
        region(batch())


def test_eager_budget_below_the_minimum_names_no_option_that_regions_do_not_have() -> None:
    region = remat.checkpoint_region(name="mlp", memory_budget="2KiB")(made(Stack))
    pattern = r'torch\.compile\(\.\.\., backend="remat"\), whose option on_infeasible="minimum" takes the lowest plan'
    with pytest.raises(InfeasibleBudget, match=pattern) as caught:
        region(batch())
    assert "or set on_infeasible" not in str(caught.value)


def test_double_backward_through_an_eager_budget_names_the_region_and_the_way_out() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    region = remat.checkpoint_region(name="mlp", memory_budget=1.0)(lambda x: (x @ weight).tanh().sin())
    x = torch.randn(8, 8, requires_grad=True)
    for wanted in (x, weight):
        (grad,) = torch.autograd.grad(region(x.exp()).sum(), wanted, create_graph=True)
        with pytest.raises(RematError, match=r"region mlp has memory_budget=1.0.*create_graph=True.*by a policy"):
            grad.sum().backward()


def test_double_backward_beside_an_eager_budget_works() -> None:
    region = remat.checkpoint_region(memory_budget=1.0)(lambda x, y: (x.tanh().sin(), y))
    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    _, passed = region(x, y.exp())
    (grad,) = torch.autograd.grad(passed.sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), y)
    assert torch.equal(second, y.exp())


def test_region_budget_counts_when_torch_compile_runs_graphs_eagerly() -> None:
    region = remat.checkpoint_region(name="tiny", memory_budget="2KiB")(lambda x: x.sin().exp().tanh())
    with warnings.catch_warnings(), pytest.raises(InfeasibleBudget, match="region tiny"):
        torch.compile(lambda x: region(x), backend="eager")(batch())


def test_budget_is_not_forgotten_where_nothing_is_compiled() -> None:
    region = remat.checkpoint_region(name="part", memory_budget=0.9)(lambda x: x.sin().exp().tanh())
    with torch.compiler.set_stance("force_eager"), pytest.raises(RematError, match=r"region part .* switched off here"):
        region(batch())
