"""Hold memory budgets against what is measured, model by model, and against what else PyTorch offers.

    python benchmarks/budget.py --plots plots
    python benchmarks/budget.py --models llama,unet --inner aot_eager --quick

Every model and inner compiler is measured in a process of its own. There remat compiles the step without a budget, for
fractions of the peak without recomputation, and for the lowest peak it finds; the peers are eager, every layer in
torch.utils.checkpoint, in eager and compiled by the same compiler, and torch.compile with its own
activation_memory_budget (with inductor). remat is then given each peer's measured peak as its budget. All steps are
timed in turns, by processor time: other processes disturb it less, and with one thread it is the time of the step.
Cells with the same plan run the same program, so that their times are put together.
Gradients of every cell are compared with those of the same compiler without remat: bit for bit with aot_eager, up to
rounding with inductor.

A cell is marked OVER if its measured peak exceeds its budget by more than 2 %. The last lines say which of the criteria
are met. --quick measures peaks only, for few budgets.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop otherwise

import torch
import torch._dynamo
import torch._functorch.config
from default_plan import MAX_RELATIVE_DIFFERENCE
from support import zoo
from support.budget_report import (
    CHECKPOINT,
    EAGER,
    MINIMUM,
    NO_BUDGET,
    Cell,
    Planning,
    Sheet,
    judge,
    table,
    with_times,
    write_plots,
)
from support.measure import activation_peak, clear_gradients, interleaved_times
from torch.utils.checkpoint import checkpoint

import remat

MODELS = ("llama", "gpt2", "bert", "t5", "mixtral", "vit", "unet", "resnet")
INNERS = ("aot_eager", "inductor")
COUNTERS = {"aot_eager": "dispatch", "inductor": "allocator"}
BUDGETS, QUICK_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1), (0.7, 0.4, 0.2)
TORCH_BUDGETS, QUICK_TORCH_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0), (1.0, 0.4)
PLANNING_LAYERS, PLANNING_BUDGET = 32, 0.5

Step = Callable[[], torch.Tensor]
"""Runs forward and returns the loss."""
Gradients = list[torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for, print the tables, and judge them."""
    arguments = _parse(argv)
    sheets: list[Sheet] = []
    failed: list[str] = []
    for name in arguments.models:
        for inner in arguments.inner:
            measure = _measure_here if arguments.in_process else _measure_apart
            try:
                sheet = measure(name, inner, arguments)
            except subprocess.CalledProcessError as error:
                print(f"{name}, {inner}: FAILED, exit status {error.returncode}; see above\n", flush=True)
                failed.append(f"{name} {inner}")
                continue
            sheets.append(sheet)
            if not arguments.in_process:
                print(table(sheet), flush=True)
            if arguments.plots:
                write_plots(sheet, arguments.plots)
    planning = _measure_planning() if arguments.planning else None
    verdicts = judge(sheets, planning)
    if not arguments.in_process:
        print("\n".join(map(str, verdicts)))
    if arguments.json:
        figures = {"sheets": [asdict(sheet) for sheet in sheets], "planning": planning and asdict(planning)}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if failed or any(v.criterion == "Equal" and v.met is False for v in verdicts) else 0


# --- one model ------------------------------------------------------------------------------------------------------


class Bench:
    """Compiles and measures the ways to run one model's step, and keeps them so that they can be timed in turns."""

    def __init__(self, name: str, inner: str, size: zoo.Size, say: Callable[[str], None]) -> None:
        self.inner, self.say = inner, say
        self.built = zoo.get(name).build(size)
        self.batch = self.built.make_batch(0)
        self.params = list(self.built.model.parameters())
        self.max_difference = MAX_RELATIVE_DIFFERENCE[self.params[0].dtype]
        self.cells: list[Cell] = []
        self.steps: dict[str, tuple[Step, list[torch.nn.Parameter]]] = {}
        self.programs: dict[str, object] = {}
        """What tells whether two cells of remat run the same."""
        self.gradient_bytes = 0
        self.say(f"compiling with {inner}, without remat")
        self.reference = self._gradients(self._compile(backend=inner), self.params)

    def eager(self, label: str, built: zoo.Built) -> Cell:
        """Measure an eager peer."""
        self.say(f"measuring {label}")
        step = _step_of(built, self.batch)
        return self._measure(Cell("eager", label), step, list(built.model.parameters()))

    def torch(self, fraction: float) -> Cell:
        """Measure torch.compile with its own budget."""
        self.say(f"torch.compile at {fraction:g}")
        step = self._compile(backend="inductor")
        # Dropout: torch's recomputation draws fresh numbers, so its gradients may differ; that is reported, not judged.
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            return self._measure(Cell("torch", f"{fraction:g}"), step, self.params)

    def checkpointed(self, built: zoo.Built) -> Cell:
        """Measure torch.utils.checkpoint around every layer, compiled as remat is."""
        self.say(f"{CHECKPOINT}, compiled")
        compiled = torch.compile(_own_code(_step_of(built, self.batch)), fullgraph=True, backend=self.inner)
        params = list(built.model.parameters())
        return self._measure(Cell("torch", CHECKPOINT), lambda: compiled(), params)

    def remat(self, label: str, memory_budget: float | int | None, rival: str = "") -> Cell:
        """Measure remat for a budget; a budget of 1024 bytes stands for the lowest peak there is."""
        self.say(f"remat, {label}")
        blank = Cell("remat", label, rival=rival)
        options: dict[str, Any] = {"inner": self.inner, "memory_budget": memory_budget}
        if label == MINIMUM:
            options["on_infeasible"] = "minimum"
        with tempfile.TemporaryDirectory() as folder:
            step = self._compile(backend="remat", options={**options, "dump": folder})
            cell = self._measure(blank, step, self.params)
            plans = [remat.Plan.load(path) for path in Path(folder).glob("*.json")]
        if cell.error or not plans:
            return cell
        plan = max(plans, key=lambda plan: plan.peak.num_bytes)
        budget_bytes = None if label == MINIMUM else plan.budget_bytes
        cell = Cell(**{
            **asdict(cell),
            "budget_bytes": budget_bytes,
            "predicted_bytes": plan.peak.num_bytes,
            "planner": plan.planner,
        })  # fmt: skip
        self.cells[-1] = cell
        self.programs[cell.name] = (plan.order, plan.decisions)
        return cell

    def time(self, rounds: int, threads: int) -> None:
        """Time all steps in turns and fill in the ratios; those of cells that run the same are put together."""
        steps = {name: _training_step(*step) for name, step in self.steps.items()}
        said = lambda number: self.say(f"timing, round {number} of {rounds}")  # noqa: E731
        times = interleaved_times(steps, rounds, threads=threads, on_round=said)
        baseline = f"remat {NO_BUDGET}"
        for number, cell in enumerate(self.cells):
            if cell.name not in steps or baseline not in steps:
                continue
            names = self._same_as(cell.name)
            rival_ratio = times.cpu_median_of_all(names, [cell.rival]) if cell.rival else None
            ratio = times.cpu_median_of_all(names, self._same_as(baseline))
            self.cells[number] = with_times(cell, ratio, rival_ratio)

    def _same_as(self, name: str) -> list[str]:
        """All cells that run what one of them does: equal plans differ by some per cent in time, by chance."""
        if name not in self.programs:
            return [name]
        return [other for other, program in self.programs.items() if program == self.programs[name]]

    def _compile(self, **kwargs: Any) -> Step:
        """Compile the whole step into one graph that returns nothing but the loss."""
        step = _step_of(self.built, self.batch)
        compiled = torch.compile(_own_code(step), fullgraph=True, **kwargs)
        return lambda: compiled()

    def _measure(self, cell: Cell, step: Step, params: list[torch.nn.Parameter]) -> Cell:
        """Run a step for its gradients and its peak, and note it for timing."""
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step().backward()
                compile_seconds = time.perf_counter() - start
                gradients = self._gradients(step, params)
                peak = activation_peak(step, params, counter=COUNTERS[self.inner])
        except Exception as error:  # noqa: BLE001 (whatever it is, it is written into the cell and the rest goes on)
            clear_gradients(params)
            cell = Cell(**{**asdict(cell), "error": _one_line(error)})
        else:
            self.gradient_bytes = peak.gradient_bytes
            self.steps[cell.name] = step, params
            measured = {"measured_bytes": peak.activation_bytes, "compile_seconds": compile_seconds}
            cell = Cell(**{**asdict(cell), **measured, **self._compare(cell, gradients)})
        self.cells.append(cell)
        return cell

    def _gradients(self, step: Step, params: list[torch.nn.Parameter]) -> Gradients:
        """All gradients of a step with fixed random numbers."""
        clear_gradients(params)
        torch.manual_seed(1)
        step().backward()
        gradients = [torch.zeros(()) if p.grad is None else p.grad.detach().clone() for p in params]
        clear_gradients(params)
        return gradients

    def _compare(self, cell: Cell, gradients: Gradients) -> dict[str, Any]:
        if cell.side == "eager":
            return {}  # eager draws other random numbers than compiled code does
        if all(torch.equal(a, b) for a, b in zip(gradients, self.reference, strict=True)):
            return {"difference": 0.0}
        pairs = list(zip(gradients, self.reference, strict=True))
        error = math.sqrt(sum((a.double() - b.double()).square().sum().item() for a, b in pairs))
        norm = math.sqrt(sum(b.double().square().sum().item() for _, b in pairs))
        is_close = self.inner == "inductor" and error <= self.max_difference * norm
        return {"difference": error / norm, "agrees": is_close or cell.side == "torch"}


def measure_model(name: str, inner: str, arguments: argparse.Namespace, say: Callable[[str], None]) -> Sheet:
    """Fill in one sheet."""
    torch.set_num_threads(arguments.threads)
    bench = Bench(name, inner, arguments.size, say)
    bench.remat(NO_BUDGET, None)
    for fraction in arguments.budgets:
        bench.remat(f"{fraction:g}", fraction)
    bench.remat(MINIMUM, 1024)
    whole = bench.eager(EAGER, bench.built)
    layered = checkpointed(name, arguments.size)
    peers = [bench.eager(CHECKPOINT, layered), bench.checkpointed(layered)]
    if inner == "inductor":
        peers += [bench.torch(fraction) for fraction in arguments.torch_budgets]
    for peer in peers:
        # With inductor, checkpointing in eager is another engine: its peak is shown, its time proves nothing.
        if peer.measured_bytes is not None and (peer.side == "torch" or inner == "aot_eager"):
            bench.remat(f"at {peer.name}", peer.measured_bytes, rival=peer.name)
    if not arguments.quick:
        bench.time(arguments.rounds, arguments.threads)
    say("done")
    return Sheet(name, inner, arguments.size, bench.gradient_bytes, whole.measured_bytes or 0, tuple(bench.cells))


def checkpointed(name: str, size: zoo.Size) -> zoo.Built:
    """The same model with torch.utils.checkpoint around every layer, each library's own way."""
    built = zoo.get(name).build(size)
    switch_on = getattr(built.model, "activation_checkpointing_enable", None)  # Transformers' name since 5.23
    switch_on = switch_on or getattr(built.model, "gradient_checkpointing_enable", None)
    if switch_on is not None:
        switch_on({"use_reentrant": False})
    elif hasattr(built.model, "enable_gradient_checkpointing"):
        built.model.enable_gradient_checkpointing()
    elif isinstance(built.model, zoo.ConvNet):
        for block in built.model.blocks:
            inside = block.forward
            block.forward = lambda x, inside=inside: checkpoint(inside, x, use_reentrant=False)
    else:
        raise ValueError(f"zoo model {name!r} has no layers that this benchmark knows how to checkpoint.")
    return built


def _step_of(built: zoo.Built, batch: zoo.Batch) -> Step:
    def step() -> torch.Tensor:
        return built.loss_fn(built.model, batch)

    return step


def _own_code(function: Step) -> Step:
    """A copy with code of its own: Dynamo keeps what it compiles, and counts it, by code object."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )


def _training_step(step: Step, params: list[torch.nn.Parameter]) -> Callable[[], object]:
    def train() -> None:
        clear_gradients(params)
        step().backward()

    return train


def _one_line(error: Exception) -> str:
    """The cause of an error: Dynamo wraps what a backend raises."""
    cause = getattr(error, "inner_exception", None) or error
    text = " ".join(str(cause).split()).partition(". ")[0]
    return f"{type(cause).__name__}: {text[:130]}"


# --- processes ------------------------------------------------------------------------------------------------------


def _measure_here(name: str, inner: str, arguments: argparse.Namespace) -> Sheet:
    torch._logging.set_logs(all=logging.ERROR)
    with nullcontext() if sys.stderr.isatty() else _quiet_libraries():
        return measure_model(name, inner, arguments, lambda text: _say(f"{name}, {inner}", text))


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep model libraries from telling, once per model, which of their settings exclude each other."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _measure_apart(name: str, inner: str, arguments: argparse.Namespace) -> Sheet:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "sheet.json")
        command = [
            sys.executable, __file__, "--in-process", "--models", name, "--inner", inner, "--size", arguments.size,
            "--rounds", str(arguments.rounds), "--threads", str(arguments.threads), "--json", str(out),
            "--budgets", ",".join(map(str, arguments.budgets)),
            "--torch-budgets", ",".join(map(str, arguments.torch_budgets)),
            *(["--quick"] if arguments.quick else []),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
        status = subprocess.run(command, env=environment, check=False).returncode
        if not out.exists():
            raise subprocess.CalledProcessError(status, command)
        return Sheet.from_dict(json.loads(out.read_text())["sheets"][0])


def _measure_planning() -> Planning:
    """Time both partitioners with a budget on a deep model."""
    _say("planning", f"{PLANNING_LAYERS} layers")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "planning.json")
        command = [
            sys.executable, str(Path(__file__).with_name("planning_time.py")), "--layers", str(PLANNING_LAYERS),
            "--budget", str(PLANNING_BUDGET), "--nodes", "0", "--json", str(out),
        ]  # fmt: skip
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        (row,) = json.loads(out.read_text())["layers"]
    medians = {side: sorted(row[f"{side}_seconds"])[len(row[f"{side}_seconds"]) // 2] for side in ("remat", "torch")}
    return Planning(row["num_layers"], row["num_nodes"], medians["remat"], medians["torch"])


def _say(name: str, text: str) -> None:
    """Show progress on stderr: one line that overwrites itself in a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name}: {text}" if text != "done" else "\r\033[K", end="", file=sys.stderr, flush=True)
    elif not text.startswith("timing"):
        print(f"{name}: {text}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--inner", default=",".join(INNERS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--budgets", help="comma-separated fractions (default: 0.9 to 0.1; the minimum comes always)")
    parser.add_argument("--torch-budgets", help="comma-separated fractions for torch.compile (default: 1.0 to 0.0)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads (default: %(default)s)")
    parser.add_argument("--size", choices=("bench", "tiny"), default="bench")
    parser.add_argument("--quick", action="store_true", help="few budgets, nothing timed")
    parser.add_argument("--no-planning", action="store_true", help="do not time planning on a deep model")
    parser.add_argument("--plots", type=Path, help="a folder for plots, SVG")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    parser.add_argument("--in-process", action="store_true", help="measure in this process, print nothing")
    arguments = parser.parse_args(argv)
    arguments.models, arguments.inner = arguments.models.split(","), arguments.inner.split(",")
    arguments.budgets = _fractions(arguments.budgets, QUICK_BUDGETS if arguments.quick else BUDGETS)
    default = QUICK_TORCH_BUDGETS if arguments.quick else TORCH_BUDGETS
    arguments.torch_budgets = _fractions(arguments.torch_budgets, default)
    arguments.planning = not (arguments.quick or arguments.no_planning or arguments.in_process)
    unknown = [name for name in arguments.models if name not in MODELS]
    unknown += [name for name in arguments.inner if name not in INNERS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; models are {', '.join(MODELS)}, inner {' or '.join(INNERS)}")
    return arguments


def _fractions(text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    return default if text is None else tuple(float(part) for part in text.split(",") if part)


if __name__ == "__main__":
    sys.exit(main())
