"""`remat.explain`: what a report knows, its text and JSON, and that it says what the split graphs really do."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.fx as fx
from support import zoo
from support.harness import recompute_is_free, recompute_is_ruinous
from support.reported import Plain, nested_report, nested_report_once
from torch import nn

import remat
from remat.compiled.capture import capture
from remat.compiled.partitioner import partitioner
from remat.passes.graph.constraints import Reason
from remat.passes.pipeline import run
from remat.report.data.model import GraphReport, short_source, size
from remat.report.data.record import Reporter
from remat.report.data.stored import SCHEMA

Golden = Callable[[str, str], None]
ROOT = Path(__file__).resolve().parents[2]
SAVE, RECOMPUTE = remat.Action.SAVE, remat.Action.RECOMPUTE
QUICK = {("gpt2", "roofline"), ("resnet", recompute_is_free), ("mixtral", recompute_is_free)}
"""The rest takes minutes."""

from_a_model_library = pytest.mark.filterwarnings(
    # Dynamo says so of a check of the torch version inside transformers, which is as constant as its cache assumes.
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)


def stable_json(report: remat.Report) -> str:
    """The JSON without what differs between machines and versions."""
    text = report.to_json().replace(json.dumps(str(ROOT))[1:-1] + "/", "")
    text = re.sub(r'"key": "[^"]*"', '"key": ""', text)
    text = re.sub(r'"digest": "[^"]*"', '"digest": ""', text)
    text = re.sub(r'"versions": \{[^}]*\}', '"versions": {}', text)
    return re.sub(r'"source": "/[^"]*"', '"source": ""', text)


# --- explain -----------------------------------------------------------------------------------------------------


def test_report_has_the_plan_that_compiling_makes(tmp_path: Path) -> None:
    model, x = Plain(), torch.randn(4, 32)
    report = remat.explain(model, x, inner="aot_eager")
    torch.compile(model, backend="remat", options={"inner": "aot_eager", "dump": tmp_path})(x).backward()
    (file,) = tmp_path.glob("*.json")
    assert remat.Report.load(file).plans == report.plans


def test_nothing_is_run() -> None:
    ran = []
    model = Plain()
    model.layers[0].register_forward_hook(lambda *_: ran.append(torch.compiler.is_compiling()))
    remat.explain(model, torch.randn(4, 32), inner="aot_eager")
    assert all(ran)
    assert all(p.grad is None for p in model.parameters())


def test_model_larger_than_memory_is_explained_on_meta() -> None:
    """A hundred layers of 2.3 GiB each; activations of 32 GiB per layer."""
    model = Plain(width=24576, depth=100, device="meta")
    assert sum(p.nbytes for p in model.parameters()) > 200 * 2**30
    report = remat.explain(model, torch.randn(1, device="meta").expand(2**18, 24576))
    assert report.plans[0].peak.num_bytes > 2**40


@pytest.mark.slow
def test_llama_of_seventy_billion_parameters_is_explained_in_minutes() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "explain_large.py"), "--device", "fake:cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (seconds,) = re.findall(r"explained in ([\d.]+) s", done.stdout)
    (gibibytes,) = re.findall(r"at most ([\d.]+) GiB", done.stdout)
    assert float(seconds) < 180
    assert float(gibibytes) < 4


def test_fake_tensors_are_as_good_as_real_ones() -> None:
    with torch._subclasses.FakeTensorMode():
        model, x = Plain(), torch.randn(4, 32)
        report = remat.explain(model, x, inner="aot_eager")
    torch._dynamo.reset()
    assert report.plans[0].decisions == remat.explain(Plain(), torch.randn(4, 32), inner="aot_eager").plans[0].decisions


def test_budget_lowers_the_peak_and_is_in_the_summary() -> None:
    model, x = Plain(depth=8), torch.randn(64, 32)
    free = remat.explain(model, x, inner="aot_eager", cost_model=recompute_is_ruinous)
    tight = remat.explain(model, x, inner="aot_eager", memory_budget=0.6, cost_model=recompute_is_ruinous)
    assert tight.plans[0].peak.num_bytes < free.plans[0].peak.num_bytes
    assert "budget" in str(tight)
    assert "budget" not in str(free)


@pytest.mark.filterwarnings(
    # Dynamo looks at `.grad` of the tensors it passes from one graph to the next.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
def test_graph_breaks_are_listed_with_their_line() -> None:
    linear = nn.Linear(8, 8)

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = linear(x).tanh()
        torch._dynamo.graph_break()
        x = linear(x).sigmoid()
        torch._dynamo.graph_break()
        return linear(x).sum()

    report = remat.explain(broken, torch.randn(4, 8), inner="aot_eager")
    first = broken.__code__.co_firstlineno
    assert len(report.graphs) == 3
    assert [re.findall(r"test_report.py:(\d+): ", reason) for reason in report.graph_breaks] == [
        [str(first + 2)],
        [str(first + 4)],
    ]
    assert "graph breaks: 2" in str(report)


@pytest.mark.parametrize("ask", [remat.explain, remat.pareto])
def test_what_cannot_be_called_is_refused(ask: Any) -> None:
    with pytest.raises(remat.OptionError, match=r"\(3\): expected a module or a function, and then its arguments"):
        ask(3, torch.randn(4))


@pytest.mark.parametrize(
    ("ask", "given", "meant"),
    [(remat.explain, "memory_budgets", "memory_budget"), (remat.pareto, "num_budget", "num_budgets")],
)
def test_misspelt_option_is_told_from_an_argument(ask: Any, given: str, meant: str) -> None:
    """Unless the function takes an argument of that name."""
    with pytest.raises(remat.OptionError, match=f"takes no argument '{given}'.* Did you mean '{meant}'"):
        ask(Plain(), torch.randn(4, 32), **{given: 3})
    for taking in (lambda x, **named: (x * len(named)).sum(), lambda x, memory_budgets=3, num_budget=3: x.sum()):
        torch._dynamo.reset()
        ask(taking, torch.randn(4, requires_grad=True), **{given: 3})


def test_function_without_backward_is_refused() -> None:
    with pytest.raises(remat.RematError, match="no backward pass to plan for"):
        remat.explain(lambda x: x.sin(), torch.randn(3))


def test_unknown_file_suffix_is_refused(tmp_path: Path) -> None:
    report = remat.explain(Plain(), torch.randn(4, 32), inner="aot_eager")
    with pytest.raises(remat.OptionError, match=r"\.txt, \.json"):
        report.save(tmp_path / "report.pdf")


# --- decisions against graphs ------------------------------------------------------------------------------------


def reported_and_saved(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> list[Any]:
    """Per graph: the report, and the forward graph's own nodes that it hands to backward."""
    request = partitioner(inner="aot_eager", **options).request
    found = []

    def visit(joint: fx.GraphModule, num_fwd_outputs: int) -> Any:
        reporter = Reporter(request)
        halves = run(joint, request, reporter, num_fwd_outputs=num_fwd_outputs)
        (graph,) = reporter.graphs
        (outputs,) = halves.forward.graph.output_node().args
        handed = [n for n in outputs[num_fwd_outputs:] if isinstance(n, fx.Node) and n.op == "call_function"]
        found.append((graph, [n for n in handed if isinstance(n.meta["val"], torch.Tensor)]))
        return halves.forward, halves.backward

    capture(function, args, kwargs, visit, fuses=False)
    return found


def base_of(graph: GraphReport, node: fx.Node) -> str:
    """The value that a result of forward belongs to; an input that forward overwrites is handed over as a copy."""
    name = node.name if node.name in graph.row else node.name.removesuffix("_before")
    return graph.row[name].base


@from_a_model_library
@pytest.mark.parametrize(
    ("name", "cost_model"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product(zoo.ZOO, ["roofline", recompute_is_free, recompute_is_ruinous])
    ],
)
def test_decisions_add_up_to_what_forward_hands_over(name: str, cost_model: Any) -> None:
    built = zoo.get(name).build("tiny")
    torch._dynamo.reset()
    for graph, handed in reported_and_saved(
        lambda batch: built.loss_fn(built.model, batch), (built.make_batch(0),), {}, cost_model=cost_model
    ):
        bases = dict.fromkeys(base_of(graph, node) for node in handed if not node.name.endswith("_rng_state"))
        saved = [d for d in graph.plan.decisions if d.action is SAVE]
        assert sorted(bases) == sorted(d.value for d in saved)
        assert sum(graph.row[base].num_bytes for base in bases) == sum(d.num_bytes for d in saved)


def test_timeline_has_the_peak_of_the_plan() -> None:
    (graph,) = nested_report_once().graphs
    timeline = graph.timeline
    assert timeline.live_bytes[timeline.peak_moment] == graph.plan.peak.num_bytes
    assert graph.moments[timeline.peak_moment] == graph.plan.peak.node
    assert {graph.kind_of(m) for m in timeline.memory} == {"saved", "recomputed", "other"}


# --- text --------------------------------------------------------------------------------------------------------


def test_text_of_nested_regions_is_as_stored(golden: Golden) -> None:
    golden("report_nested.txt", nested_report().to_text())


def test_summary_fits_a_terminal() -> None:
    lines = str(nested_report_once()).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert all(word in text for word in ("saved", "recomputed", "peak", "largest values", "estimated"))


def test_dumps_are_the_same_in_every_process_and_with_every_hash_seed() -> None:
    code = (
        "import hashlib; from support.reported import nested_report; r = nested_report();"
        "forms = (r.to_text(), r.to_json(), r.to_dot(), r.to_svg(), r.to_html());"
        "print([hashlib.sha256(text.encode()).hexdigest() for text in forms])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "tests")},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1234")
    }
    assert len(seen) == 1


def test_sizes_are_readable() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536 * 1024, 3 * 2**40)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "3.00 TiB",
    ]  # fmt: skip
    assert short_source("a/b/c/d.py:3") == "c/d.py:3"


# --- JSON --------------------------------------------------------------------------------------------------------


def test_json_of_nested_regions_is_as_stored(golden: Golden) -> None:
    golden("report_nested.json", stable_json(nested_report()))


def test_json_keeps_to_the_shipped_schema() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    data = json.loads(nested_report_once().to_json())
    jsonschema.validate(data, schema)
    for damage in ({"format": 2}, {"graphs": [{}]}, {"extra": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **damage}, schema)


def test_schema_knows_every_reason() -> None:
    known = json.loads(SCHEMA.read_text())["$defs"]["decision"]["properties"]["reason"]["enum"]
    assert known == [reason.name for reason in Reason]


def test_report_survives_json(tmp_path: Path) -> None:
    report = nested_report_once()
    report.save(tmp_path / "report.json")
    loaded = remat.Report.load(tmp_path / "report.json")
    assert loaded == report
    assert loaded.to_text() == report.to_text()


def test_plan_of_a_stored_report_can_be_applied() -> None:
    model, x = Plain(), torch.randn(4, 32)
    report = remat.explain(model, x, inner="aot_eager", cost_model=recompute_is_free)
    (plan,) = remat.Report.from_json(report.to_json()).plans
    torch._dynamo.reset()
    torch.compile(model, backend="remat", options={"inner": "aot_eager", "plan": plan})(x).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "this is no report"),
        ("{}", "of kind 'remat report'"),
        ('{"kind": "remat report", "format": 99}', "format 99"),
        ('{"kind": "remat report", "format": 1}', "damaged: 'graphs'"),
    ],
)
def test_what_is_no_report_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        remat.Report.from_json(text)


def test_report_that_names_unknown_nodes_is_refused() -> None:
    data = json.loads(remat.explain(Plain(), torch.randn(4, 32), inner="aot_eager").to_json())
    data["graphs"][0]["forward"].append("nowhere")
    with pytest.raises(ValueError, match="`nowhere`, which its graph has not"):
        remat.Report.from_json(json.dumps(data))


class Pair(nn.Module):
    """Two layers that are reached by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh()).tanh()


def test_modules_are_called_by_the_paths_that_policies_are_told() -> None:
    """Also inside a marked module, whose `forward` is not its own, and where the model is a global or closed over."""
    told: list[str] = []

    def noting(ctx: Any, *_: Any, **__: Any) -> remat.CheckpointPolicy:
        told.append(ctx.module)
        return remat.CheckpointPolicy.PREFER_RECOMPUTE

    model = nn.Sequential(Pair(), nn.Linear(8, 8))
    remat.apply(model, "0", policy=noting)
    for function in (model, lambda x: model(x).sum()):
        told.clear()
        torch._dynamo.reset()
        (plan,) = remat.explain(function, torch.randn(4, 8, requires_grad=True), inner="aot_eager").plans
        assert {"0", "0.a", "0.b"} == set(told)
        assert {"0.a", "0.b"} <= {d.module for d in plan.decisions} <= {"", "0", "0.a", "0.b", "1"}


# --- why ---------------------------------------------------------------------------------------------------------


def test_why_finds_values_by_the_programs_name() -> None:
    why = nested_report(num_blocks=2).why("attn_out")
    assert len(why.answers) == 2
    assert all(a.decision is not None and a.decision.name == "attn_out" for a in why.answers)
    text = str(why)
    assert "policy says save" in text
    assert "the policy would have to answer PREFER_RECOMPUTE or MUST_RECOMPUTE" in text


def test_why_takes_a_node() -> None:
    report = nested_report_once()
    graph = fx.Graph()
    node = graph.placeholder("primals_1")
    assert "backward has it anyway" in str(report.why(node))


def test_why_prices_the_other_choice() -> None:
    """A matrix product that must be kept otherwise: recomputing tanh costs its own price and nothing else."""
    report = remat.explain(Plain(depth=2), torch.randn(4, 32), inner="aot_eager", cost_model=lambda call: 1.0)
    (graph,) = report.graphs
    saved = next(d for d in graph.plan.saved if "tanh" in d.op or "sin" in d.op or "exp" in d.op)
    (answer,) = report.why(saved.value).answers
    assert answer.alternative is not None
    assert answer.alternative.action is RECOMPUTE
    assert answer.alternative.extra_bytes <= 0
    assert answer.alternative.extra_seconds == pytest.approx(
        sum(graph.row[n].recompute_seconds for n in (saved.value, *answer.alternative.also_recomputed))
        - saved.save_seconds,
        abs=1e-6,
    )
    assert "for it to be recomputed: a MiB must be worth more than" in str(answer)


def test_flipping_any_free_choice_of_the_cut_never_gains() -> None:
    """The cut is the cheapest legal choice, so by its own prices no single change can be better."""
    report = remat.explain(Plain(depth=4), torch.randn(64, 32), inner="aot_eager")
    (graph,) = report.graphs
    flipped = [report.why(d.value).answers[0].alternative for d in graph.plan.decisions]
    legal = [a for a in flipped if a is not None and not a.obstacle]
    assert {a.action for a in legal} == {SAVE, RECOMPUTE}
    assert all(a.extra_seconds >= -1e-12 for a in legal)


def test_why_of_a_recomputed_value_says_what_would_keep_it() -> None:
    report = remat.explain(Plain(depth=2), torch.randn(4, 32), inner="aot_eager", cost_model=recompute_is_free)
    (graph,) = report.graphs
    name = next(d.value for d in graph.plan.recomputed if d.reason is Reason.OFF_CUT)
    assert "for it to be saved: running it again must cost more than" in str(report.why(name))


def prefer_save(*_: Any, **__: Any) -> remat.CheckpointPolicy:
    """Keep what the budget has room for."""
    return remat.CheckpointPolicy.PREFER_SAVE


def recomputed_in(text: str) -> list[str]:
    """The first words of the line that totals what is recomputed."""
    return next(line for line in text.splitlines() if line.startswith("  recomputed")).split()[:4]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_summaries_of_a_plan_and_of_its_report_agree(inner: str) -> None:
    """Also on views, which take no memory to be made again."""
    report = wide_report(inner=inner, memory_budget=0.4)
    (plan,) = report.plans
    assert any(d.is_view and d.num_bytes for d in plan.recomputed)
    assert recomputed_in(str(report)) == recomputed_in(plan.summary())
    assert recomputed_in(remat.Plan.from_json(plan.to_json()).summary()) == recomputed_in(plan.summary())


@pytest.mark.filterwarnings("ignore:memory_budget=")
def test_budget_that_is_not_met_is_said_to_be_exceeded(tmp_path: Path) -> None:
    report = wide_report(memory_budget="2KiB", on_infeasible="minimum")
    (plan,) = report.plans
    pattern = r"  budget  +2\.00 KiB  exceeded by .* KiB: this is the lowest plan found; planner: "
    assert re.search(pattern, str(report)) and re.search(pattern, plan.summary())
    assert f'"budget_note":"{plan.budget_text()}"' in report.to_html()
    assert plan.budget_text().startswith(f"exceeded by {size(plan.peak.num_bytes - 2048)}: ")
    assert "exceeded" not in str(wide_report(memory_budget=0.9))


@pytest.mark.parametrize("bound", [0.7, "2KiB"])
@pytest.mark.filterwarnings("ignore:memory_budget=")
def test_report_lists_the_share_of_every_region(bound: float | str) -> None:
    report = wide_report(region=bound, on_infeasible="minimum")
    ((share,),) = (plan.shares for plan in report.plans)
    line = f"0: {size(share.predicted_bytes)} of {size(share.budget_bytes)}"
    if bound == "2KiB":
        excess = share.predicted_bytes - share.budget_bytes
        line += f", exceeded by {size(excess)}: no plan found keeps within it"
    for text in (str(report), report.to_text(), report.plans[0].summary()):
        assert f"\n  region              {line}\n" in text
    assert f'["region","{line}"]' in report.to_html()


def wide_report(region: float | str | None = None, **options: Any) -> remat.Report:
    """Explain an MLP whose inner results are large and dear."""
    torch._dynamo.reset()
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32)) for _ in range(4)]
    model = nn.Sequential(nn.Sequential(*blocks))
    if region is not None:
        remat.apply(model, "0", memory_budget=region, policy=prefer_save)
    return remat.explain(lambda x: model(x).sum(), torch.randn(64, 32), **options)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("budget", [0.6, 0.4])
def test_reasons_under_a_budget_are_true(inner: str, budget: float) -> None:
    """What is called cheaper to recompute is, all else being as it is; what is kept on the cheapest cut is on it."""
    report, free = wide_report(inner=inner, memory_budget=budget), wide_report(inner=inner)
    found = {d.value: d.reason for d in report.plans[0].decisions}
    extra = {name: a.extra_seconds for name in found if (a := report.why(name).answers[0].alternative) is not None}
    assert all(extra[name] >= 0 for name, reason in found.items() if reason is Reason.OFF_CUT)
    assert all(extra[name] < 0 for name, reason in found.items() if reason is Reason.OFF_FOR_BUDGET)
    assert Reason.OFF_FOR_BUDGET in found.values()
    on_cut = {d.value for d in free.plans[0].saved}
    assert {name for name, reason in found.items() if reason is Reason.ON_CUT} <= on_cut
    assert not {name for name, reason in found.items() if reason is Reason.ON_FOR_BUDGET} & on_cut
    jsonschema.validate(json.loads(report.to_json()), json.loads(SCHEMA.read_text()))


def test_why_of_a_value_that_a_budget_recomputes_asks_for_a_larger_one() -> None:
    report = wide_report(memory_budget=0.4, inner="aot_eager")
    name = next(d.value for d in report.plans[0].recomputed if d.reason is Reason.OFF_FOR_BUDGET)
    text = str(report.why(name))
    assert "because: recomputed to keep within the budget" in text
    assert re.search(r"keeping it instead takes .* off the step", text)
    assert "for it to be saved: a larger memory_budget than" in text
    region = wide_report(region=0.7, inner="aot_eager")
    name = next(d.value for d in region.plans[0].recomputed if d.reason is Reason.AGAINST_SAVE)
    assert "for it to be saved: a larger memory_budget of its region" in str(region.why(name))


def test_reasons_of_a_budget_that_the_cheapest_cut_meets_are_those_without_one() -> None:
    bounded, free = wide_report(memory_budget=1.0), wide_report()
    assert [d.reason for d in bounded.plans[0].decisions] == [d.reason for d in free.plans[0].decisions]


def test_why_of_an_unknown_name_suggests_others() -> None:
    with pytest.raises(remat.OptionError, match=r"Did you mean 'attn_out'"):
        nested_report_once().why("atn_out")


def test_why_of_what_is_no_name_is_refused() -> None:
    with pytest.raises(remat.OptionError, match=r"why\(3\): expected a node, or the name of a value"):
        nested_report_once().why(3)


def test_why_works_on_a_stored_report() -> None:
    report = nested_report_once()
    assert str(remat.Report.from_json(report.to_json()).why("attn_out")) == str(report.why("attn_out"))


# --- dumps and logs ----------------------------------------------------------------------------------------------


def train(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch.compile(Plain(), backend="remat", options={"inner": "aot_eager", **options})(torch.randn(4, 32)).backward()


def test_dump_writes_text_and_json_named_by_rank_and_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    train({"dump": tmp_path})
    train({"dump": tmp_path})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert all(re.fullmatch(r"rank3-graph\d{3,}-\d+\.(json|txt)", name) for name in names)
    (first, *_) = sorted(tmp_path.glob("*.json"))
    assert first.with_suffix(".txt").read_text() == remat.Report.load(first).to_text()


def test_dumped_report_is_a_plan_that_can_be_applied(tmp_path: Path) -> None:
    train({"dump": tmp_path, "cost_model": recompute_is_free})
    (file,) = tmp_path.glob("*.json")
    train({"plan": str(file), "dump": tmp_path / "again"})
    (again,) = (tmp_path / "again").glob("*.json")
    assert remat.Plan.load(again) == remat.Plan.load(file)


def test_logs_print_the_summary_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("REMAT_LOGS", "plan")
    train({})
    assert re.search(r"\[remat rank 0 graph \d+\]   saved ", capsys.readouterr().err)


def test_unknown_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_LOGS", "plan,everything")
    with pytest.raises(remat.OptionError, match="'everything' is no log; expected 'plan'"):
        remat.partitioner()
