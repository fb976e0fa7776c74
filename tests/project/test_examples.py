"""The examples run in `.ci/run`, after the tests; here only that none is forgotten there and each explains itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)


@each_example
def test_example_runs_in_ci(path: Path) -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert any(f"examples/{path.name}" in line for line in commands if not line.lstrip().startswith("#"))


@each_example
def test_example_says_what_it_is_and_how_to_run_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python examples/{path.name}" in text
    assert "argparse" in path.read_text(), "--help lists what can be changed"
