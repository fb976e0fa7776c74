"""Time planning: remat's partitioner against torch's on the joint graphs of ever deeper models.

    python benchmarks/planning_time.py
    python benchmarks/planning_time.py --layers 2,8,32 --no-torch-above 32 --nodes 20000
    python benchmarks/planning_time.py --layers 32 --nodes 0 --budget 0.5

The graphs are Llama-shaped, traced as inductor traces them and caught at the moment inductor calls its partitioner;
nothing is lowered or run, so small widths do: planning depends on the number of nodes, not on their sizes. Both
partitioners split copies of the same graph, in turns, each repetition with a fresh partitioner object. Times are
processor times: planning is a single thread's work, and other processes on the machine are not its business.

With --budget both plan for that fraction: remat of the activation peak, torch of the bytes it saves. remat's plan
without a budget may keep within it anyway, so remat is also timed where it has to search: at a fifth of the peak, and
for the lowest peak that it finds. What counts is the slowest of the three.

A last line is remat alone on a synthetic joint graph (see synthetic.py), with the memory that planning adds: the larger
of what the process grows by while it plans, and of what Python allocates in another run (the process may reuse memory
that it has).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import resource
import statistics
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.fx as fx
from support.synthetic import synthetic_joint
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import remat

LAYERS = (2, 4, 8, 16, 32, 64, 128)
MAX_RATIO, MAX_RATIO_FROM_LAYERS = 0.2, 32
MAX_EXPONENT = 1.15
MAX_BUDGET_RATIO, MAX_BUDGET_SECONDS, BUDGET_LAYERS = 0.5, 3.0, 32
SEARCHED_BUDGETS: tuple[float | int, ...] = (0.2, 1024)
"""Budgets that the plain cut does not meet; no model gets by with 1024 bytes, so that one finds the lowest peak."""
MAX_SYNTHETIC_SECONDS, MAX_SYNTHETIC_GIB = 10.0, 2.0
GIB = 2**30

Split = Callable[[fx.GraphModule], object]


@dataclass(frozen=True)
class Row:
    """Both partitioners on one graph, in seconds; torch's are empty where it was left out."""

    num_layers: int
    num_nodes: int
    capture_seconds: float
    remat_seconds: tuple[float, ...]
    torch_seconds: tuple[float, ...]
    remat_seconds_by_budget: dict[str, tuple[float, ...]]
    """With a budget: all that was timed; the slowest of them is what `remat_seconds` has."""

    @property
    def ratio(self) -> float | None:
        """Divide remat's median by torch's."""
        if not self.torch_seconds:
            return None
        return statistics.median(self.remat_seconds) / statistics.median(self.torch_seconds)


@dataclass(frozen=True)
class SyntheticRow:
    """remat on the synthetic graph."""

    num_nodes: int
    build_seconds: float
    seconds: tuple[float, ...]
    added_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for and print the table."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    print(f"{'layers':>6} {'nodes':>7} | {'torch, s':>9} {'remat, s':>9} {'(first)':>9} | ratio", flush=True)
    budget = arguments.budget
    _measure_layers(1, with_torch=True, repeats=1, budget=budget)  # imports, calibration and op tables are not planning
    rows = []
    for num_layers in arguments.layers:
        row = _measure_layers(num_layers, num_layers <= arguments.no_torch_above, arguments.repeats, budget)
        rows.append(row)
        print(_text(row), flush=True)
    if len(rows) > 1:
        print(_exponents(rows))
    if rows:
        print(_ratios(rows) if budget is None else _budget_verdict(rows))
    synthetic = _measure_synthetic(arguments.nodes, arguments.repeats) if arguments.nodes else None
    if synthetic:
        print(_synthetic_text(synthetic))
    if arguments.json:
        figures = {"layers": [asdict(row) for row in rows], "synthetic": synthetic and asdict(synthetic)}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


# --- graphs ---------------------------------------------------------------------------------------------------------


class _Done(Exception):
    """Ends a compilation once its joint graph has been measured."""


class _AtPartitioning(CustomPartitionerFn):
    """Stands where inductor calls its partitioner, hands the joint graph to a function, and stops."""

    def __init__(self, measure: Callable[[fx.GraphModule, Any, dict[str, Any]], None]) -> None:
        self.measure = measure

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        """Measure, then stop the compilation."""
        self.measure(gm, joint_inputs, kwargs)
        raise _Done

    def uuid(self) -> None:
        """Keep this out of compile caches."""
        return


def _llama(num_layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise SystemExit('The Llama-shaped graphs need transformers: pip install "remat[models]"') from error
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=88, num_hidden_layers=num_layers, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.1, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    tokens = torch.zeros((2, 18), dtype=torch.long)
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


def _measure_layers(num_layers: int, with_torch: bool, repeats: int, budget: float | None) -> Row:
    """Trace one model and time both partitioners inside the compilation, where they run for users."""
    rows: list[Row] = []
    start = time.perf_counter()

    def measure(joint: fx.GraphModule, joint_inputs: Any, kwargs: dict[str, Any]) -> None:
        capture_seconds = time.perf_counter() - start
        budgets = [budget] if budget is None else [budget, *SEARCHED_BUDGETS]
        remat_seconds: dict[str, list[float]] = {str(b): [] for b in budgets}
        torch_seconds: list[float] = []
        for repeat in range(repeats):
            _say(f"{num_layers} layers, {len(joint.graph.nodes)} nodes, repetition {repeat + 1} of {repeats}")
            for b in budgets:
                partitioner = remat.partitioner(memory_budget=b, on_infeasible="minimum")
                seconds = _time(lambda gm, p=partitioner: p(gm, joint_inputs, **kwargs), joint)
                remat_seconds[str(b)].append(seconds)
            if with_torch:
                with torch._functorch.config.patch(activation_memory_budget=1.0 if budget is None else budget):
                    torch_seconds.append(
                        _time(lambda gm: min_cut_rematerialization_partition(gm, joint_inputs, **kwargs), joint)
                    )
        by_budget = {name: tuple(seconds) for name, seconds in remat_seconds.items()}
        slowest = max(by_budget.values(), key=statistics.median)
        nodes = len(joint.graph.nodes)
        rows.append(Row(num_layers, nodes, capture_seconds, slowest, tuple(torch_seconds), by_budget))

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        patches = {"custom_partitioner_fn": _AtPartitioning(measure), "force_disable_caches": True}
        return compile_fx(gm, example_inputs, config_patches=patches)

    _say(f"{num_layers} layers, tracing")
    model, batch = _llama(num_layers)
    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(**batch)
    except Exception as error:
        if not rows:
            raise RuntimeError(f"no joint graph of {num_layers} layers reached the partitioners") from error
    _say("")
    return rows[0]


def _time(split: Split, joint: fx.GraphModule) -> float:
    with warnings.catch_warnings():
        # Copying a traced graph copies its pytree specs, which warn about their own pickling.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        gm = copy.deepcopy(joint)
    gc.collect()
    start = time.process_time()
    with warnings.catch_warnings():
        # A budget that cannot be met is asked for on purpose.
        warnings.filterwarnings("ignore", message="memory_budget=", category=UserWarning)
        split(gm)
    return time.process_time() - start


# --- the synthetic graph --------------------------------------------------------------------------------------------


def _measure_synthetic(num_nodes: int, repeats: int) -> SyntheticRow:
    _say(f"building a synthetic joint graph of {num_nodes} nodes")
    start = time.perf_counter()
    joint = synthetic_joint(num_nodes)
    build_seconds = time.perf_counter() - start
    told = {
        "num_fwd_outputs": joint.num_fwd_outputs,
        "static_lifetime_input_indices": joint.static_lifetime_input_indices,
    }
    seconds: list[float] = []

    def split() -> None:
        partitioner = remat.partitioner()
        gc.collect()
        start = time.process_time()
        partitioner(joint.module, [], **told)
        seconds.append(time.process_time() - start)

    with _resident_growth() as grown:
        for repeat in range(repeats):
            _say(f"planning {len(joint.module.graph.nodes)} nodes, repetition {repeat + 1} of {repeats}")
            split()
    timed = tuple(seconds)
    _say("planning once more, counting what Python allocates")
    tracemalloc.start()
    split()
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    _say("")
    return SyntheticRow(len(joint.module.graph.nodes), build_seconds, timed, max(grown[0], allocated))


@contextmanager
def _resident_growth() -> Iterator[list[int]]:
    """Watch resident memory grow from another thread; the kernel's own peak would remember building the graph."""
    before = _resident_bytes()
    grown = [0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            grown[0] = max(grown[0], _resident_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        stop.set()
        watcher.join()
        grown[0] = max(grown[0], _resident_bytes() - before)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no procfs: the peak so far is all there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


# --- text -----------------------------------------------------------------------------------------------------------


def _say(text: str) -> None:
    """Show progress on stderr: one line that overwrites itself in a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _text(row: Row) -> str:
    torch_seconds = f"{statistics.median(row.torch_seconds):>9.3f}" if row.torch_seconds else f"{'skipped':>9}"
    ratio = f"{row.ratio:.3f}" if row.ratio is not None else ""
    return (
        f"{row.num_layers:>6} {row.num_nodes:>7} | {torch_seconds} {statistics.median(row.remat_seconds):>9.3f} "
        f"{row.remat_seconds[0]:>9.3f} | {ratio}"
    )


def _exponents(rows: list[Row]) -> str:
    whole = _exponent(rows)
    upper = _exponent(rows[len(rows) // 2 :]) if len(rows) > 3 else whole
    return (
        f"\nremat's time grows with the power {whole:.2f} of the nodes over all sizes, "
        f"{upper:.2f} over the larger half ({_judged(max(whole, upper), MAX_EXPONENT)})"
    )


def _exponent(rows: list[Row]) -> float:
    """Fit a straight line to logarithms of time over nodes and give its slope."""
    nodes = [math.log(row.num_nodes) for row in rows]
    seconds = [math.log(statistics.median(row.remat_seconds)) for row in rows]
    return statistics.linear_regression(nodes, seconds).slope


def _ratios(rows: list[Row]) -> str:
    ratios = [row.ratio for row in rows if row.num_layers >= MAX_RATIO_FROM_LAYERS and row.ratio is not None]
    if not ratios:
        return f"remat's time over torch's from {MAX_RATIO_FROM_LAYERS} layers on: not measured"
    return (
        f"remat's time over torch's from {MAX_RATIO_FROM_LAYERS} layers on: worst {max(ratios):.3f} "
        f"({_judged(max(ratios), MAX_RATIO)})"
    )


def _budget_verdict(rows: list[Row]) -> str:
    rows = [row for row in rows if row.num_layers == BUDGET_LAYERS and row.ratio is not None]
    if not rows:
        return f"planning with a budget: not measured at {BUDGET_LAYERS} layers"
    seconds = statistics.median(rows[0].remat_seconds)
    parts = (f"{name}: {statistics.median(s):.2f} s" for name, s in rows[0].remat_seconds_by_budget.items())
    return (
        f"planning with a budget at {BUDGET_LAYERS} layers, by budget {', '.join(parts)}\n"
        f"slowest: {seconds:.2f} s ({_judged(seconds, MAX_BUDGET_SECONDS)}), "
        f"{rows[0].ratio:.3f} of torch's time ({_judged(rows[0].ratio, MAX_BUDGET_RATIO)})"
    )


def _synthetic_text(row: SyntheticRow) -> str:
    seconds, gib = statistics.median(row.seconds), row.added_bytes / GIB
    return (
        f"synthetic graph of {row.num_nodes} nodes: {seconds:.2f} s, first {row.seconds[0]:.2f} s "
        f"({_judged(seconds, MAX_SYNTHETIC_SECONDS)}), {gib:.2f} GiB added ({_judged(gib, MAX_SYNTHETIC_GIB)})"
    )


def _judged(value: float, target: float) -> str:
    return f"target <= {target:g}: {'met' if value <= target else 'MISSED'}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    layers = ",".join(map(str, LAYERS))
    parser.add_argument("--layers", default=layers, help="comma-separated; empty for none (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions per graph (default: %(default)s)")
    parser.add_argument(
        "--no-torch-above", type=int, default=sys.maxsize, metavar="LAYERS", help="skip torch on deeper models"
    )
    parser.add_argument(
        "--nodes", type=int, default=100_000, help="size of the synthetic graph, 0 to skip it (default: %(default)s)"
    )
    parser.add_argument("--budget", type=float, help="plan for this fraction, both sides (default: for time alone)")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args(argv)
    arguments.layers = [int(n) for n in arguments.layers.split(",") if n]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
