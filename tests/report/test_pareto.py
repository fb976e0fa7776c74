"""The frontier of time and peak: what its points promise, what tracing leaves behind, and what is written to files."""

from __future__ import annotations

import inspect
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from support.measure import activation_peak
from torch import nn

import remat
from remat.cli.main import main
from remat.compiled.options import Options
from remat.passes.plans.plan import Plan
from remat.passes.shared.readable import duration
from remat.report.data.stored import SCHEMA
from remat.report.forms.chart import WIDTH, Mark, Series, chart, ticks
from remat.report.frontier.frontier import FORMAT, Pareto, ladder, undominated


class Chain(nn.Module):
    """Layers with dropout, which a recomputation must replay, and wide values inside, which make budgets matter."""

    def __init__(self, layers: int = 4, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Broken(nn.Module):
    """A graph break between two halves, with batch norm and dropout, which running forward would move."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.dropout(self.norm(self.first(x).tanh()), 0.5, True)
        torch._dynamo.graph_break()
        return self.second(x.sigmoid()).exp().sum()


def make_chain() -> tuple[Chain, torch.Tensor]:
    torch.manual_seed(0)
    return Chain(), torch.randn(64, 8)


@cache
def chain_frontier() -> Pareto:
    """Shared by tests: it is frozen. Not a fixture, since pytest records torch's trace while it sets fixtures up."""
    return remat.pareto(*make_chain(), inner="aot_eager", num_budgets=5)


def apply_plan(model: nn.Module, plan: Plan) -> Any:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "plan": plan}
    return torch.compile(model, backend="remat", options=options, fullgraph=True)


def gradients(compiled: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    compiled(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# --- what the points promise -------------------------------------------------------------------------------------


def test_points_trade_time_for_peak_strictly() -> None:
    frontier = chain_frontier()
    peaks = [point.peak_bytes for point in frontier.points]
    seconds = [point.extra_seconds for point in frontier.points]
    assert len(peaks) >= 3
    assert peaks == sorted(set(peaks), reverse=True)
    assert seconds == sorted(set(seconds))
    assert seconds[0] == 0.0
    assert peaks[0] <= frontier.largest.peak_without_recompute_bytes


def test_every_point_applies_and_gives_equal_gradients() -> None:
    model, x = make_chain()
    expected = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), model, x)
    for point in chain_frontier().points:
        compiled = apply_plan(model, point.plan)
        for actual, wanted in zip(gradients(compiled, model, x), expected, strict=True):
            assert torch.equal(actual, wanted)


def test_measured_peak_of_every_point_is_the_one_it_promises() -> None:
    model, x = Chain(dropout=0.0), torch.randn(64, 8)
    frontier = remat.pareto(model, x, inner="aot_eager", num_budgets=5)
    assert len(frontier.points) >= 3
    for point in frontier.points:
        compiled = apply_plan(model, point.plan)
        measured = activation_peak(lambda c=compiled: c(x), model.parameters(), counter="dispatch")
        # backward() itself makes the gradient of the loss: one number, in no graph.
        seed_bytes = 0 if point.plan.peak.in_forward else x.element_size()
        assert measured.activation_bytes == point.plan.peak.num_bytes + seed_bytes
        assert point.plan.peak.num_bytes == point.peak_bytes


def test_lowest_point_is_what_a_budget_below_the_minimum_gets() -> None:
    frontier = chain_frontier()
    lowest = frontier.largest.lowest_peak_bytes
    model, x = make_chain()
    options = {"inner": "aot_eager", "memory_budget": lowest - 1}
    with pytest.raises(Exception, match=f"Give at least {lowest} bytes"):
        torch.compile(model, backend="remat", options=options)(x)


def test_within_gives_the_fastest_point_that_fits() -> None:
    frontier = chain_frontier()
    points = frontier.points
    assert frontier.largest.within(points[1].peak_bytes) is points[1]
    assert frontier.largest.within(points[1].peak_bytes + 1) is points[1]
    assert frontier.largest.within(points[-1].peak_bytes - 1) is None


def test_frontier_for_inductor_is_made_for_its_graph() -> None:
    model, x = make_chain()
    found = remat.pareto(model, x, num_budgets=2)
    assert found.points[0].plan.peak.executor == "inductor"
    assert any("inductor_seed" in line for line in found.points[0].plan.graph)


# --- what tracing leaves behind ----------------------------------------------------------------------------------


def test_nothing_is_run_and_no_state_is_left() -> None:
    calls = []

    @torch.library.custom_op("remat_test::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.clone()

    noted.register_fake(torch.empty_like)
    noted.register_autograd(lambda ctx, grad: grad)
    model, x = make_chain()
    state = torch.get_rng_state()
    remat.pareto(lambda x: model(noted(x)), x.requires_grad_(), inner="aot_eager", num_budgets=2)
    assert not calls
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in (x, *model.parameters()))


def test_another_batch_size_is_still_compiled_as_a_static_one() -> None:
    model, x = make_chain()
    remat.pareto(model, x, inner="aot_eager", num_budgets=2)
    shapes = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        shapes.extend(value.shape[0] for value in example_inputs if isinstance(value, torch.Tensor))
        return gm

    torch.compile(model, backend=backend)(x[:32])
    assert 32 in shapes
    assert all(type(size) is int for size in shapes)


# Dynamo itself looks at the gradient of what comes out of the first graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_broken_function_has_a_frontier_per_graph_and_its_state_is_put_back() -> None:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(16, 8)
    generator, buffers = torch.get_rng_state(), {k: v.clone() for k, v in model.named_buffers()}
    found = remat.pareto(model, x, inner="aot_eager", num_budgets=2)
    assert len(found.graphs) == 2
    assert "graph_break" in found.graph_break
    line = inspect.getsourcelines(Broken.forward)[1] + 2
    assert f"test_pareto.py:{line}: " in found.graph_break
    assert str(found).startswith(f"2 joint graphs: {found.graph_break}")
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)

    expected = gradients(torch.compile(model, backend="aot_eager"), model, x)
    torch._dynamo.reset()
    plans = [graph.points[-1].plan for graph in found.graphs]
    compiled = torch.compile(model, backend="remat", options={"inner": "aot_eager", "plan": plans})
    for actual, wanted in zip(gradients(compiled, model, x), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_compiled_model_is_planned_like_the_model_itself() -> None:
    frontier = chain_frontier()
    model, x = make_chain()
    found = remat.pareto(torch.compile(model, backend="eager"), x, inner="aot_eager", num_budgets=5)
    assert found.points == frontier.points


# --- errors ------------------------------------------------------------------------------------------------------


def test_function_without_gradients_is_refused() -> None:
    with pytest.raises(remat.RematError, match=r"pareto\(.*\): no result of this function needs a gradient"):
        remat.pareto(lambda x: x.exp(), torch.ones(3), inner="aot_eager")
    model, x = make_chain()
    with torch.no_grad(), pytest.raises(remat.RematError, match=r"outside of torch\.no_grad"):
        remat.pareto(model, x, inner="inductor")


def test_function_without_tensors_is_refused() -> None:
    with pytest.raises(remat.RematError, match="calls no tensor operation"):
        remat.pareto(lambda: 3, inner="aot_eager")


def test_error_of_the_function_itself_is_not_wrapped() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        remat.pareto(make_chain()[0], inner="aot_eager")


def test_error_of_the_cost_model_names_it() -> None:
    with pytest.raises(remat.OptionError, match="nan"):
        remat.pareto(*make_chain(), inner="aot_eager", cost_model=lambda call: float("nan"))


@pytest.mark.parametrize("options", [{"inner": "eager"}, {"cost_model": "guess"}, {"num_budgets": 0}])
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(remat.OptionError, match=f"{name}={value!r}: expected"):
        remat.pareto(*make_chain(), **options)


def test_budgets_of_regions_hold_in_every_point() -> None:
    model, x = make_chain()
    remat.apply(model, "", memory_budget=0.8, name="chain")
    free, bound = chain_frontier(), remat.pareto(model, x, inner="aot_eager", num_budgets=3)
    assert len(bound.points) > 1
    assert not any(point.plan.shares for point in free.points)
    for point in bound.points:
        (share,) = point.plan.shares
        assert 0 < share.predicted_bytes <= share.budget_bytes
        assert point.plan.peak.num_bytes == point.peak_bytes


# --- files and progress ------------------------------------------------------------------------------------------


def test_json_holds_plans_that_can_be_loaded(tmp_path: Path) -> None:
    frontier = chain_frontier()
    frontier.save(tmp_path / "pareto.json")
    data = json.loads((tmp_path / "pareto.json").read_text())
    (graph,) = data["graphs"]
    assert [point["peak_bytes"] for point in graph["points"]] == [point.peak_bytes for point in frontier.points]
    assert Plan.from_json(json.dumps(graph["points"][-1]["plan"])) == frontier.points[-1].plan


def test_frontier_survives_json(tmp_path: Path) -> None:
    frontier = chain_frontier()
    frontier.save(tmp_path / "pareto.json")
    assert Pareto.load(tmp_path / "pareto.json") == frontier


def test_frontier_in_a_report_survives_json_and_keeps_to_the_schema() -> None:
    report = replace(remat.explain(*make_chain(), inner="aot_eager"), pareto=chain_frontier())
    jsonschema.validate(json.loads(report.to_json()), json.loads(SCHEMA.read_text()))
    assert remat.Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "this is no frontier"),
        ("[]", "this is no frontier"),
        ('{"graph_break": "", "format": 99}', "has format 99"),
        ('{"graph_break": "", "format": FORMAT, "graphs": [{}]}', "damaged: 'points'"),
        ('{"graph_break": "", "format": FORMAT, "graphs": []}', "damaged: a graph has no points"),
    ],
)
def test_what_is_no_frontier_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "pareto.json"
    file.write_text(text.replace("FORMAT", str(FORMAT)))
    with pytest.raises(ValueError, match=rf"pareto\.json: this .*{message}|pareto\.json: {message}"):
        Pareto.load(file)


def test_svg_has_a_titled_mark_for_every_point(tmp_path: Path) -> None:
    frontier = chain_frontier()
    frontier.save(tmp_path / "pareto.svg")
    root = ElementTree.parse(tmp_path / "pareto.svg").getroot()
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(frontier.points)
    assert "s, planner: " in titles[0]


def scaled(frontier: Pareto, peak: float, time: float) -> Pareto:
    """The same frontier with other figures."""
    (graph,) = frontier.graphs
    points = tuple(
        replace(point, peak_bytes=int(peak * point.peak_bytes), extra_seconds=time * point.extra_seconds)
        for point in graph.points
    )
    return Pareto((replace(graph, points=points),), "")


@pytest.mark.parametrize(("scale", "unit"), [(1 / 1024, "B"), (1, "KiB"), (1024, "MiB"), (2**20, "GiB")])
def test_axes_have_units_of_the_size_of_what_they_show(scale: float, unit: str) -> None:
    """So labels are short, and none runs over the edge."""
    text = scaled(chain_frontier(), scale, scale).to_svg()
    assert f"activation peak, {unit}<" in text
    labels = re.findall(r'<text class="quiet"[^>]*>([^<]*)</text>', text)
    assert labels and all(len(label) <= 5 for label in labels)


def test_extra_times_that_differ_little_are_told_apart() -> None:
    first, second = (scaled(chain_frontier(), 1, time) for time in (1e-6, 1.003e-6))
    assert str(first) != str(second)


def test_label_at_the_edge_is_not_cut_off() -> None:
    marks = (Mark(0, 0), Mark(123456789.0, 1))
    root = ElementTree.fromstring(chart([Series("", marks)], title="", x_label="", y_label=""))
    texts = [e for e in root.iter("{http://www.w3.org/2000/svg}text") if (e.text or "").startswith("1.25e")]
    assert texts and all(float(e.get("x")) + 7.5 * len(e.text) / 2 <= WIDTH for e in texts)


def test_frontier_that_is_taken_for_a_plan_says_how_to_take_one_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pareto.json"
    chain_frontier().save(file)
    with pytest.raises(remat.OptionError, match=r"cannot be read: this is a frontier .*, not a plan") as caught:
        Options.parse({"plan": file})
    for command in (("show", file), ("diff", file, file)):
        assert main([str(part) for part in command]) == 2
        assert "this is a frontier" in capsys.readouterr().err
    (advice,) = re.findall(r"remat\.Pareto\.\S+ *\S+\.plan\.save\([^)]*\)", str(caught.value))
    exec(advice.replace('"plan.json"', repr(str(tmp_path / "plan.json"))), {"remat": SimpleNamespace(Pareto=Pareto)})
    assert Plan.load(tmp_path / "plan.json") == chain_frontier().points[0].plan


def test_text_and_page_show_every_point(tmp_path: Path) -> None:
    frontier = chain_frontier()
    for name in ("pareto.txt", "pareto.html"):
        frontier.save(tmp_path / name)
        text = (tmp_path / name).read_text()
        assert all(duration(point.extra_seconds, 4) in text for point in frontier.points)


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    frontier = chain_frontier()
    with pytest.raises(remat.OptionError, match=r"ends in .svg, .html, .json, .txt"):
        frontier.save(tmp_path / "pareto.png")
    assert not list(tmp_path.iterdir())


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = make_chain()
    remat.pareto(model, x, inner="aot_eager", num_budgets=2)
    assert capsys.readouterr().err == ""
    remat.pareto(model, x, inner="aot_eager", num_budgets=2, progress=True)
    assert "looking for the lowest peak" in capsys.readouterr().err


# --- pieces ------------------------------------------------------------------------------------------------------


def test_ladder_goes_from_below_the_highest_to_the_lowest() -> None:
    assert ladder(100, 60, 4) == [90, 80, 70, 60]
    assert ladder(3, 1, 10) == [2, 1]
    assert ladder(5, 5, 3) == []


def test_dominated_offers_are_dropped() -> None:
    def offer(peak_bytes: int, extra_ticks: int) -> Any:
        return SimpleNamespace(peak_bytes=peak_bytes, extra_ticks=extra_ticks)

    offers = [offer(10, 0), offer(8, 5), offer(9, 5), offer(12, 0), offer(8, 6), offer(4, 9), offer(5, 9)]
    assert [(o.peak_bytes, o.extra_ticks) for o in undominated(offers)] == [(10, 0), (8, 5), (4, 9)]


@pytest.mark.parametrize(
    ("highest", "expected"), [(0.0, [0, 1]), (7.0, [0, 2, 4, 6, 8]), (100.0, [0, 20, 40, 60, 80, 100])]
)
def test_ticks_are_round_and_reach_the_highest_value(highest: float, expected: list[float]) -> None:
    assert ticks(highest) == expected


@pytest.mark.parametrize(("slope", "anchor"), [(1, "start"), (-1, "end")])
def test_legend_keeps_out_of_the_way(slope: int, anchor: str) -> None:
    marks = tuple(Mark(x, 5 + slope * (x - 5)) for x in range(11))
    root = ElementTree.fromstring(chart([Series("name", marks)], title="", x_label="", y_label=""))
    (legend,) = [element for element in root.iter("{http://www.w3.org/2000/svg}text") if element.text == "name"]
    assert legend.get("text-anchor") == anchor


def test_chart_escapes_what_it_is_given() -> None:
    text = chart([Series("<a>", (Mark(1, 2, "x & y"),))], title="a < b", x_label="", y_label="")
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == "a < b"
    assert "x & y" in [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
