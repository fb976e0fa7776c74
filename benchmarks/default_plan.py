"""Compare remat's default plan with torch.compile's own, model by model: measured activation peak and step time.

    python benchmarks/default_plan.py
    python benchmarks/default_plan.py --models llama,bert --rounds 15 --json out.json

Every model is measured in a process of its own, so that a failure or a fragmented heap spoils no other model. Inside it
both backends compile the same module, start from the same seeds, and are timed in turns. Ratios are remat's figure over
the figure of ``torch.compile(model)``; below 1.0 remat is better. Losses and gradients of the two are compared as well:
a plan that is quick because it computes something else is worth nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop otherwise

import torch
from support import zoo
from support.measure import activation_peak, clear_gradients, geometric_mean, interleaved_times

STOCK, REMAT = "inductor", "remat"
MIB = 2**20

MAX_TIME_GEOMEAN, MAX_TIME_EACH = 0.97, 1.03
MAX_PEAK_GEOMEAN, MAX_PEAK_EACH = 0.80, 1.00

# Recomputed values are rounded by other kernels than the saved ones were; this is far above that and far below a
# gradient made with other random numbers, which differs by about its own size.
MAX_RELATIVE_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Side:
    """One backend's figures on one model."""

    compile_seconds: float
    num_graphs: int
    peak_bytes: int
    peak_with_gradients_bytes: int
    forward_end_bytes: int
    gradient_bytes: int
    wall_seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Both backends on one model; ratios are remat over torch.compile's default."""

    model: str
    size: str
    threads: int
    stock: Side
    remat: Side
    peak_ratio: float
    time_ratio: float
    """Median over rounds of the ratio within a round (wall time)."""
    time_ratio_of_medians: float
    cpu_ratio: float
    """As time_ratio, of processor time."""
    loss_difference: float
    """Relative, for the same seed."""
    gradient_difference: float
    """Norm of the difference of all gradients over their norm."""
    max_difference: float
    """What these two may be at most, for the model's dtype."""

    @property
    def results_agree(self) -> bool:
        """Whether both backends computed the same loss and gradients, up to rounding."""
        return max(self.loss_difference, self.gradient_difference) <= self.max_difference


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for and print the table."""
    arguments = _parse(argv)
    failed: list[str] = []
    done: list[dict[str, Any]] = []
    print(_header(arguments), flush=True)
    for name in arguments.models:
        try:
            row = _measure_here(name, arguments) if arguments.in_process else _measure_apart(name, arguments)
        except subprocess.CalledProcessError as error:
            print(f"{name:<8} FAILED, exit status {error.returncode}; see above", flush=True)
            failed.append(name)
            continue
        done.append(row)
        print(_row(row), flush=True)
    if done:
        print(_footer(done))
    if arguments.json:
        arguments.json.write_text(json.dumps(done, indent=1) + "\n")
    wrong = [row["model"] for row in done if not row["results_agree"]]
    if wrong:
        print(f"Losses or gradients differ by more than rounding: {', '.join(wrong)}")
    return 1 if failed or wrong else 0


def compare(name: str, size: zoo.Size, rounds: int, threads: int, say: Callable[[str], None]) -> Comparison:
    """Compile a model of the zoo with both backends and measure them against each other."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    built = zoo.get(name).build(size)
    batch = built.make_batch(0)
    params = list(built.model.parameters())
    # The whole model in one graph: a graph break would hide part of the step from both planners.
    compiled = {b: torch.compile(built.model, backend=b, fullgraph=True) for b in (STOCK, REMAT)}

    results, compile_seconds, num_graphs, peaks = {}, {}, {}, {}
    for backend, model in compiled.items():
        say(f"compiling with {backend}")
        graphs_before, start = _num_graphs(), time.perf_counter()
        built.training_step(model, batch)
        compile_seconds[backend] = time.perf_counter() - start
        num_graphs[backend] = _num_graphs() - graphs_before
        results[backend] = _result(built, model, batch)
        say(f"measuring the peak with {backend}")
        peaks[backend] = activation_peak(lambda model=model: built.loss_fn(model, batch), params)

    timings = interleaved_times(
        {backend: _step(built, model, batch) for backend, model in compiled.items()},
        rounds,
        threads=threads,
        on_round=lambda number: say(f"timing, round {number} of {rounds}"),
    )
    sides = {
        backend: Side(
            compile_seconds=compile_seconds[backend],
            num_graphs=num_graphs[backend],
            peak_bytes=peaks[backend].activation_bytes,
            peak_with_gradients_bytes=peaks[backend].with_gradients_bytes,
            forward_end_bytes=peaks[backend].forward_end_bytes,
            gradient_bytes=peaks[backend].gradient_bytes,
            wall_seconds=timings.wall[backend],
            cpu_seconds=timings.cpu[backend],
        )
        for backend in compiled
    }
    (stock_loss, stock_gradient), (remat_loss, remat_gradient) = results[STOCK], results[REMAT]
    return Comparison(
        model=name,
        size=size,
        threads=threads,
        stock=sides[STOCK],
        remat=sides[REMAT],
        peak_ratio=peaks[REMAT].activation_bytes / peaks[STOCK].activation_bytes,
        time_ratio=timings.median_of_ratios(REMAT, STOCK),
        time_ratio_of_medians=timings.ratio_of_medians(REMAT, STOCK),
        cpu_ratio=timings.cpu_median_of_ratios(REMAT, STOCK),
        loss_difference=_relative_difference(remat_loss, stock_loss),
        gradient_difference=_relative_difference(remat_gradient, stock_gradient),
        max_difference=MAX_RELATIVE_DIFFERENCE[params[0].dtype],
    )


def _step(built: zoo.Built, model: Any, batch: zoo.Batch) -> Callable[[], object]:
    return lambda: built.training_step(model, batch)


def _result(built: zoo.Built, model: Any, batch: zoo.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the loss and all gradients, flattened, of a step with fixed random numbers."""
    torch.manual_seed(1)
    loss = built.training_step(model, batch)
    grads = [p.grad.double().flatten() for p in built.model.parameters() if p.grad is not None]
    clear_gradients(built.model.parameters())
    return loss.double(), torch.cat(grads)


def _relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def _num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# --- processes ------------------------------------------------------------------------------------------------------


def _measure_here(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    comparison = compare(name, arguments.size, arguments.rounds, arguments.threads, lambda text: _say(name, text))
    _say(name, "done")
    return {**asdict(comparison), "results_agree": comparison.results_agree}


def _measure_apart(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        command = [
            sys.executable, __file__, "--in-process", "--models", name, "--rounds", str(arguments.rounds),
            "--threads", str(arguments.threads), "--size", arguments.size, "--json", str(out),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
        status = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=False).returncode
        if not out.exists():
            raise subprocess.CalledProcessError(status, command)
        return json.loads(out.read_text())[0]


def _say(name: str, text: str) -> None:
    """Show progress on stderr: one line that overwrites itself in a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name}: {text}" if text != "done" else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif not text.startswith("timing"):
        print(f"{name}: {text}", file=sys.stderr, flush=True)


# --- text -----------------------------------------------------------------------------------------------------------


def _header(arguments: argparse.Namespace) -> str:
    return (
        f"remat's default plan against torch.compile's, inductor, size {arguments.size}, "
        f"{arguments.threads} thread(s), median of {arguments.rounds} interleaved rounds\n"
        f"{'':8} | {'activation peak, MiB':^24} | {'step, s (medians)':^15} | {'ratio of times':^20} |"
        f" {'relative difference':^19} |\n"
        f"{'model':<8} | {'default':>8}{'remat':>8}{'ratio':>8} | {'default':>8}{'remat':>9} | "
        f"{'wall':>6}{'medians':>8}{'cpu':>6} | {'loss':>9} {'gradients':>9} | graphs"
    )


def _row(row: dict[str, Any]) -> str:
    stock, remat = row["stock"], row["remat"]
    marks = " <- peak" * (row["peak_ratio"] > MAX_PEAK_EACH) + " <- time" * (row["time_ratio"] > MAX_TIME_EACH)
    return (
        f"{row['model']:<8} | {stock['peak_bytes'] / MIB:>8.1f}{remat['peak_bytes'] / MIB:>8.1f}"
        f"{row['peak_ratio']:>8.3f} | {median(stock['wall_seconds']):>8.3f}"
        f"{median(remat['wall_seconds']):>9.3f} | {row['time_ratio']:>6.3f}"
        f"{row['time_ratio_of_medians']:>8.3f}{row['cpu_ratio']:>6.3f} | {row['loss_difference']:>9.1e} "
        f"{row['gradient_difference']:>9.1e} | {remat['num_graphs']}"
        f"{'' if row['results_agree'] else ' <- RESULTS DIFFER'}{marks}"
    )


def _footer(rows: list[dict[str, Any]]) -> str:
    peaks, times = [row["peak_ratio"] for row in rows], [row["time_ratio"] for row in rows]
    cpu = geometric_mean(row["cpu_ratio"] for row in rows)
    return (
        f"\npeak: geometric mean {_judged(geometric_mean(peaks), MAX_PEAK_GEOMEAN)}, "
        f"worst {_judged(max(peaks), MAX_PEAK_EACH)}\n"
        f"time: geometric mean {_judged(geometric_mean(times), MAX_TIME_GEOMEAN)}, "
        f"worst {_judged(max(times), MAX_TIME_EACH)}; of processor time {cpu:.3f}"
    )


def _judged(value: float, target: float) -> str:
    return f"{value:.3f} (target <= {target:.2f}: {'met' if value <= target else 'MISSED'})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(zoo.ZOO), help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads (default: %(default)s)")
    parser.add_argument("--size", choices=("bench", "tiny"), default="bench")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--in-process", action="store_true", help="measure in this process, for debugging")
    arguments = parser.parse_args(argv)
    arguments.models = arguments.models.split(",")
    for name in arguments.models:
        try:
            zoo.get(name)
        except ValueError as error:
            parser.error(str(error))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
