"""What each constant of the searches is worth: halve it, double it, and plan the same graphs again.

    python benchmarks/tuning.py
    python benchmarks/tuning.py --fields num_cuts,headroom --json tuning.json

The graphs: random instances (small), tiny models of the zoo and layers with region budgets (neither small nor large),
and a synthetic graph (large). Each is planned for a budget a quarter of the way from the lowest peak to that of the
fastest plan, and some for the lowest peak. A constant is changed for all sizes of graph at once; of one that is a
factor or a part near 1, what is halved and doubled is its distance from 1. A graph is planned again only if planning it
reads the constant.

For each change the largest rise and fall are printed of what plans add to the step (in percent of the time of forward)
and of the lowest peak (in percent of that), each with the graph that has it, and planning time as a part of what it was
on the same graphs, in processor time. The first line plans everything once more with nothing changed: what that says of
time is noise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support import zoo
from support.instances import MACHINE, instance
from support.joints import Joint, capture
from support.synthetic import synthetic_joint
from torch import nn

import remat
from remat.passes.budgets.regions import choose_within_shares, meet_regions
from remat.passes.graph.constraints import find_constraints
from remat.passes.graph.joint_graph import JointGraph, Role
from remat.passes.memory.shares import Shares
from remat.passes.memory.storage import Storages, find_storages
from remat.passes.prices.cost import Roofline, price
from remat.passes.search import tuning
from remat.passes.search.bench import Bench, Offer
from remat.passes.search.planner import Planner
from remat.passes.search.problem import FlowProblem
from remat.passes.search.tuning import Tuning
from remat.passes.shared.executor import NODE_BY_NODE, Executor

INSTANCES, LOWEST_OF = (2, 3, 4, 13, 25, 38, 46, 59), (4, 25)
MODELS = (("llama", True), ("t5", False), ("unet", False))
SYNTHETIC_NODES = 6000
PART = 0.25
"""The budget that is planned for, as a part of the way from the lowest peak found to that of the fastest plan."""

REGION_PARTS = (0.45, 0.35)
"""Of what each region takes without recomputation."""

SIZES = ("SMALL", "MIDDLE", "LARGE")
BOUNDS = ("LARGEST_TABLE", "LONGEST_STEP")
"""Constants that say what is small and what is large."""

AROUND_ONE = ("as_high", "piled_up", "close", "headroom", "lower_by", "squeezed_to", "near")

Find = Callable[[], Offer | None]


@dataclass(frozen=True)
class Case:
    """A graph and what is asked of the planners."""

    name: str
    find: Find
    forward_ticks: int
    seeks_lowest: bool


@dataclass(frozen=True)
class Found:
    """What planning one case came to."""

    value: float
    """The time added in percent of forward's, or the lowest peak in bytes; infinite if no plan fits."""
    seconds: float


@dataclass(frozen=True)
class Change:
    """The largest rise and fall, in percent, each with its case."""

    rise: tuple[float, str] = (0.0, "")
    fall: tuple[float, str] = (0.0, "")

    def __str__(self) -> str:
        parts = [f"{value:+7.2f} {name}" for value, name in (self.rise, self.fall) if value]
        return "; ".join(parts) or "none"


@dataclass(frozen=True)
class Row:
    """What one change of one constant did."""

    field: str
    usual: str
    changed: str
    num_cases: int
    added_time: Change
    lowest_peak: Change
    seconds_ratio: float

    def __str__(self) -> str:
        what = f"{self.field} {self.usual} -> {self.changed}"
        return (
            f"{what:<55} {self.num_cases:>2} cases, planning time x {self.seconds_ratio:4.2f}\n"
            f"    added time: {self.added_time}\n    lowest peak: {self.lowest_peak}"
        )


# -------------------------------------------------------------------------------------------------- graphs


def cases() -> Iterator[Case]:
    """All graphs that are planned, and for what."""
    for number in INSTANCES:
        found = instance(number)
        storages = find_storages(found.graph, NODE_BY_NODE)
        yield from _whole(found.name, found.problem, storages, lowest=number in LOWEST_OF)
    for name, fuses in MODELS:
        built = zoo.get(name).build("tiny")
        batch = built.make_batch(0)
        joint = capture(lambda built=built, batch=batch: built.loss_fn(built.model, batch))
        yield from _whole(name, *_prepared(joint, fuses=fuses))
    for part in REGION_PARTS:
        given = _prepared(capture(*_layers(part)), fuses=False)
        find = partial(_within_regions, *given)
        yield Case(f"regions {part:.0%}", find, _forward_ticks(given[0]), seeks_lowest=False)
    large = synthetic_joint(SYNTHETIC_NODES)
    yield from _whole("synthetic", *_prepared(Joint(large.module, large.num_fwd_outputs), fuses=False))


def _whole(name: str, problem: FlowProblem, storages: Storages, *, lowest: bool = True) -> Iterator[Case]:
    planner = Planner(Bench(problem, storages))
    low, high = planner.lowest.peak_bytes, planner.fastest.peak_bytes
    budget_bytes = low + int(PART * (high - low))
    ticks = _forward_ticks(problem)
    yield Case(name, lambda: Planner(Bench(problem, storages)).within(budget_bytes), ticks, seeks_lowest=False)
    if lowest:
        yield Case(name, lambda: Planner(Bench(problem, storages)).lowest, ticks, seeks_lowest=True)


def _prepared(joint: Joint, *, fuses: bool) -> tuple[FlowProblem, Storages]:
    graph = JointGraph.classify(joint.module, joint.num_fwd_outputs)
    costs = price(graph, Roofline({"cpu": MACHINE}, fuses=fuses), fuses=fuses)
    constraints = find_constraints(graph, preferences_bind=False)
    return FlowProblem.build(graph, constraints, costs), find_storages(graph, Executor(fuses=fuses))


class Block(nn.Module):
    """Normalise, widen, narrow, add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to a stream."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _layers(part: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Twelve layers, in four regions of three that may take a part of what they would."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(Block() for _ in range(3))) for _ in range(4)))
    remat.apply(model, lambda path, _: path in ("0", "1", "2", "3"), memory_budget=part)
    return lambda x: model(x).square().sum(), torch.randn(128, 16, requires_grad=True)


def _within_regions(problem: FlowProblem, storages: Storages) -> Offer:
    shares = Shares.find(problem.graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a budget is not met is a result here
        planner = Planner(Bench(problem, storages))
        return choose_within_shares(meet_regions(planner, shares, take_minimum=True), None).offer


def _forward_ticks(problem: FlowProblem) -> int:
    roles, ticks = problem.graph.roles, problem.costs.run_ticks
    return sum(ticks[i] for i, role in enumerate(roles) if role is Role.FORWARD)


# -------------------------------------------------------------------------------------------------- planning


class Recording(Tuning):
    """Notes which constants are read."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        _READ.add(name)
        return super().__getattribute__(name)


_READ: set[str] = set()


@contextmanager
def tuned(constants: Mapping[str, Any]) -> Iterator[None]:
    """Plan with other constants."""
    usual = {name: getattr(tuning, name) for name in constants}
    for name, value in constants.items():
        setattr(tuning, name, value)
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(tuning, name, value)


def planned(case: Case) -> Found:
    """Plan one case."""
    start = time.process_time()
    offer = case.find()
    seconds = time.process_time() - start
    if offer is None:
        return Found(float("inf"), seconds)
    value = offer.peak_bytes if case.seeks_lowest else 100 * offer.extra_ticks / case.forward_ticks
    return Found(float(value), seconds)


def fields_read(case: Case) -> set[str]:
    """The constants that planning one case reads."""
    _READ.clear()
    with tuned({name: Recording(**asdict(getattr(tuning, name))) for name in SIZES}):
        case.find()
    return set(_READ)


def changed(field: str, factor: float) -> dict[str, Any]:
    """The constants of all sizes of graph with one of them scaled."""
    if field in BOUNDS:
        return {field: int(getattr(tuning, field) * factor)}
    usual = {name: getattr(tuning, name) for name in SIZES}
    return {name: replace(t, **{field: scaled(field, getattr(t, field), factor)}) for name, t in usual.items()}


def scaled(field: str, value: Any, factor: float) -> Any:
    """A constant times a factor, or its distance from 1."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(scaled(field, part, factor) for part in value)
    if field in AROUND_ONE:
        return round(1 + (value - 1) * factor, 6)
    return max(1, int(value * factor)) if isinstance(value, int) else value * factor


def compared(field: str, factor: float, usual: Mapping[Case, Found], rows: Sequence[Case]) -> Row:
    """Plan again with a changed constant."""
    constants = changed(field, factor)
    with tuned(constants):
        found = {case: planned(case) for case in rows}
    added = [(found[c].value - usual[c].value, c.name) for c in rows if not c.seeks_lowest]
    lowest = [(100 * (found[c].value / usual[c].value - 1), c.name) for c in rows if c.seeks_lowest]
    seconds = [sum(figures[c].seconds for c in rows) for figures in (found, usual)]
    texts = [_text(field, constants), _text(field, {name: getattr(tuning, name) for name in constants})]
    ratio = seconds[0] / seconds[1] if seconds[1] else 1.0
    return Row(field, texts[1], texts[0], len(rows), _change(added), _change(lowest), ratio)


def _change(changes: Sequence[tuple[float, str]]) -> Change:
    real = [(value, name) for value, name in changes if abs(value) > 1e-9]
    rises, falls = [c for c in real if c[0] > 0], [c for c in real if c[0] < 0]
    return Change(max(rises, default=(0.0, "")), min(falls, default=(0.0, "")))


def _text(field: str, constants: Mapping[str, Any]) -> str:
    values = [getattr(value, field) if isinstance(value, Tuning) else value for value in constants.values()]
    return "/".join(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for, and print a line per change."""
    names = [field.name for field in fields(Tuning)] + list(BOUNDS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fields", default=",".join(names), help="comma-separated (default: all)")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    everything = list(cases())
    read = {case: fields_read(case) | set(BOUNDS) for case in everything}
    usual = {case: planned(case) for case in everything}
    again = {case: planned(case) for case in everything}
    for case in everything:
        kind = "lowest peak, bytes" if case.seeks_lowest else "added, % of forward"
        print(f"{case.name:<20} {kind:<20} {usual[case].value:12.2f} {usual[case].seconds:8.2f} s", flush=True)
    ratio = sum(f.seconds for f in again.values()) / sum(f.seconds for f in usual.values())
    assert [f.value for f in again.values()] == [f.value for f in usual.values()], "planning is not repeatable"
    print(f"nothing changed: planning time x {ratio:.2f}\n", flush=True)
    rows = []
    for field in arguments.fields.split(","):
        for factor in (0.5, 2.0):
            row = compared(field, factor, usual, [case for case in everything if field in read[case]])
            rows.append(row)
            print(row, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
