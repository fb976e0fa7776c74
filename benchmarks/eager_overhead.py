"""What a region costs besides its arithmetic: remat, torch.utils.checkpoint and torch_remat in one run.

The overhead of a region is its step time minus the time of "forward twice + backward" of the same function without a
region. All variants are timed in turn in every round, so that noise hits them alike. Time is processor time of this
process: all work is on one thread. What else happens on the machine can only make a step slower, by cold caches and
stolen time, and does so in bursts; so rounds are short and many, and the time of a step is the tenth percentile of its
rounds. How far it may be off is how far the odd rounds' figure is from the even ones'.

    python benchmarks/eager_overhead.py [--rounds 200] [--json out.json]

torch_remat is left out if it is not installed. A ratio is given only where the rival's overhead is above its noise: in
the large region saved matmuls outweigh all that a selective region costs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from remat import compat
from remat.eager import RegionSpec, Selective, run_region
from remat.eager.recompute.determinism import default_metadata
from remat.passes.shared.policy import normalise_policy

RIVALS = ("torch", "torch_remat")
SAVED_OPS = [torch.ops.aten.mm.default]
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """A function of a region, its inputs, and how many calls make one timing."""

    name: str
    function: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    num_calls: int
    torch_remat_function: Callable[..., torch.Tensor] | None


def make_workload(name: str, size: int, depth: int, num_calls: int, torch_remat: Any) -> Workload:
    """Build a chain of `depth` times (matmul, bias, gelu, residual): four ops each."""
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(size, size, generator=generator) / size**0.5).requires_grad_() for _ in range(depth)]
    biases = [torch.zeros(size, requires_grad=True) for _ in range(depth)]
    x = torch.randn(size, size, generator=generator, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(weights, biases, strict=True):
            x = torch.nn.functional.gelu(torch.mm(x, weight) + bias) + x
        return x

    selective = None
    if torch_remat is not None:

        def selective(x: torch.Tensor) -> torch.Tensor:
            for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                h = torch_remat.region(torch.mm, f"mm{i}", recompute=False)(x, weight)
                torch_remat.recompute_needs_tensor(h)
                x = torch.nn.functional.gelu(h + bias) + x
            return x

    return Workload(name, function, (x,), num_calls, selective)


def clear_grads(workload: Workload) -> None:
    """Let gradients be made anew, not accumulated."""
    for tensor in workload.inputs:
        tensor.grad = None


def twice_and_backward(workload: Workload) -> None:
    """Run what a region has to run at least."""
    workload.function(*workload.inputs)
    workload.function(*workload.inputs).sum().backward()


def variants(workload: Workload, torch_remat: Any) -> dict[str, Step]:
    """Return one step per implementation; each runs forward and backward through one region."""
    function, inputs = workload.function, workload.inputs
    torch_contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, SAVED_OPS)
    remat_contexts = functools.partial(compat.create_selective_checkpoint_contexts, SAVED_OPS)
    policy_spec = RegionSpec(selective=Selective(normalise_policy(SAVED_OPS)), check=default_metadata)
    steps: dict[str, Step] = {
        "floor": lambda: twice_and_backward(workload),
        "plain torch": lambda: _backward(torch_checkpoint.checkpoint(function, *inputs, use_reentrant=False)),
        "plain remat": lambda: _backward(compat.checkpoint(function, *inputs, use_reentrant=False)),
        "selective torch": lambda: _backward(
            torch_checkpoint.checkpoint(function, *inputs, use_reentrant=False, context_fn=torch_contexts)
        ),
        "selective remat": lambda: _backward(
            compat.checkpoint(function, *inputs, use_reentrant=False, context_fn=remat_contexts)
        ),
        "selective remat policy=": lambda: _backward(run_region(function, inputs, {}, policy_spec)),
    }
    if torch_remat is not None and workload.torch_remat_function is not None:
        steps["plain torch_remat"] = lambda: _backward(torch_remat.checkpoint(region_name="r")(function)(*inputs))
        steps["selective torch_remat"] = lambda: _backward(
            torch_remat.checkpoint(region_name="r")(workload.torch_remat_function)(*inputs)
        )
    return steps


def _backward(out: torch.Tensor) -> None:
    out.sum().backward()


def time_steps(workload: Workload, steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Time every step in every round; microseconds per call."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, step in steps.items():
                clear_grads(workload)
                step()
                start = time.process_time_ns()
                for _ in range(workload.num_calls):
                    step()
                times[name].append((time.process_time_ns() - start) / workload.num_calls / 1e3)
                gc.collect(1)  # so that no variant pays for what another left behind
    finally:
        gc.enable()
    return times


def undisturbed(times: list[float]) -> float:
    """Return the time of a step that nothing else has slowed down: the tenth percentile."""
    return statistics.quantiles(times, n=10)[0]


def overheads(times: dict[str, list[float]]) -> dict[str, float]:
    """Return step minus floor, in microseconds."""
    floor = undisturbed(times["floor"])
    return {name: undisturbed(values) - floor for name, values in times.items() if name != "floor"}


def noises(times: dict[str, list[float]]) -> dict[str, float]:
    """Return how far the overheads of the odd rounds are from those of the even ones."""
    even, odd = (overheads({name: values[k::2] for name, values in times.items()}) for k in (0, 1))
    return {name: abs(even[name] - odd[name]) for name in even}


def report(workload: Workload, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print one table and return its figures."""
    result, noise = overheads(times), noises(times)
    floor = undisturbed(times["floor"])
    print(f"\n{workload.name}: forward twice + backward {floor:.0f} us")
    print(f"  {'variant':26s} {'overhead us':>12s} {'+-':>8s} {'/ torch':>8s} {'/ torch_remat':>14s}")
    for name, value in result.items():
        kind = name.split()[0]
        ratios = [ratio_text(value, result.get(f"{kind} {rival}"), noise.get(f"{kind} {rival}")) for rival in RIVALS]
        print(f"  {name:26s} {value:12.1f} {noise[name]:8.1f} {ratios[0]:>8s} {ratios[1]:>14s}")
    return {"workload": workload.name, "floor_us": floor, "overhead_us": result, "noise_us": noise}


def ratio_text(value: float, rival: float | None, rival_noise: float | None) -> str:
    """Return an overhead in terms of a rival's, or a dash where that is not there or not above its noise.

    A policy saves work as well: where the arithmetic that it saves outweighs all else, the overhead is negative.
    """
    if rival is None or rival_noise is None or rival <= rival_noise:
        return "-"
    return f"{value / rival:.2f}"


def main() -> None:
    """Run every workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        torch_remat = importlib.import_module("torch_remat")
    except ImportError:
        torch_remat = None
        print("torch_remat is not installed: its columns are left out")
    workloads = [
        make_workload("small: 8 ops on 64x64", 64, 2, 20, torch_remat),
        make_workload("medium: 64 ops on 64x64", 64, 16, 3, torch_remat),
        make_workload("large: 8 ops on 512x512", 512, 2, 1, torch_remat),
    ]
    results = []
    for workload in workloads:
        steps = variants(workload, torch_remat)
        results.append(report(workload, time_steps(workload, steps, options.rounds)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
