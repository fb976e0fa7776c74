"""What one more op costs inside a fused loop, as a part of the time to move its result through memory.

    python benchmarks/fused_arithmetic.py

The default cost model charges a recomputed op that will be fused for its arithmetic alone. This prints where its
constants come from: each op is compiled by inductor for a tensor that stays in the cache, the best of many runs is
taken, and a product's time, which is all loop and no arithmetic, is taken off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

NUM_CACHED, NUM_LARGE = 2**16, 2**24

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": lambda x, y: x * y,
    "four mul and add": lambda x, y: ((((x * y + x) * y + x) * y + x) * y + x) * y,
    "exp": lambda x, _: x.exp(),
    "sigmoid": lambda x, _: x.sigmoid(),
    "log": lambda x, _: x.log(),
    "sin": lambda x, _: x.sin(),
    "erf": lambda x, _: x.erf(),
    "gelu": lambda x, _: F.gelu(x),
    "silu": lambda x, _: F.silu(x),
    "tanh": lambda x, _: x.tanh(),
    "pow(2.5)": lambda x, _: x**2.5,
    "dropout": lambda x, _: F.dropout(x, 0.1),
}


def best_seconds(run: Callable[[], object], num_runs: int) -> float:
    """Give the shortest of many runs: the one that nothing else disturbed."""
    run()
    best = float("inf")
    for _ in range(num_runs):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400, help="runs of each op; the best counts")
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    large, other = torch.rand(NUM_LARGE), torch.rand(NUM_LARGE)
    move = best_seconds(lambda: other.copy_(large), 20) / 2 / NUM_LARGE
    print(f"moving four bytes: {1e9 * move:.3f} ns ({4e-9 / move:.1f} GB/s)")
    x, y = torch.rand(NUM_CACHED) + 0.1, torch.rand(NUM_CACHED) + 0.1
    base = None
    for name, op in OPS.items():
        compiled = torch.compile(op)
        seconds = best_seconds(lambda compiled=compiled: compiled(x, y), runs) / NUM_CACHED
        base = seconds if base is None else base
        print(
            f"{name:18} {1e9 * (seconds - base):7.3f} ns per element {(seconds - base) / move:7.2f} of a move",
            flush=True,
        )


if __name__ == "__main__":
    main()
