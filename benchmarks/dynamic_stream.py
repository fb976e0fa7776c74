"""Train on batches of changing lengths: gradients, compilations and memory under a budget in bytes.

    python benchmarks/dynamic_stream.py
    python benchmarks/dynamic_stream.py --models llama --batches 40 --longest 256
    python benchmarks/dynamic_stream.py --inner inductor --models llama,bert
    python benchmarks/dynamic_stream.py --batches 0 --models llama --repeats 9

Each model (random weights, a few narrow layers) sees a stream of batches with lengths drawn from 16 to 1024. It is
compiled with `backend="remat"` and a budget in bytes: a fifth more than the lowest peak that a plan reaches at the
longest batch, so that short batches fit anyway and long ones have to recompute. Checked for every batch:

- the gradients are those of eager (to the bit with aot_eager, unless the two run other kernels). Inductor rounds
  otherwise, which may turn a ReLU on or off, or send a token to another expert: where its gradients are not eager's,
  they are to be about as near to those in twice the precision as eager's are, or inductor's without remat;
- the measured activation peak is within the budget;
- where no plan so far covers the length, one was made before the batch ran: the compilations are counted and shown
  with the sizes that they are for.

Planning times are processor times of the partitioner, for the same model at the same sizes traced with fixed sizes,
with a symbol for the length, and with symbols for length and rows: without a budget, with half of the peak, and with
budgets in bytes that put the batch in each of the ranges (see README). The joint graph is traced anew for each
measurement, as a compilation does; the three are measured in turns, and the least of each counts. A ratio is that of
symbols to fixed sizes under the same budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from support.batch_stream import (
    LONGEST,
    MAX_COMPILATIONS,
    MODELS,
    NUM_BATCHES,
    Stream,
    make_batch,
    make_model,
    quiet,
    run_stream,
)
from torch._guards import TracingContext, tracing

from remat.backend import remat as backend
from remat.compiled import partitioner as partition_fn
from remat.compiled.partitioner import Partitioner

MAX_PLANNING_RATIO = 1.5
PLANNED_LENGTH = 40
"""The length of the batch that planning is timed for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the streams that the command line asks for and print what they did."""
    asked = _parse(argv)
    torch.set_num_threads(1)
    found = []
    for name in asked.models.split(",") if asked.batches else []:
        stream = run_stream(name, asked.inner, asked.batches, asked.longest)
        found.append(stream)
        print(describe(stream), flush=True)
    planned = []
    for name in [] if asked.no_planning_time else asked.models.split(","):
        for planning in planning_times(name, asked.repeats):
            planned.append(planning)
            print(describe_planning(planning), flush=True)
    if planned:
        worst = max(planned, key=lambda planning: planning.ratio)
        verdict = "met" if worst.ratio <= MAX_PLANNING_RATIO else "MISSED"
        print(f"worst ratio {worst.ratio:.2f}, {worst.model}, {worst.budget} "
              f"(target <= {MAX_PLANNING_RATIO}: {verdict})", flush=True)  # fmt: skip
    if asked.json:
        figures = {"streams": [asdict(stream) for stream in found], "planning": [asdict(row) for row in planned]}
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(s.num_different or s.num_exceeding or s.num_compilations > MAX_COMPILATIONS for s in found))


# --- models ---------------------------------------------------------------------------------------------------------


# --- the stream -----------------------------------------------------------------------------------------------------


# --- planning time --------------------------------------------------------------------------------------------------


class Kind(Enum):
    """Which sizes are symbols."""

    FIXED = "fixed sizes"
    LENGTH = "symbol for length"
    ALL = "symbols for length and rows"


@dataclass(frozen=True)
class Planning:
    """How long planning took under one budget."""

    model: str
    budget: str
    seconds: dict[str, float]
    """By kind of sizes."""

    @property
    def ratio(self) -> float:
        """The larger of the ratios of symbols to fixed sizes."""
        return max(self.seconds[kind.value] for kind in Kind) / self.seconds[Kind.FIXED.value]


class _Planned(Exception):
    """Ends a compilation once its joint graph has been planned for."""


class Traced:
    """A model as Dynamo traced it once; its joint graph is traced anew for each plan."""

    def __init__(self, name: str, kind: Kind) -> None:
        torch._dynamo.reset()
        batch = make_batch(PLANNED_LENGTH)
        if kind is Kind.LENGTH:
            for tensor in batch.values():
                torch._dynamo.mark_dynamic(tensor, 1)
        with quiet(), contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
            torch.compile(make_model(name), backend=self._keep, dynamic=kind is Kind.ALL or None)(**batch)

    def _keep(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graph, self.inputs, self.context = gm, inputs, TracingContext.get()
        self.plan(None)  # the first may ask Dynamo to trace again, with fixed numbers in place of some symbols
        raise _Planned

    def plan(self, budget: float | int | None) -> tuple[float, int]:
        """Plan for a budget and split the joint graph: processor time, and the predicted peak."""
        found: list[tuple[float, int]] = []

        def timed(partitioner: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            original(partitioner, *args, **kwargs)
            found.append((time.process_time() - start, partitioner.peak_bytes()))
            raise _Planned

        options = {"inner": "aot_eager", "memory_budget": budget, "on_infeasible": "minimum"}
        original = Partitioner.__call__
        with quiet(), tracing(self.context), contextlib.suppress(_Planned), _unguarded():
            Partitioner.__call__ = timed  # type: ignore[method-assign]
            try:
                backend(self.graph, self.inputs, options=options)
            finally:
                Partitioner.__call__ = original  # type: ignore[method-assign]
        return found[0]


@contextmanager
def _unguarded() -> Iterator[None]:
    """Leave out the guards of plans: the next one is to be made for the same graph."""
    original = partition_fn.take_for_granted
    partition_fn.take_for_granted = lambda *_: None
    try:
        yield
    finally:
        partition_fn.take_for_granted = original


def planning_times(name: str, repeats: int) -> Iterator[Planning]:
    """Time planning with fixed sizes and with symbols, in turns; the least of each."""
    traced = {kind: Traced(name, kind) for kind in Kind}
    fastest, lowest = (traced[Kind.FIXED].plan(budget)[1] for budget in (None, 1024))
    for label, budget in planning_budgets(fastest, lowest).items():
        rows = [{kind.value: traced[kind].plan(budget)[0] for kind in Kind} for _ in range(repeats)]
        yield Planning(name, label, {kind.value: min(row[kind.value] for row in rows) for kind in Kind})


def planning_budgets(fastest: int, lowest: int) -> dict[str, float | int | None]:
    """No budget, a fraction, and bytes that put a batch in each of the ranges in which there is a plan for it."""
    beyond = {f"fastest plan takes {1 / part:.2g} budgets": int(part * fastest) for part in (3 / 4, 3 / 8, 3 / 16)}
    return {
        "none": None,
        "half of the peak": 0.5,
        "fastest plan fits": 5 * fastest // 4,
        **{label: budget for label, budget in beyond.items() if budget > 1.05 * lowest},
        "1.05 of the lowest peak": 21 * lowest // 20,
    }


# --- text -----------------------------------------------------------------------------------------------------------


def describe(stream: Stream) -> str:
    """What a stream did, as text."""
    others = (
        f", of {stream.num_as_near} as near to the exact ones as eager's or inductor's" if stream.num_as_near else ""
    )
    head = (
        f"{stream.model} ({stream.inner}): {stream.num_batches} batches, budget {stream.budget_bytes / 2**20:.2f} MiB: "
        f"{stream.num_compilations} compilations, gradients of "
        f"{stream.num_batches - stream.num_different - stream.num_as_near} batches are eager's ({stream.num_bitwise} "
        f"to the bit){others}, largest measured peak {stream.worst_part_of_budget:.3f} of budget"
    )
    return "\n".join([head, *(f"  planned for {text}" for text in stream.ranges)])


def describe_planning(planning: Planning) -> str:
    """What planning took, as text."""
    fixed = planning.seconds[Kind.FIXED.value]
    others = [
        f"{seconds / fixed:.2f} with {kind}" for kind, seconds in planning.seconds.items() if kind != Kind.FIXED.value
    ]
    return f"planning {planning.model}, budget: {planning.budget}: {fixed:.3f} s with fixed sizes, {', '.join(others)}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--inner", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument(
        "--batches", type=int, default=NUM_BATCHES, help="per model, 0 for planning times alone (default: %(default)s)"
    )
    parser.add_argument("--longest", type=int, default=LONGEST, help="longest batch (default: %(default)s)")
    parser.add_argument("--no-planning-time", action="store_true", help="leave out the planning times")
    parser.add_argument("--repeats", type=int, default=5, help="of each planning time (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
