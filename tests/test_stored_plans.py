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
from remat.passes.cost import Machine, Roofline
from remat.passes.errors import PlanMismatch
from remat.passes.plan import Plan
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import remat

Data = dict[str, Any]
Keys = tuple[str | int, ...]
MODEL = Roofline({"cpu": Machine(2.0**35, 2.0**34)})


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
    """The plan with the lowest peak, which recomputes much, some of it twice."""
    plan = remat.pareto(Layers(), rows(), inner="aot_eager", num_budgets=4, cost_model="flops").points[-1].plan
    assert max(d.num_recomputes for d in plan.decisions) == 2
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
    share = remat.passes.plan.RegionShare("mlp", 1024, 512)
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
        if key != "format":
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


def test_every_field_that_is_missing_is_named_unless_older_formats_lack_it() -> None:
    data = data_of(dynamic_plan())
    named = [keys for keys in paths(data) if isinstance(keys[-1], str)]
    for keys in named:
        lacking = copy.deepcopy(data)
        del at(lacking, keys[:-1])[keys[-1]]
        text = complaint(lacking)
        assert text == "" or re.search(rf"damaged: {re.escape(text_of(keys))} is missing|ranges\[0\]", text), keys


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
        (("peak", "executor"), "gpu", r"peak\.executor is 'gpu', expected 'inductor' or 'node by node'"),
        (("peak", "expression"), "s99", r"peak\.expression cannot be evaluated: nothing is said of s99"),
        (("peak", "expression"), "5", r"peak\.expression is '5', which makes 5 bytes, but num_bytes beside it is"),
        (("peak", "expression"), "-" * 10**5 + "1", r"peak\.expression cannot be evaluated"),
        (("decisions", 0, "save_expression"), "1 +", r"decisions\[0\]\.save_expression cannot be evaluated"),
        (("times", "keep"), "x.y", r"times\.keep cannot be evaluated"),
        (("guards",), ["a"], r"guards\[0\] is 'a', expected a relation between sizes"),
        (("guards",), "abc", r"guards is 'abc', expected a list"),
        (("ranges", 0, "meaning"), "none", r"ranges\[0\]\.meaning is 'none', expected 'budget' or 'best'"),
        (("ranges", 0, "symbol"), "s99", r"ranges\[0\]\.symbol is 's99', expected one of the plan's symbols"),
        (("budget_bytes",), "x", r"budget_bytes is 'x', expected a whole number from 0, or null"),
    ],
)
def test_what_no_type_says_is_checked_too(keys: Keys, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(edited(data_of(dynamic_plan()), keys, value)))


def test_two_decisions_about_one_value_are_refused() -> None:
    data = data_of(low_plan())
    data["decisions"].append(data["decisions"][0])
    with pytest.raises(ValueError, match=r"decisions\[0\] and decisions\[\d+\] are about the same 't'"):
        Plan.from_json(json.dumps(data))


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
