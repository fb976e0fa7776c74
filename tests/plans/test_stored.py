"""Stored plans: what is said of a damaged file, and of a plan for something else; and that sound ones still apply."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.joints import capture
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import remat
from remat.compiled.options import Options
from remat.passes.budgets.budget import RegionShare
from remat.passes.pipeline import choose, prepare
from remat.passes.plans.contents import Action
from remat.passes.plans.plan import Plan
from remat.passes.plans.request import Prepared, Request
from remat.passes.prices.cost import Flops
from remat.passes.shared.errors import OptionError, PlanMismatch
from remat.passes.shared.executor import Executor
from remat.report.data.collecting import collected

Data = dict[str, Any]
Keys = tuple[str | int, ...]


class Layers(nn.Module):
    """Blocks with wide values inside, of which one is recomputed twice by a plan with a low peak."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Regions(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + remat.checkpoint_region(layer)(x)
        return x.square().mean()


def rows() -> torch.Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="remat", options={"inner": "aot_eager", **options}, fullgraph=True)


def refusal(model: nn.Module, **options: Any) -> str:
    """What applying a plan to a model is refused with."""
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(model, **options)(rows())
    assert isinstance(caught.value.inner_exception, PlanMismatch)
    return str(caught.value.inner_exception)


@cache
def low_plan() -> Plan:
    """The plan with the lowest peak, which recomputes much, some of it more than once."""
    plan = remat.pareto(Layers(), rows(), inner="aot_eager", num_budgets=4, cost_model="flops").points[-1].plan
    assert max(d.num_recomputes for d in plan.decisions) >= 2
    assert plan.phases
    return plan


def data_of(plan: Plan) -> Data:
    return json.loads(plan.to_json())  # type: ignore[no-any-return]


# --- every field has a type ----------------------------------------------------------------------------------------


@cache
def dynamic_plan() -> Plan:
    """A plan with something in every field: symbols, ranges, guards, times and a region with a budget."""
    report = remat.explain(Layers(), rows(), memory_budget="200KB", inner="aot_eager", dynamic=True)
    (plan,) = report.plans
    share = RegionShare("mlp", 1024, 512)
    assert plan.symbols
    assert plan.ranges
    assert plan.guards
    assert plan.times is not None
    return replace(plan, shares=(share,))


WRONG = ("abc", -1, 1.5, True, None, float("nan"), float("inf"), 2**70, [], ["a"], [[1]], {}, {"a": 1})


def paths(value: Any, above: Keys = ()) -> Iterator[Keys]:
    """Every field of JSON data; of lists the first entry."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in items:
        if key not in ("format", "digest"):
            yield (*above, key)
            yield from paths(part, (*above, key))


def text_of(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def at(data: Any, keys: Keys) -> Any:
    for key in keys:
        data = data[key]
    return data


def edited(data: Data, keys: Keys, value: Any) -> Data:
    """The data with another value in one place."""
    found = copy.deepcopy(data)
    at(found, keys[:-1])[keys[-1]] = value
    return found


def complaint(data: Data) -> str:
    """What reading a plan is refused with; empty if it is read, and can be shown."""
    try:
        plan = Plan.from_json(json.dumps(data))
    except ValueError as error:
        return str(error)
    assert str(plan)
    return ""


def fits(old: Any, new: Any, path: str) -> bool:
    """True if one value of JSON may stand where the other does, as far as types go."""
    if new is None or old is None:
        return NULLABLE.match(path) is not None and (new is None or not isinstance(new, (str, list, dict, bool)))
    if isinstance(old, bool) or isinstance(new, bool):
        return isinstance(old, bool) and isinstance(new, bool)
    if isinstance(old, (int, float)):
        most = 2.0**63 - 1 if isinstance(old, int) else 1e300
        return isinstance(new, (int,) if isinstance(old, int) else (int, float)) and 0 <= new <= most
    if isinstance(old, list) and isinstance(new, list):
        return all(fits(old[0], part, path) for part in new if old)
    return isinstance(old, str) and isinstance(new, str)


NULLABLE = re.compile(
    r"^(budget_bytes|peak_without_recompute_bytes|most_ranges|\w*_seconds|times|(symbols|ranges)\[0\]\.high)$"
)


def test_every_field_with_a_wrong_type_is_named_with_what_was_found_and_what_is_expected() -> None:
    data = data_of(dynamic_plan())
    cases = [(keys, wrong) for keys in paths(data) for wrong in WRONG if not fits(at(data, keys), wrong, text_of(keys))]
    assert len(cases) > 500
    for keys, wrong in cases:
        text = complaint(edited(data, keys, wrong))
        assert f"this plan is damaged: {text_of(keys)}" in text, (keys, wrong)
        assert re.search("expected|missing", text), (keys, wrong)


def test_every_field_that_is_missing_is_named() -> None:
    data = data_of(dynamic_plan())
    for keys in paths(data):
        if isinstance(keys[-1], str):
            lacking = copy.deepcopy(data)
            del at(lacking, keys[:-1])[keys[-1]]
            assert f"damaged: {text_of(keys)} is missing" in complaint(lacking)


def test_unknown_field_is_refused_by_name() -> None:
    data = data_of(low_plan())
    with pytest.raises(ValueError, match=r"damaged: peak\.colour is no field of it; expected num_bytes, node"):
        Plan.from_json(json.dumps(edited(data, ("peak", "colour"), "red")))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (
            ("decisions", 1, "action"),
            "BOGUS",
            r"decisions\[1\]\.action is 'BOGUS', expected one of 'SAVE', 'RECOMPUTE'",
        ),
        (("decisions", 0, "reason"), "save", r"decisions\[0\]\.reason is 'save', expected one of 'ON_CUT'"),
        (("guards",), "abc", r"guards is 'abc', expected a list"),
        (("budget_bytes",), "x", r"budget_bytes is 'x', expected a whole number from 0, or null"),
    ],
)
def test_field_says_what_it_may_hold(keys: Keys, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(edited(data_of(dynamic_plan()), keys, value)))


def test_error_names_file_and_place_in_a_report(tmp_path: Path) -> None:
    report = json.loads(remat.explain(Layers(), rows(), inner="aot_eager").to_json())
    report["graphs"][0]["plan"]["phases"] = ["a"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"report\.json: this plan is damaged: graphs\[0\]\.plan\.phases\[0\] is 'a'"):
        Plan.load(path)
    report["graphs"][0]["plan"] = 3
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"report\.json: .*graphs\[0\]\.plan is 3, expected an object"):
        Plan.load(path)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"format": ' + "9" * 5000 + "}"])
def test_what_cannot_even_be_read_as_json_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError, match="this is no plan"):
        Plan.from_json(text)


# --- a plan does what it says ---------------------------------------------------------------------------------------


@cache
def prepared() -> tuple[Prepared, Request]:
    """The graph of the plan."""
    model = Layers()
    joint = capture(lambda x: model(x), rows())
    request = Request(Flops(), stored=(low_plan(),), key=low_plan().key, executor=Executor(overwrites=True))
    return prepare(joint.module, request, num_fwd_outputs=joint.num_fwd_outputs), request


def applied(plan: Plan) -> Plan:
    """Apply a plan to the graph that it was made for, without compiling that."""
    graph, request = prepared()
    return choose(graph, replace(request, stored=(plan,))).plan


def measured(plan: Plan) -> tuple[list[torch.Tensor], int]:
    """The gradients that a plan gives, and the peak that it has when it is run."""
    model = Layers()
    step = compiled(model, plan=plan)
    peak = remat.observe(step, rows()).measured.activation_bytes
    step(rows()).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], peak


def edits(data: Data) -> Iterator[Data]:
    """Entries of lists left out, doubled, in another order, or all gone; and entries that are others."""
    for name in ("decisions", "order", "phases", "graph"):
        rows = data[name]
        yield from ({**data, name: new} for new in ([], rows[::-1], [row for row in rows for _ in range(2)]))
        for k in range(len(rows)):
            yield {**data, name: [*rows[:k], *rows[k + 1 :]]}
            yield {**data, name: [*rows[: k + 1], *rows[k:]]}
            yield {**data, name: [*rows[:k], *rows[k : k + 2][::-1], *rows[k + 2 :]]}
    for k, decision in enumerate(data["decisions"]):
        other = "RECOMPUTE" if decision["action"] != "RECOMPUTE" else "SAVE"
        yield edited(data, ("decisions", k, "action"), other)
        yield from (edited(data, ("decisions", k, "value"), name) for name in ("nowhere", data["order"][-1]))
    for k in range(len(data["order"])):
        yield from (edited(data, ("order", k), name) for name in ("nowhere", "primals_1", "tangents_1"))
    yield edited(data, ("phases",), [10**6])
    yield edited(data, ("peak", "num_bytes"), data["peak"]["num_bytes"] - 4)


def meant(data: Data) -> Data:
    """The data of an edited plan as a user accepts it, with the digest that the error names."""
    found = re.search(r"that of what the plan holds is '(\w+)'", complaint(data))
    return {**data, "digest": found[1]} if found else data


def attempted(data: Data) -> tuple[Plan | None, str]:
    """The plan if it was applied, and else what it was refused with."""
    try:
        return applied(Plan.from_json(json.dumps(meant(data)))), ""
    except PlanMismatch as error:
        return None, str(error)


def what_it_does(plan: Plan) -> tuple[Any, ...]:
    return plan.order, {d.value for d in plan.decisions if d.action is not Action.RECOMPUTE}, plan.peak.num_bytes


def test_every_field_that_is_edited_is_noticed() -> None:
    data = data_of(dynamic_plan())
    others = [(keys, other(at(data, keys))) for keys in paths(data)]
    edits = [(keys, new) for keys, new in others if new is not None]
    assert len(edits) > 50
    for keys, new in edits:
        text = complaint(edited(data, keys, new))
        assert re.search(r"damaged: digest is '\w+', but that of what the plan holds is '\w+'", text), keys


def other(value: Any) -> Any:
    """Another value of the same type; None for what consists of parts that are looked at themselves."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return {"SAVE": "OFFLOAD", "RECOMPUTE": "SAVE", "OFF_CUT": "ON_CUT", "ON_CUT": "OFF_CUT"}.get(
                value, f"{value}0"
            )
        case [str(), int()]:
            return None
        case [_, *rest]:
            return rest
    return None


def test_plan_without_its_digest_is_refused() -> None:
    data = data_of(low_plan())
    del data["digest"]
    assert "damaged: digest is None, but that of what the plan holds is" in complaint(data)


def test_plan_that_was_only_laid_out_anew_is_read() -> None:
    data = data_of(low_plan())
    text = json.dumps(dict(reversed(data.items())), indent=4, ensure_ascii=False)
    assert Plan.from_json(text) == low_plan()


def test_error_of_an_edited_file_names_the_file_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data_of(low_plan()), "planner": "mine"}))
    with pytest.raises(ValueError, match=r"plan\.json: this plan is damaged: digest is") as caught:
        Plan.load(path)
    assert "Make the plan anew; or, if you meant the edit, write the second digest" in str(caught.value)
    path.write_text(json.dumps(meant(json.loads(path.read_text()))))
    assert Plan.load(path) == replace(low_plan(), planner="mine")


def test_edits_that_are_meant_are_refused_for_the_graph_or_have_the_same_gradients() -> None:
    """What is not refused has the order and the peak of the sound plan, or is run to see what it has."""
    sound = low_plan()
    assert what_it_does(applied(sound)) == what_it_does(sound)
    num_refused, others = 0, []
    for damaged in edits(data_of(sound)):
        plan, text = attempted(damaged)
        if plan is None:
            assert re.search("make it anew|another graph", text), text
            num_refused += 1
        elif what_it_does(plan) != what_it_does(sound):
            others.append(plan)
    assert num_refused > 400
    expected, peak = measured(sound)
    assert peak - sound.peak.num_bytes in (0, 4), "backward() starts with a one of its own"
    for plan in others[::8]:
        gradients, peak = measured(plan)
        assert peak - plan.peak.num_bytes in (0, 4)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": []}, r"the plan in '.*' has an order in which `\w+` is missing: make it anew"),
        ({"order": ["nowhere"]}, r"the plan in '.*' speaks of `nowhere`, which its graph has not: make it anew"),
    ],
)
def test_plan_that_cannot_be_applied_is_named_by_its_file(change: Data, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(meant({**data_of(low_plan()), **change})))
    assert re.match(message, refusal(Layers(), plan=path))


def test_file_of_a_plan_is_no_part_of_it(tmp_path: Path) -> None:
    low_plan().save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == low_plan()
    assert loaded.to_json() == low_plan().to_json()


@pytest.mark.parametrize("name", ["tangents_1", "primals_1"])
def test_what_is_given_cannot_be_in_the_order(name: str) -> None:
    data = data_of(low_plan())
    _, text = attempted({**data, "order": [name, *data["order"]]})
    assert f"`{name}` runs in backward, of which it is no op" in text


def test_op_of_backward_runs_once() -> None:
    data = data_of(low_plan())
    _, text = attempted({**data, "order": [*data["order"], data["order"][-1]]})
    assert f"`{data['order'][-1]}` runs twice, but only values of forward may run again" in text


def test_peak_that_another_version_of_remat_has_predicted_is_accepted() -> None:
    sound = low_plan()
    peak = replace(sound.peak, num_bytes=sound.peak.num_bytes + 4)
    assert applied(replace(sound, peak=peak, key="remat-0.0.1-abc")).peak == peak
    with pytest.raises(
        PlanMismatch, match=r"does not have the peak that it states: \d+ bytes, but its order takes \d+"
    ):
        applied(replace(sound, peak=peak))


# --- sound plans apply ----------------------------------------------------------------------------------------------


def identity(module: Any, inputs: Any) -> Any:
    return module.forward


@pytest.mark.parametrize("made_for", ["aot_eager", identity])
def test_plan_for_ops_that_write_over_inputs_applies_where_they_do_not_and_back(made_for: Any) -> None:
    """Both run node by node, and have the same graph; the one has a lower peak."""
    options = {"memory_budget": 0.9, "cost_model": "flops"}
    with collected() as graphs:
        compiled(Layers(), inner=made_for, **options)(rows()).backward()
    (plan,) = [graph.plan for graph in graphs]
    for inner in ("aot_eager", identity):
        compiled(Layers(), inner=inner, plan=plan)(rows()).backward()


def test_plan_for_symbols_applies_at_other_sizes_and_its_peak_is_checked_there() -> None:
    plan = replace(dynamic_plan(), shares=())
    (symbol,) = plan.symbols

    def run(stored: Plan) -> int:
        torch._dynamo.reset()
        options = {"inner": "aot_eager", "plan": stored}
        step = torch.compile(Layers(), backend="remat", options=options, fullgraph=True, dynamic=True)
        return remat.observe(step, torch.randn(96, 8)).measured.activation_bytes

    assert run(plan) - plan.at({symbol.name: 96}).peak.num_bytes in (0, 4)
    wrong = replace(plan, peak=replace(plan.peak, expression=f"{plan.peak.expression} + {symbol.name}"))
    with pytest.raises(BackendCompilerFailed, match="does not have the peak that it states"):
        run(wrong)


def prefer_views(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    is_view = op in (torch.ops.aten.t.default, torch.ops.aten.view.default, torch.ops.aten.transpose.int)
    return remat.CheckpointPolicy.PREFER_SAVE if is_view else remat.CheckpointPolicy.PREFER_RECOMPUTE


class Transposed(nn.Module):
    """A region whose policy would rather save a view of a computed value than the value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.region = remat.checkpoint_region(self.inside, policy=prefer_views)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sin().t().exp().t().sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region(x).square().mean()


def test_plan_in_which_views_are_values_of_their_own_applies() -> None:
    with collected() as graphs:
        compiled(Transposed())(rows()).backward()
    (plan,) = [graph.plan for graph in graphs]
    assert any(d.op == "aten.t.default" and d.reason.name == "POLICY_SAVE" for d in plan.decisions)
    compiled(Transposed(), plan=plan)(rows()).backward()


def with_inductor(plan: Plan) -> None:
    compiled(Layers(), inner="inductor", plan=plan)(rows()).backward()


def test_plan_for_inductor_states_an_estimate_which_may_be_of_another_device() -> None:
    report = remat.explain(Layers(), rows(), memory_budget=0.9, inner="inductor")
    (plan,) = report.plans
    assert plan.peak.executor == "inductor"
    for factor in (1.0, 1.2):
        peak = replace(plan.peak, num_bytes=int(factor * plan.peak.num_bytes))
        with_inductor(replace(plan, peak=peak))
    peak = replace(plan.peak, num_bytes=10 * plan.peak.num_bytes)
    with pytest.raises(BackendCompilerFailed, match="does not have the peak that it states"):
        with_inductor(replace(plan, peak=peak))


# --- plans for something else ----------------------------------------------------------------------------------------


def test_plan_for_another_executor_says_so_first(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    low_plan().save(path)
    text = refusal(Layers(), plan=path, inner="inductor")
    first, *_ = text.splitlines()
    assert first.startswith(f"the plan in {str(path)!r} was made for ops that run node by node, as with ")
    assert "here inductor runs the graph" in first
    assert "was made for another graph; the first difference is at node" in text


def test_plan_for_another_model_says_how_many_nodes_both_have() -> None:
    text = refusal(Layers(3), plan=low_plan())
    assert re.search(
        r"The plan's graph has \d+ nodes \(14 of them inputs\), this one \d+ nodes \(20 of them inputs\)\.", text
    )
    assert "inductor" not in text
    assert "regions" not in text


def test_file_of_the_closest_of_several_plans_is_named(tmp_path: Path) -> None:
    low_plan().save(tmp_path / "a.json")
    replace(low_plan(), graph=()).save(tmp_path / "b.json")
    text = refusal(Layers(3), plan=[tmp_path / "b.json", tmp_path / "a.json"])
    assert (
        f"all 2 plans were made for another graph; the first difference of the closest ({str(tmp_path / 'a.json')!r}"
        in text
    )


def test_regions_on_one_side_only_are_named() -> None:
    assert "this plan was made without regions, and this model has some: `Sequential`" in refusal(
        Regions(), plan=low_plan()
    )
    (plan,) = remat.explain(Regions(), rows(), inner="aot_eager").plans
    text = refusal(Layers(), plan=plan)
    assert "this plan was made for a model with regions (`Sequential`, `Sequential#2`), and this one has none" in text


def region_under(policy: Any) -> Any:
    return lambda x: remat.checkpoint_region(lambda y: y.sin().exp().sin(), policy=policy)(x).sum()


def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return remat.CheckpointPolicy.MUST_SAVE


def recompute(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return remat.CheckpointPolicy.MUST_RECOMPUTE


def test_plan_made_under_another_policy_says_that_policies_count() -> None:
    x = rows().requires_grad_()
    (plan,) = remat.explain(region_under(recompute), x, inner="aot_eager").plans
    plan = replace(plan, graph=remat.explain(region_under(keep), x, inner="aot_eager").plans[0].graph)
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(region_under(keep), plan=plan)(x)
    text = str(caught.value.inner_exception)
    assert isinstance(caught.value.inner_exception, PlanMismatch)
    assert "`sin` is recomputed although it may not be: policy says save" in text
    assert "policies are not those that it was made under" in text


# --- options and files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[], ()])
def test_no_plan_is_not_taken_for_no_option(value: Any) -> None:
    with pytest.raises(OptionError, match=r"plan=.*holds no plan; to plan afresh leave the option out"):
        Options.parse({"plan": value})


@pytest.mark.parametrize("value", ["", [""]])
def test_empty_path_of_a_plan_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"plan='': expected a Plan, the path of a plan"):
        Options.parse({"plan": value})


def test_plan_that_cannot_be_saved_says_which_folder_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"x\.json' cannot be written: there is no folder '.*nodir'"):
        low_plan().save(tmp_path / "nodir" / "x.json")
    with pytest.raises(IsADirectoryError, match="it is a folder; name a file in it"):
        low_plan().save(tmp_path)
    assert list(tmp_path.iterdir()) == []
