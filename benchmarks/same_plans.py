"""Show that a change of the code is none of the plans: dump what is planned before and after it, and compare.

    python benchmarks/same_plans.py dump before.json
    python benchmarks/same_plans.py dump after.json
    python benchmarks/same_plans.py compare before.json after.json

Planned are the models of the zoo for several budgets and both inner compilers, models with regions that have policies
and budgets, models whose sizes are symbols, frontiers, and the random graphs of tests/support/instances.py. Costs are
those of one made-up machine, so dumps of different machines can be compared. Nothing is lowered; only the cases called
`compiled` run a step, of graphs that are executed as they are.

All goes through remat's public names, since a change may move whatever is behind them. A case has a digest for each
part of what was decided: a report's wording, and the lines of a program, are left out. It has a few figures, too, from
which one can see how large a difference is; `dump --whole --only NAME` writes the parts themselves, and `compare` then
shows where they begin to differ. --quick dumps a tenth of the cases, under the same names.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.fx as fx
from support import instances, zoo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._pytree import tree_map

import remat
from remat.compiled import calibration

# --- what has no public name ----------------------------------------------------------------------------------------


def random_joint(number: int) -> fx.GraphModule:
    """The joint graph of a random instance, made anew; it has one forward output."""
    return instances.instance(number).graph.module


def publish(split: Any) -> None:
    """Have a partition function report what it planned: for inductor and a budget it leaves that to the backend."""
    split.watcher.publish()


class KnownMachine:
    """Takes the place of the constants that are measured, and remembers that it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        calibration.machines = self

    def __call__(self) -> dict[str, Any]:
        """The machine for which the random instances are made."""
        self.num_asked += 1
        return {"cpu": instances.MACHINE}


# --- what is dumped -------------------------------------------------------------------------------------------------

INNERS = ("aot_eager", "inductor")
LOWEST = 1024
"""A budget in bytes that nothing meets, so that the lowest plan is taken."""

Budget = float | int | None
BUDGETS: tuple[Budget, ...] = (None, 0.7, 0.4, 0.2, LOWEST)
LARGE_BUDGETS: tuple[Budget, ...] = (0.4, LOWEST)
RANDOM_BUDGETS = (0.9, 0.75, 0.65)
NUM_RANDOM, NUM_RANDOM_QUICKLY = 200, 20
QUICK_MODELS = ("llama", "resnet", "lstm")

Case = dict[str, Any]
"""One case as JSON: a list of graphs, each with `figures` and `parts`."""
Cases = Iterator[tuple[str, list[Any]]]


@dataclass(frozen=True)
class Work:
    """Cases that share what is traced."""

    name: str
    run: Callable[[], Cases]
    is_quick: bool = False


def all_work() -> Iterator[Work]:
    """Everything that is planned."""
    for model in zoo.ZOO:
        for inner in INNERS:
            is_quick = model in QUICK_MODELS
            yield Work(f"tiny {model} {inner}", partial(_partitioned, "tiny", model, inner, BUDGETS), is_quick)
            yield Work(f"bench {model} {inner}", partial(_partitioned, "bench", model, inner, LARGE_BUDGETS))
            yield Work(f"explain {model} {inner}", partial(_explained, model, inner), model == "resnet")
    for name, make in REGIONS.items():
        for inner in INNERS:
            yield Work(f"regions {name} {inner}", partial(_with_regions, make, inner), inner == "aot_eager")
    for inner in INNERS:
        yield Work(f"symbols {inner}", partial(_with_symbols, inner))
    for model in ("resnet", "gpt2"):
        for inner in INNERS:
            yield Work(f"frontier {model} {inner}", partial(_frontier, model, inner))
    for model in ("vit", "resnet"):
        yield Work(f"compiled {model}", partial(_compiled, model), model == "resnet")
    for number in range(NUM_RANDOM):
        yield Work(f"random {number}", partial(_random, number), number < NUM_RANDOM_QUICKLY)


def _partitioned(size: zoo.Size, model: str, inner: str, budgets: Sequence[Budget]) -> Cases:
    """Plan one model for some budgets, on copies of the joint graph that the inner compiler is given."""
    found: dict[str, list[Any]] = {}

    def visit(joint: fx.GraphModule, given: Mapping[str, Any]) -> None:
        for budget in budgets:
            graphs = found.setdefault(_shown(budget), [])
            graphs += _split(_copied(joint), inner, budget, **given)

    _visit_joint(_step(zoo.get(model).build(size)), inner, visit)
    yield from found.items()


def _explained(model: str, inner: str) -> Cases:
    """Plan as `backend="remat"` does, which leaves more to choose from than a partition function has."""
    step = _step(zoo.get(model).build("tiny"))
    yield _shown(0.4), _explain(step, inner=inner, memory_budget=0.4)


def _with_regions(make: Callable[[], torch.nn.Module], inner: str) -> Cases:
    for budget in (None, 0.5):
        yield _shown(budget), _explain(make(), _batch(), inner=inner, memory_budget=budget)


def _with_symbols(inner: str) -> Cases:
    for budget in (None, 0.5, 2**18):
        yield _shown(budget), _explain(_stack(), _batch(), inner=inner, memory_budget=budget, dynamic=True)


def _frontier(model: str, inner: str) -> Cases:
    found = remat.pareto(_step(zoo.get(model).build("tiny")), inner=inner, num_budgets=6)
    for number, point in enumerate(found.points):
        yield f"point {number}", [_record({"plan": json.loads(point.plan.to_json())})]


def _compiled(model: str) -> Cases:
    """Go through the backend itself, with an inner compiler that looks at the halves."""
    built = zoo.get(model).build("tiny")
    halves: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        halves.append(gm)
        return gm

    with _dumped() as (folder, graphs):
        options = {"inner": inner, "memory_budget": 0.4, "on_infeasible": "minimum", "dump": folder}
        built.training_step(torch.compile(built.model, backend="remat", options=options), built.make_batch(0))
    yield _shown(0.4), [_record(graph, halves) for graph in graphs]


def _random(number: int) -> Cases:
    for budget in RANDOM_BUDGETS:
        yield _shown(budget), list(_split(random_joint(number), "aot_eager", budget, num_fwd_outputs=1))


# --- regions --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Normalise, widen, narrow, drop, add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's correction to its input."""
        wide = remat.name(torch.nn.functional.gelu(self.up(self.norm(x))), "wide")
        return x + torch.nn.functional.dropout(self.down(wide).sin(), 0.1)


class Stack(torch.nn.Sequential):
    """Some blocks and a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum what the last block returns."""
        return super().forward(x).square().sum()


def _batch() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def _stack(*marks: tuple[str, Mapping[str, Any]]) -> torch.nn.Module:
    model = Stack(*(Block() for _ in range(4)))
    for pattern, options in marks:
        remat.apply(model, pattern, **options)
    return model


REGIONS: Mapping[str, Callable[[], torch.nn.Module]] = {
    "bare": lambda: _stack(("*", {})),
    "budget": lambda: _stack(("*", {"memory_budget": 0.7})),
    "nested budgets": lambda: _stack(("1", {"memory_budget": 0.7}), ("", {"memory_budget": 0.6})),
    "matmuls": lambda: _stack(("*", {"policy": remat.policies.save_matmuls()})),
    "matmuls, budget": lambda: _stack(("*", {"policy": remat.policies.save_matmuls(), "memory_budget": 0.8})),
    "names in all": lambda: _stack(
        ("?.up", {"policy": remat.policies.save_all()}), ("", {"policy": remat.policies.save_names("wide")})
    ),
    "offload": lambda: _stack(("*", {"policy": remat.policies.offload_names("wide")})),
}


# --- planning -------------------------------------------------------------------------------------------------------


class _Done(Exception):
    """Ends a compilation once its joint graph has been seen."""


class _Visitor(CustomPartitionerFn):
    """Stands where a compiler calls its partitioner, hands over the joint graph, and stops."""

    def __init__(self, visit: Callable[[fx.GraphModule, Mapping[str, Any]], None]) -> None:
        self.visit, self.is_done = visit, False

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **given: Any) -> Any:  # noqa: ARG002 (the protocol's)
        """Visit, then stop the compilation."""
        self.visit(gm, given)
        self.is_done = True
        raise _Done

    def uuid(self) -> None:
        """Keep this out of compile caches."""
        return


def _visit_joint(
    step: Callable[[], Any], inner: str, visit: Callable[[fx.GraphModule, Mapping[str, Any]], None]
) -> None:
    """Trace a step as far as to its joint graph, as an inner compiler traces it."""
    visitor = _Visitor(visit)
    if inner == "inductor":
        patches = {"custom_partitioner_fn": visitor, "force_disable_caches": True}
        backend: Any = partial(compile_fx, config_patches=patches)
    else:
        backend = aot_autograd(
            fw_compiler=boxed_nop, bw_compiler=boxed_nop,
            partition_fn=lambda *args, **given: visitor(*args, **given), keep_inference_input_mutations=True,
        )  # fmt: skip
    try:
        torch.compile(step, backend=backend, fullgraph=True)()
    except Exception:
        if not visitor.is_done:
            raise


def _copied(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy to be rewritten; its tensors, fake and real, are the same."""
    return fx.GraphModule(joint, copy.deepcopy(joint.graph))


def _split(joint: fx.GraphModule, inner: str, budget: Budget, **given: Any) -> list[Any]:
    """Split a joint graph for a budget, and record the plan with the two halves."""
    with _dumped() as (folder, graphs):
        split = remat.partitioner(inner=inner, memory_budget=budget, on_infeasible="minimum", dump=folder)
        halves = split(joint, [], **given)
        publish(split)
    return [_record(graph, halves) for graph in graphs]


def _explain(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    torch._dynamo.reset()
    report = remat.explain(function, *args, on_infeasible="minimum", **options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        report.save(file)
        return [_record(graph) for graph in json.loads(file.read_text())["graphs"]]


@contextmanager
def _dumped() -> Iterator[tuple[str, list[Any]]]:
    """A folder for the option `dump`, and all graphs that were reported there in the end."""
    graphs: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        yield folder, graphs
        for file in sorted(Path(folder).glob("*.json")):
            graphs += json.loads(file.read_text())["graphs"]
        assert graphs, "nothing was reported"


def _step(built: zoo.Built) -> Callable[[], torch.Tensor]:
    batch = built.make_batch(0)
    return lambda: built.loss_fn(built.model, batch)


def _shown(budget: Budget) -> str:
    return {None: "no budget", LOWEST: "lowest"}.get(budget) or f"budget {budget:g}"


# --- records --------------------------------------------------------------------------------------------------------

DECIDED = ("value", "op", "action", "num_bytes", "num_recomputes", "region", "policy", "name", "is_view")
PRICED = ("value", "save_seconds", "recompute_seconds")


def _record(graph: Mapping[str, Any], halves: Sequence[fx.GraphModule] = ()) -> Case:
    """What was decided for one graph of a report, or for a plan alone, in parts; None for what is not said."""
    plan = graph["plan"]
    decisions, peak = plan["decisions"], plan["peak"]
    parts = {
        "joint graph": plan.get("graph"),
        "decisions": _columns(decisions, *DECIDED),
        "reasons": _columns(decisions, "value", "reason"),
        "prices": _columns(decisions, *PRICED),
        "order of forward": graph.get("forward"),
        "order of backward": plan["order"],
        "phases": plan.get("phases"),
        "peak": [peak["num_bytes"], peak["node"], peak["in_forward"], peak["alive"]],
        "live bytes": graph.get("timeline", {}).get("live_bytes"),
        "budget": [plan["budget_bytes"], plan["peak_without_recompute_bytes"]],
        "shares of regions": plan.get("shares"),
        "times": [plan["forward_seconds"], plan["extra_seconds"]],
        "bound on times": plan.get("least_extra_seconds"),
        "symbols": plan.get("symbols"),
        "bytes by symbols": [peak.get("expression"), *_columns(decisions, "expression")],
        "ranges": [row for row in plan.get("ranges", ()) if row["meaning"] == "budget"],
        "guards": plan.get("guards"),
        "most ranges": plan.get("most_ranges"),
        "halves": [_lines(half) for half in halves],
        "marks": [_marks(half) for half in halves],
    }
    return {"figures": _figures(plan), "parts": parts}


def _columns(rows: Sequence[Mapping[str, Any]], *names: str) -> list[Any]:
    return [[row.get(name) for name in names] for row in rows]


def _figures(plan: Mapping[str, Any]) -> dict[str, Any]:
    actions = Counter(row["action"] for row in plan["decisions"])
    return {
        "peak_bytes": plan["peak"]["num_bytes"],
        "budget_bytes": plan["budget_bytes"],
        "extra_us": round(1e6 * plan["extra_seconds"], 3),
        "saved_bytes": sum(row["num_bytes"] for row in plan["decisions"] if row["action"] == "SAVE"),
        "num_recomputes": sum(row["num_recomputes"] for row in plan["decisions"]),
        "num_backward": len(plan["order"]),
        "planner": plan["planner"],
        **{action.lower(): count for action, count in sorted(actions.items())},
    }


def _lines(half: fx.GraphModule) -> list[str]:
    """A graph as text in which nothing says where a function is defined."""
    lines = []
    for node in half.graph.nodes:
        args, kwargs = tree_map(_argument, (node.args, dict(node.kwargs)))
        lines.append(f"{node.name} = {_target(node)} {args} {kwargs}")
    return lines


def _target(node: fx.Node) -> str:
    if isinstance(node.target, (str, torch._ops.OpOverload)):
        return f"{node.op} {node.target}"
    return f"{node.op} {getattr(node.target, '__name__', type(node.target).__name__)}"


def _argument(value: Any) -> Any:
    """What an argument is printed as; what has no stable text is named by its type."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    is_stable = isinstance(value, (fx.Node, torch.SymInt, torch.dtype, torch.device, torch.layout, torch.memory_format))
    return str(value) if is_stable else f"<{type(value).__name__}>"


def _marks(half: fx.GraphModule) -> list[Any]:
    """What remat has written on nodes for the compiler, under whatever name; where they come from is for checks."""
    marks = []
    for node in half.graph.nodes:
        own = [value for name, value in node.meta.items() if name.startswith("remat_") and name != "remat_node"]
        marks += [[node.name, value] for value in own if isinstance(value, (bool, int, str, tuple))]
    return marks


def _digest(part: Any) -> Any:
    if part is None:
        return None
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16]


# --- dump and compare -----------------------------------------------------------------------------------------------


def dump(file: Path, *, is_quick: bool = False, only: str = "", whole: bool = False) -> None:
    """Plan everything and write down what was decided."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="memory_budget=", category=UserWarning)  # the lowest plans are asked for
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # torch's own, of copied graphs
    machine = KnownMachine()
    cases: dict[str, Any] = {}
    work = [work for work in all_work() if only in work.name and (work.is_quick or not is_quick)]
    start = time.process_time()
    for number, part in enumerate(work, start=1):
        begin = time.process_time()
        torch._dynamo.reset()
        for name, graphs in part.run():
            cases[f"{part.name}, {name}"] = graphs if whole else [_digested(graph) for graph in graphs]
        _say(f"{number} of {len(work)}: {part.name}, {time.process_time() - begin:.1f} s")
    assert machine.num_asked, "plans were made for this machine's own constants"
    file.write_text(json.dumps({"torch": torch.__version__, "cases": cases}, indent=1) + "\n")
    print(f"{len(cases)} cases in {time.process_time() - start:.0f} s of processor time: {file}")


def _digested(graph: Case) -> Case:
    return {**graph, "parts": {name: _digest(part) for name, part in graph["parts"].items()}}


def compare(old: Path, new: Path, ignored: Sequence[str] = ()) -> int:
    """Print what differs, case by case; returns how many cases do."""
    before, after = (json.loads(file.read_text()) for file in (old, new))
    if before["torch"] != after["torch"]:
        print(f"torch is {before['torch']} in {old}, {after['torch']} in {new}: plans of different releases may differ")
    cases = before["cases"], after["cases"]
    num_different = 0
    for name in dict.fromkeys([*cases[0], *cases[1]]):
        found = list(_differences(cases[0].get(name), cases[1].get(name), ignored))
        num_different += bool(found)
        print(f"{'different' if found else 'equal    '}  {name}", *found, sep="\n    ")
    print(f"{len({*cases[0], *cases[1]}) - num_different} cases are equal, {num_different} are different")
    return num_different


def _differences(old: list[Case] | None, new: list[Case] | None, ignored: Sequence[str]) -> Iterator[str]:
    if old is None or new is None:
        yield f"only in the {'new' if old is None else 'old'} dump"
        return
    if len(old) != len(new):
        yield f"{len(old)} graphs, now {len(new)}"
    for number, (before, after) in enumerate(zip(old, new, strict=False)):
        where = f"graph {number}: " if len(old) > 1 else ""
        for name in dict.fromkeys([*before["parts"], *after["parts"]]):
            texts = before["parts"].get(name), after["parts"].get(name)
            if name not in ignored and texts[0] != texts[1]:
                yield f"{where}{name}{_first_difference(*texts)}"
        for name in dict.fromkeys([*before["figures"], *after["figures"]]):
            figures = before["figures"].get(name), after["figures"].get(name)
            if figures[0] != figures[1]:
                yield f"{where}{name}: {figures[0]}, now {figures[1]}"


def _first_difference(old: Any, new: Any) -> str:
    """Where parts begin to differ, if they are stored themselves."""
    if old is None or new is None:
        return f" is only in the {'new' if old is None else 'old'} dump"
    if not isinstance(old, list) or not isinstance(new, list):
        return ""
    pairs = enumerate(zip_longest(old, new))
    return next(f" at {k}: {a}, now {b}" for k, (a, b) in pairs if a != b)


def _say(text: str) -> None:
    """Show progress on stderr: one line that overwrites itself in a terminal, plain lines elsewhere."""
    start, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump", help="plan everything and write down what was decided")
    dumping.add_argument("file", type=Path)
    dumping.add_argument("--quick", action="store_true", help="a tenth of the cases")
    dumping.add_argument("--only", default="", metavar="NAME", help="what has this in its name, `tiny llama`")
    dumping.add_argument("--whole", action="store_true", help="write the parts themselves, not their digests")
    comparing = commands.add_parser("compare", help="say what differs between two dumps; status 1 if anything does")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--ignore", action="append", default=[], metavar="PART", help="a part that may differ")
    asked = parser.parse_args(argv)
    if asked.command == "dump":
        dump(asked.file, is_quick=asked.quick, only=asked.only, whole=asked.whole)
        return 0
    return 1 if compare(asked.old, asked.new, asked.ignore) else 0


if __name__ == "__main__":
    sys.exit(main())
