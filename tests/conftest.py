"""Fixtures for every test: a fresh compiler, caches that cannot hide a partitioner, and small machines spared."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from support.rank_processes import four_ranks, two_ranks  # noqa: F401 (fixtures)

from remat.compiled import calibration
from remat.passes.prices.cost import Machine

with warnings.catch_warnings():
    # Inductor's own modules use torch's deprecated scripting while they are imported; the first test that compiles
    # would import them and fail for it.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.compile_fx


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `pytest --update-golden` write the files in tests/golden anew."""
    parser.addoption("--update-golden", action="store_true", help="write the files in tests/golden anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of tests/golden, or write the file if asked to."""

    def compare(name: str, text: str) -> None:
        file = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), f"{name} differs; `pytest --update-golden` accepts it"

    return compare


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Iterator[None]:
    """Keep pytest from recording torch's trace: with a handler there, torch writes out every compilation at length."""
    trace = logging.getLogger("torch.__trace")
    for handler in [h for h in trace.handlers if type(h).__module__.startswith("_pytest")]:
        trace.removeHandler(handler)
    return (yield)


@pytest.fixture(autouse=True, scope="session")
def single_thread() -> None:
    # Results must not depend on how a reduction is cut over threads, and the tensors are too small to gain.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def known_machine() -> Iterator[None]:
    """Let plans be those of one machine, whatever runs the tests and however busy it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "machines", lambda: {"cpu": Machine(2.0**35, 2.0**34)})
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Start from an empty compiler whose caches are off: on a hit the partitioner would not run at all."""
    torch._dynamo.reset()
    # Scalar kernels take the C++ compiler half as long as vectorised ones.
    inductor = torch._inductor.config.patch({"fx_graph_cache": False, "cpp.simdlen": 1})
    functorch = torch._functorch.config.patch({"enable_autograd_cache": False})
    with inductor, functorch:
        yield
    torch._dynamo.reset()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what became of each op of torch's table, if any ran."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    outcomes = [
        (report.outcome, value)
        for report in reports
        for name, value in getattr(report, "user_properties", [])
        if name == "every_op" and report.when == "call"
    ]
    if not outcomes:
        return
    ran = [value for outcome, value in outcomes if outcome == "passed"]
    broken = [value["op"] for value in ran if value["num_broken"]]
    skipped = [value for outcome, value in outcomes if outcome == "skipped"]
    partly = [value for value in ran if value["reasons"]]
    terminalreporter.section("every op, with and without remat")
    terminalreporter.line(f"{len(ran)} ops agree bit for bit, in {sum(value['num_steps'] for value in ran)} steps")
    terminalreporter.line(f"{outcomes[0][1]['num_without_gradient']} ops of the table have no gradient on the CPU")
    terminalreporter.line(f"{len(broken)} of them with a graph break around the op: {', '.join(broken) or 'none'}")
    terminalreporter.line(f"{len(partly)} of them with a sample left out, {len(skipped)} ops skipped:")
    for value in [*partly, *skipped]:
        terminalreporter.line(f"  {value['op']}: {'; '.join(dict.fromkeys(value['reasons'])) or 'no sample'}")
