"""The command `remat`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from support.reported import Plain

import remat
from remat.cli.main import DIFFERENT, OK, WRONG_USAGE, main
from remat.cli.spec import load, make_inputs
from remat.report.data.stored import SCHEMA

PROGRAM = """
import torch
from torch import nn
import remat

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, scale=None):
        x = remat.name(torch.tanh(self.first(x)), "middle")
        return self.second(x.sin().exp()).sum() * (1.0 if scale is None else scale.sum())

class Broken(Model):
    def forward(self, x):
        if x.shape[0] == 4:
            raise KeyError("missing")
        return super().forward(x)

class Unmade(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear("wide", 3)

def bad_inputs():
    return 1 / 0

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.scale
        return nn.functional.scaled_dot_product_attention(x, x, x).sum()

def make_inputs():
    return {"x": torch.randn(4, 16), "scale": torch.ones(2)}

layer = nn.Linear(4, 4)

def step(x):
    return layer(x).sin().sum()

def needs_arguments(width):
    return nn.Linear(width, width)

number = 3
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "cli_program.py"
    file.write_text(PROGRAM)
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    torch._dynamo.reset()
    code = main(arguments)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_explain_prints_a_summary_and_progress_apart(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "explain", f"{program}:Model", "--input", "f32[4,16]")
    assert code == OK
    assert out.startswith("Model: ")
    assert "largest values" in out
    assert "remat.explain: tracing" in err


def test_explain_writes_every_form(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"report{suffix}") for suffix in (".html", ".json", ".txt", ".svg", ".dot")]
    outputs = [part for file in files for part in ("-o", file)]
    code, out, _ = run(capsys, "explain", f"{program}:Model", "--input", f"{program}:make_inputs", *outputs)
    assert (code, out) == (OK, "")
    assert all(Path(file).stat().st_size for file in files)


def test_explain_prints_json_that_keeps_to_the_schema(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", f"{program}:Model", "--input", "f32[4,16]", "--json", "--device", "cpu")
    assert code == OK
    jsonschema.validate(json.loads(out), json.loads(SCHEMA.read_text()))


def test_explain_says_why(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", f"{program}:Model", "--input", "f32[4,16]", "--why", "middle")
    assert code == OK
    assert '("middle"): ' in out
    assert "price of keeping it" in out


@pytest.mark.parametrize("device", ["meta", "fake:cpu", "cpu"])
def test_fused_attention_is_taken_apart_on_meta_only(
    device: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = ("explain", f"{program}:Attention", "--input", "f32[2,4,16,8]", "--json")
    code, out, _ = run(capsys, *attention, "--device", device)
    assert code == OK
    assert ("flash_attention" in out) == (device != "meta")


def test_unknown_device_is_refused(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", f"{program}:Model", "--input", "f32[4,16]", "--device", "fake:moon")
    assert code == WRONG_USAGE
    assert "expected meta, cpu, fake:cpu" in err


def test_explain_of_a_function(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", f"{program}:step", "--function", "--input", "f32[4]", "--device", "cpu")
    assert code == OK
    assert out.startswith("step: ")


def test_budget_that_cannot_be_met_ends_with_one(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    budget = ("--memory-budget", "1KiB")
    code, out, err = run(capsys, "explain", f"{program}:Model", "--input", "f32[400,16]", *budget)
    assert (code, out) == (DIFFERENT, "")
    assert "the lowest activation peak found is" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{program}"], "expected pkg.mod:name or path/to/file.py:name"),
        (["nowhere.at.all:Model"], "there is no module 'nowhere'"),
        (["{program}:Missing"], "has no 'Missing'"),
        (["{program}:needs_arguments"], "write a function that makes the model"),
        (["{program}:number"], "is a int; expected a model"),
        (["{program}:Model", "--input", "f32[4"], "is no tensor"),
        (["{program}:Model", "--input", "f31[4]"], "unknown dtype 'f31'"),
        (["{program}:Model", "--input", "f32[4]<3"], "is for whole numbers"),
        (["{program}:Model", "--input", "x=f32[4], f32[4]"], "inputs without a name come before"),
        (["{program}:Model", "--input", "f32[4,16]", "--memory-budget", "lots"], "memory_budget='lots'"),
        (["{program}:Model", "--input", "f32[4,16]", "-o", "report.pdf"], "expected a file name that ends in"),
        (["{program}:Model", "--input", "f32[4,16]", "-o", "nowhere/report.svg"], "there is no folder 'nowhere'"),
        (["{program}:Model", "--input", "f32[4,16]", "--device", "cuda"], "--device 'cuda': torch cannot use it here"),
        (["{program}:Model"], "missing 1 required positional argument: 'x'; --input says with which inputs"),
        (["{program}:Model", "--input", "f32[4,17]"], "must have same reduction dim, but got [4, 17] X [16, 16], at "),
        (["{program}:Model", "--input", "y=f32[4,16]"], "TypeError: Model.forward() got an unexpected keyword arg"),
        (["{program}:Broken", "--input", "f32[4,16]"], "KeyError: 'missing'"),
        (["{program}:Unmade", "--input", "f32[4,16]"], "{program}:Unmade: TypeError: empty()"),
        (["{program}:Model", "--input", "{program}:bad_inputs"], "ZeroDivisionError: division by zero, at {program}:"),
    ],
)
def test_wrong_usage_ends_with_two(
    program: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has what is not there in the test")
    code, out, err = run(capsys, "explain", *(a.replace("{program}", program) for a in arguments))
    assert (code, out) == (WRONG_USAGE, "")
    message = message.replace("{program}", program)
    *progress, last = err.splitlines()
    assert last.startswith("remat: ") and message in last
    assert all(line.startswith("remat.explain: ") for line in progress)


def test_traceback_of_a_model_is_printed_if_asked_for(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ("explain", f"{program}:Broken", "--input", "f32[4,16]")
    assert "REMAT_DEBUG=1 prints the traceback" in run(capsys, *broken)[2]
    monkeypatch.setenv("REMAT_DEBUG", "1")
    code, _, err = run(capsys, *broken)
    assert code == WRONG_USAGE
    assert "Traceback (most recent call last)" in err and 'raise KeyError("missing")' in err
    assert err.splitlines()[-1].startswith("remat: ") and "REMAT_DEBUG" not in err.splitlines()[-1]


@pytest.mark.parametrize("command", ["explain", "pareto", "show"])
def test_output_that_cannot_be_written_is_refused_before_anything_takes_time(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, command, "nowhere.at.all:Model", "-o", "report.pdf")
    assert code == WRONG_USAGE
    assert "expected a file name that ends in" in err


def test_suffix_of_an_output_may_be_in_capitals(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "REPORT.SVG"
    assert run(capsys, "explain", f"{program}:Model", "--input", "f32[4,16]", "-o", str(file))[0] == OK
    assert file.read_text().startswith("<svg")


@pytest.mark.filterwarnings("ignore:memory_budget=")
def test_lowest_plan_can_be_asked_for(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("explain", f"{program}:Model", "--input", "f32[400,16]", "--memory-budget", "1KiB")
    _, _, err = run(capsys, *asked)
    assert "or give --on-infeasible minimum to take the lowest plan" in err
    code, out, _ = run(capsys, *asked, "--on-infeasible", "minimum")
    assert code == OK
    assert "exceeded by" in out


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, str]:
    """Two reports of one model that differ."""
    files = []
    for name, cost in (("dear", 1.0), ("cheap", 0.0)):
        torch._dynamo.reset()
        report = remat.explain(Plain(), torch.randn(4, 32), inner="aot_eager", cost_model=lambda call, s=cost: s)
        files.append(str(tmp_path / f"{name}.json"))
        report.save(files[-1])
    return files[0], files[1]


def test_diff_says_what_changed_and_what_it_costs(stored: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "diff", *stored)
    assert code == DIFFERENT
    assert "saved -> recomputed: cheaper to recompute than to keep" in out
    assert all(word in out for word in ("saved  ", "peak  ", "recompute  "))
    code, out, _ = run(capsys, "diff", "--json", *stored)
    data = json.loads(out)
    assert code == DIFFERENT
    assert data["is_different"] is True
    assert data["graphs"][0]["saved_bytes"][0] > data["graphs"][0]["saved_bytes"][1]


def test_diff_of_the_same_plan_ends_with_zero(stored: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "diff", stored[0], stored[0])[:2] == (OK, "no difference\n")


def test_show_prints_reports_and_plans(
    stored: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = remat.Report.load(stored[0])
    assert run(capsys, "show", stored[0])[1] == f"{report}\n"
    assert run(capsys, "show", stored[0], "--full")[1] == f"{report.to_text()}\n"
    report.plans[0].save(tmp_path / "plan.json")
    assert run(capsys, "show", str(tmp_path / "plan.json"))[1] == f"{report.plans[0]}\n"
    code, _, err = run(capsys, "show", str(tmp_path / "plan.json"), "--why", "tanh")
    assert code == WRONG_USAGE
    assert "need a report" in err


@pytest.mark.parametrize("text", [None, "nonsense", "{}", '{"format": 99, "graphs": []}'])
def test_files_that_cannot_be_read_end_with_two(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)
    code, out, err = run(capsys, "show", str(file))
    assert (code, out) == (WRONG_USAGE, "")
    assert "plan.json" in err


@pytest.mark.parametrize("command", ["show", "diff"])
def test_file_that_is_no_text_is_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bin.json"
    file.write_bytes(b"\xff\xfe\x00")
    code, _, err = run(capsys, command, *[str(file)] * (1 + (command == "diff")))
    assert code == WRONG_USAGE
    assert "bin.json: " in err and "utf-8" in err


def test_pareto_prints_the_frontier(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("pareto", f"{program}:Model", "--input", "f32[64,16]", "--num-budgets", "2")
    code, out, err = run(capsys, *arguments)
    assert code == OK
    assert "extra time" in out
    assert "remat.pareto:" in err


def test_page_has_the_frontier_if_it_was_asked_for(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.html"
    assert run(capsys, "explain", f"{program}:Model", "--input", "f32[64,16]", "--pareto", "-o", str(file))[0] == OK
    assert "Time for memory" in file.read_text()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("explain", "show", "diff", "pareto"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == OK
        assert "example" in capsys.readouterr().out
    assert main([]) == WRONG_USAGE


def test_command_is_installed_and_knows_its_version() -> None:
    command = [str(Path(sys.executable).parent / "remat"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"remat {remat.__version__}\n"


# --- inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("f32[8,128]", [(torch.float32, (8, 128))]),
        ("bf16[2], i64[3,4]<10 , bool[]", [(torch.bfloat16, (2,)), (torch.int64, (3, 4)), (torch.bool, ())]),
    ],
)
def test_inputs_are_made_as_written(text: str, expected: list[Any]) -> None:
    args, kwargs = make_inputs(text, "cpu")
    assert [(t.dtype, tuple(t.shape)) for t in args] == expected
    assert kwargs == {}


def test_whole_numbers_are_drawn_below_the_bound() -> None:
    (drawn,), named = make_inputs("i64[1000]<7, labels=i32[5]<2", "cpu")
    assert (int(drawn.min()), int(drawn.max())) == (0, 6)
    assert set(named) == {"labels"}


def test_names_may_have_dots() -> None:
    assert load("torch:nn.Linear.forward") is torch.nn.Linear.forward
