"""Step time and peak per rank of a sharded Llama: remat beside torch.utils.checkpoint, both over FSDP2, in one run.

    python benchmarks/ranks.py [--ranks 2] [--rounds 7] [--inner inductor] [--size tiny] [--json out.json]

The ranks are processes on this machine, connected by gloo. Every variant is a model of its own with the same weights,
in the same processes; steps are timed in turns, and ratios are medians over rounds. The peak is the most bytes that a
step allocates on a rank at any moment, from the allocator's record: gathered parameters and gradients are included.
Gradients of every variant are compared with those of torch.utils.checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces its start and stop otherwise

import torch
import torch.distributed as dist
from support import zoo
from support.measure import interleaved_times, summarise
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import remat
from remat.report.observed.counting import record_by_allocator

BASE = "torch.utils.checkpoint"
MIB = 2**20
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """What one variant needs."""

    name: str
    peak_bytes: tuple[int, ...]
    """By rank."""
    seconds: float
    """The median step on rank 0."""
    time_ratio: float
    """Over torch.utils.checkpoint's, the median over rounds, on rank 0."""
    gradients: str
    """How they compare with those of torch.utils.checkpoint, on all ranks."""


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks; the first of them prints the table."""
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rendezvous")
        torch.multiprocessing.spawn(_run_rank, args=(file, arguments), nprocs=arguments.ranks)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="remat beside torch.utils.checkpoint, over FSDP2 on several ranks.")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of timing (default: %(default)s)")
    parser.add_argument(
        "--size", choices=["tiny", "bench"], default="bench", help="of the Llama (default: %(default)s)"
    )
    parser.add_argument("--inner", choices=["aot_eager", "inductor"], help="compile too, with this compiler")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    return parser.parse_args(argv)


def _run_rank(rank: int, file: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=arguments.ranks)
    try:
        rows = measure(arguments.size, arguments.inner, arguments.rounds)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(table(rows, arguments))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


# -------------------------------------------------------------------------------------------------- variants


def variants(size: zoo.Size, inner: str | None) -> dict[str, tuple[nn.Module, Step]]:
    """Every way to train that is compared, by name: its model, and one forward pass that returns the loss."""
    found = {
        "no checkpointing": _variant(size, _leave),
        BASE: _variant(size, _checkpoint_by_torch),
        "remat.apply": _variant(size, lambda model: remat.apply(model, "model.layers.*")),
        "remat.apply, products saved": _variant(
            size, lambda model: remat.apply(model, "model.layers.*", policy=remat.policies.save_matmuls())
        ),
    }
    if inner is not None:
        ours = {"backend": "remat", "options": {"inner": inner}}
        found[f"{inner}, {BASE}"] = _variant(size, _checkpoint_by_torch, {"backend": inner})
        found[f"{inner}, remat.apply"] = _variant(size, lambda model: remat.apply(model, "model.layers.*"), ours)
        found[f"{inner}, remat's plan"] = _variant(size, _leave, ours)
    return found


def _leave(model: Any) -> None:
    """Mark nothing."""


def _checkpoint_by_torch(model: Any) -> None:
    for layer in model.model.layers:
        inside = layer.forward
        layer.forward = lambda *args, inside=inside, **kwargs: checkpoint(inside, *args, use_reentrant=False, **kwargs)


def _variant(
    size: zoo.Size, mark: Callable[[nn.Module], object], compiled_by: dict[str, Any] | None = None
) -> tuple[nn.Module, Step]:
    """Build a model, mark its layers, shard it, and compile it if asked to; ranks have batches of their own."""
    built = zoo.get("llama").build(size)
    model: Any = built.model
    mark(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if compiled_by is not None:
        for layer in model.model.layers:  # as FSDP2 wants it: its hooks stay outside of the graphs
            layer.compile(**compiled_by)
    batch = built.make_batch(dist.get_rank())
    return model, lambda: built.loss_fn(model, batch)


# -------------------------------------------------------------------------------------------------- measuring


def measure(size: zoo.Size, inner: str | None, rounds: int) -> list[Row]:
    """Measure every variant on this rank, together with the others."""
    built = variants(size, inner)
    steps = {name: _training_step(*variant) for name, variant in built.items()}
    gradients = {}
    for name, (model, _) in built.items():
        _say(f"{name}: first step")
        steps[name]()
        gradients[name] = [p.grad.to_local().clone() for p in model.parameters()]
    peaks = {}
    for name, (model, forward) in built.items():
        model.zero_grad(set_to_none=True)
        peaks[name] = summarise(record_by_allocator(forward, [])).activation_bytes
    timings = interleaved_times(steps, rounds, on_round=lambda number: _say(f"round {number} of {rounds}"))
    rows = []
    for name in built:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (peaks[name], _compared(gradients[name], gradients[BASE])))
        rows.append(
            Row(
                name=name,
                peak_bytes=tuple(peak for peak, _ in everywhere),
                seconds=timings.median(name),
                time_ratio=timings.median_of_ratios(name, BASE),
                gradients=max((text for _, text in everywhere), key=len),
            )
        )
    return rows


def _training_step(model: nn.Module, forward: Step) -> Callable[[], object]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(dist.get_rank())
        forward().backward()

    return step


def _compared(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    if all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
        return "equal"
    worst = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True) if b.numel())
    return f"off by {worst:.0e}"


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text} ...", flush=True)


def table(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """Lay the rows out for a README."""
    base = next(row for row in rows if row.name == BASE)
    lines = [
        f"\nLlama ({arguments.size}), FSDP2 on {arguments.ranks} ranks; ratios are over {BASE}'s",
        "| | peak per rank (MiB) | peak | step | step time | gradients |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        peaks = ", ".join(f"{peak / MIB:.1f}" for peak in row.peak_bytes)
        ratio = max(row.peak_bytes) / max(base.peak_bytes)
        lines.append(
            f"| {row.name} | {peaks} | {ratio:.2f} | {row.seconds:.3f} s | {row.time_ratio:.2f} | {row.gradients} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
