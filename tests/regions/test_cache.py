"""Compile caches with regions: hit when nothing changed, miss when the policy or an option of a region did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.two_processes import HIT, MISS, Lookup, run_in_two_processes

from remat.regions.carrier import operator_name
from remat.regions.region_options import RegionOptions

aten = torch.ops.aten

SCRIPT = """
import json, sys
import torch
import remat
from torch._dynamo.utils import counters

torch.set_num_threads(1)
aten = torch.ops.aten
LIMIT = 1


def by_limit(ctx, op, *args, **kwargs):
    return op is aten.mm.default and LIMIT > 0


def program(x, w):
    return remat.name((x @ w).sin(), "inner").exp() * x


def train(name, function=program, region_name="part", **options):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    region = remat.checkpoint_region(name=region_name, **options)(function)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.compile(lambda x, w: region(x, w), backend="remat")(x, w).sum().backward()
    ours = [x.grad, w.grad]
    x.grad = w.grad = None
    function(x, w).sum().backward()
    torch.testing.assert_close(ours, [x.grad, w.grad])
    seen = counters["aot_autograd"]
    print(json.dumps([name, seen["autograd_cache_hit"], seen["autograd_cache_miss"], seen["autograd_cache_bypass"]]))


train("bare")
train("policy", policy=by_limit)
if sys.argv[1] == "second":
    LIMIT = 0
    train("another constant", policy=by_limit)
"""


@pytest.fixture(scope="module")
def lookups(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Lookup]]:
    return run_in_two_processes(SCRIPT, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("what", ["bare", "policy"])
def test_first_process_fills_the_cache(lookups: Mapping[str, Mapping[str, Lookup]], what: str) -> None:
    assert lookups["first"][what] == MISS


@pytest.mark.parametrize("what", ["bare", "policy"])
def test_second_process_hits(lookups: Mapping[str, Mapping[str, Lookup]], what: str) -> None:
    assert lookups["second"][what] == HIT


def test_another_constant_in_the_policy_misses(lookups: Mapping[str, Mapping[str, Lookup]]) -> None:
    assert lookups["second"]["another constant"] == MISS


def policy_saving(count: int) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op is aten.mm.default and count > 0

    return policy


SPECS = {
    "bare": {},
    "another name": {"name": "other"},
    "a list": {"policy": [aten.mm.default]},
    "another list": {"policy": [aten.mm.default, aten.sin.default]},
    "a packet": {"policy": [aten.mm]},
    "a closure": {"policy": policy_saving(1)},
    "another closure": {"policy": policy_saving(2)},
    "another option": {"preserve_rng_state": False},
}
"""Regions that no cache may take for each other. The operator's name is part of the graph's text, and so of the key."""


def test_regions_that_differ_have_operators_that_differ() -> None:
    names = {what: operator_name(RegionOptions(**{"name": "part", **spec})) for what, spec in SPECS.items()}
    assert len(set(names.values())) == len(SPECS)
    assert all(name.isidentifier() for name in names.values())


def test_regions_that_are_alike_share_an_operator() -> None:
    for make in (lambda: None, lambda: [aten.mm.default], lambda: policy_saving(1)):
        names = {operator_name(RegionOptions(name="part", policy=make())) for _ in range(2)}
        assert len(names) == 1
