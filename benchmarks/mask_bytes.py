"""What it takes a compiled loop to keep a mask for later, and to read it back: as booleans, and as bytes.

    python benchmarks/mask_bytes.py

remat hands masks from forward to backward as bytes where inductor makes loops for a CPU. This prints why: the same
loops are compiled with the mask as it is, converted at once, and converted by way of a number as wide as the loop's
own; the best of several interleaved runs is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

NUM_ROWS, NUM_COLUMNS, ROUNDS = 2560, 1000, 12

Convert = Callable[[torch.Tensor], torch.Tensor]

KEPT: dict[str, Convert] = {
    "booleans": lambda mask: mask,
    "bytes": lambda mask: mask.to(torch.uint8),
    "bytes, by way of float32": lambda mask: mask.to(torch.float32).to(torch.uint8),
}
READ: dict[str, Convert] = {
    "booleans": lambda mask: mask,
    "bytes": lambda mask: mask != 0,
    "bytes, by way of float32": lambda mask: mask.to(torch.float32) != 0,
}


def writing(convert: Convert) -> Callable[[torch.Tensor], object]:
    """A loop that keeps where its result is positive."""
    return torch.compile(lambda x: (torch.relu(x + 1), convert(x + 1 > 0)))


def reading(convert: Convert, mask: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """A loop that reads that."""
    compiled = torch.compile(lambda x, kept: torch.where(convert(kept), x, 0.0))
    return lambda x: compiled(x, mask)


def main() -> None:
    """Print a line per way to keep a mask."""
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 2 * len(KEPT) + 2
    x = torch.randn(NUM_ROWS, NUM_COLUMNS)
    mask = x > 0
    loops = {("write", name): writing(convert) for name, convert in KEPT.items()}
    loops |= {
        ("read", name): reading(convert, mask if name == "booleans" else mask.to(torch.uint8))
        for name, convert in READ.items()
    }
    best = dict.fromkeys(loops, float("inf"))
    for number in range(ROUNDS + 1):
        for key, loop in loops.items():
            start = time.perf_counter()
            loop(x)
            if number:  # the first round compiles
                best[key] = min(best[key], time.perf_counter() - start)
    print(f"{x.numel() / 1e6:.1f} million elements, one thread")
    for name in KEPT:
        print(f"{name:26} write {1e3 * best['write', name]:6.2f} ms   read {1e3 * best['read', name]:6.2f} ms")


if __name__ == "__main__":
    main()
