"""Compile caches with remat: hit when nothing changed, miss when anything that decides a plan did."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.two_processes import HIT, MISS, Lookup, run_in_two_processes

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters

torch.set_num_threads(1)
RATE = 1e-9


def by_rate(call):
    return sum([RATE * spec.num_bytes for spec in call.outputs])


def defined_as(text):
    scope = {"__name__": "prices"}
    exec(f"def price(call): return {text}", scope)
    return scope["price"]


def program(x, w):
    return (x @ w).sin().exp() * x


def train(name, **options):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.compile(program, backend="remat", options=options)(x, w).sum().backward()
    ours = [x.grad, w.grad]
    x.grad = w.grad = None
    program(x, w).sum().backward()
    torch.testing.assert_close(ours, [x.grad, w.grad])
    seen = counters["aot_autograd"]
    print(json.dumps([name, seen["autograd_cache_hit"], seen["autograd_cache_miss"], seen["autograd_cache_bypass"]]))


def pretend_version(version):
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "remat" and hasattr(module, "__version__"):
            module.__version__ = version


train("default options")
train("callable", cost_model=by_rate)
if sys.argv[1] == "second":
    train("another named cost model", cost_model="flops")
    train("that one again", cost_model="flops")
    train("an option of inductor", epilogue_fusion=False)
    RATE = 2e-9
    train("another constant of a callable", cost_model=by_rate)
    train("a function", cost_model=defined_as("0.0"))
    train("the same function made again", cost_model=defined_as("0.0"))
    train("another source under the same name", cost_model=defined_as("1e6"))
    train("a dump", dump=sys.argv[2] + "/cached")
    train("a dump again", dump=sys.argv[2] + "/cached")
    with torch.compiler.config.patch(force_disable_caches=True):
        train("a dump without caches", dump=sys.argv[2] + "/compiled")
    pretend_version("99.0")
    train("another version of remat")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def lookups(folder: Path) -> Mapping[str, Mapping[str, Lookup]]:
    return run_in_two_processes(SCRIPT, folder)


@pytest.mark.parametrize("what", ["default options", "callable"])
def test_first_process_fills_the_cache(lookups: Mapping[str, Mapping[str, Lookup]], what: str) -> None:
    assert lookups["first"][what] == MISS


@pytest.mark.parametrize("what", ["default options", "callable", "that one again", "the same function made again"])
def test_same_code_and_options_hit(lookups: Mapping[str, Mapping[str, Lookup]], what: str) -> None:
    assert lookups["second"][what] == HIT


@pytest.mark.parametrize(
    "what",
    [
        "another named cost model",
        "an option of inductor",
        "another constant of a callable",
        "a function",
        "another source under the same name",
        "another version of remat",
    ],
)
def test_change_misses(lookups: Mapping[str, Mapping[str, Lookup]], what: str) -> None:
    assert lookups["second"][what] == MISS


@pytest.mark.parametrize("what", ["a dump", "a dump again"])
def test_asking_for_a_report_still_hits(lookups: Mapping[str, Mapping[str, Lookup]], what: str) -> None:
    assert lookups["second"][what] == HIT


def test_report_of_what_a_cache_held_equals_the_one_of_compiling_it(
    lookups: Mapping[str, Mapping[str, Lookup]], folder: Path
) -> None:
    assert lookups["second"]["a dump without caches"].num_hits == 0
    (compiled,) = reports_in(folder / "dumps" / "compiled")
    assert reports_in(folder / "dumps" / "cached") == [compiled, compiled]


def reports_in(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("*.json"))]
