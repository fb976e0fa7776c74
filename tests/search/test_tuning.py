"""The constants of the searches: each steers something, and which apply is decided by how large a graph is."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support.instances import instance

import remat.passes
from remat.passes.memory.storage import find_storages
from remat.passes.search import tuning
from remat.passes.search.bench import Bench
from remat.passes.search.planner import Planner
from remat.passes.search.tuning import LARGE, LARGEST_TABLE, LONGEST_STEP, MIDDLE, SMALL, Tuning, tuning_for
from remat.passes.shared.executor import NODE_BY_NODE


def constants_read() -> set[str]:
    """All attributes of a `tuning` that the passes read."""
    (root,) = remat.passes.__path__
    sources = [path for path in Path(root).rglob("*.py") if path != Path(tuning.__file__)]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in found if ast.unparse(node.value).split(".")[-1] == "tuning"}


def test_every_constant_is_read() -> None:
    assert {field.name for field in fields(Tuning)} <= constants_read()


@pytest.mark.parametrize(
    ("num_values", "num_stages", "num_nodes", "expected"),
    [
        (LARGEST_TABLE // 10 - 1, 10, 100, SMALL),
        (LARGEST_TABLE // 10, 10, 100, MIDDLE),
        (1000, 500, LONGEST_STEP, MIDDLE),
        (1000, 500, LONGEST_STEP + 1, LARGE),
    ],
)
def test_constants_go_by_how_large_a_graph_is(
    num_values: int, num_stages: int, num_nodes: int, expected: Tuning
) -> None:
    assert tuning_for(num_values, num_stages, num_nodes) is expected


def test_planner_searches_as_its_bench_is_told() -> None:
    case = instance(4)
    storages = find_storages(case.graph, NODE_BY_NODE)
    usual, lazy = (Bench(case.problem, storages, tuning=t) for t in (SMALL, replace(SMALL, nodes_simulated=1)))
    assert Bench(case.problem, storages).tuning is SMALL
    lowest = Planner(usual).lowest.peak_bytes
    budget_bytes = lowest + (usual.fastest.peak_bytes - lowest) // 4
    offers = [Planner(bench).within(budget_bytes) for bench in (usual, lazy)]
    assert all(offer is not None for offer in offers)
    assert offers[0].extra_ticks < offers[1].extra_ticks
