"""Write your own policy: keep products of matrices that are small, recompute the rest.

python examples/own_policy.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import remat
from remat import CheckpointPolicy

MIB = 2**20


def keep_narrow_products(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep results of matrix products of at most 2 MiB; `ctx` has the result, the module's path and more."""
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    if is_product and ctx.op_output.nbytes <= 2 * MIB:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    """A narrow layer, and one that is four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.narrow = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input what both make of it."""
        h = x + nn.functional.gelu(self.narrow(self.norm(x)))
        return h + self.down(nn.functional.gelu(self.up(h)))


def main() -> None:
    """Measure one step with each of a few policies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6, help="number of layers (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policies = {
        "no regions": remat.policies.save_all(),
        "recompute all": None,
        "keep_narrow_products": keep_narrow_products,
        "save_matmuls()": remat.policies.save_matmuls(),
    }
    for name, policy in policies.items():
        torch.manual_seed(0)
        model, batch = nn.Sequential(*(Block(256) for _ in range(arguments.layers))), torch.randn(2048, 256)
        if name != "no regions":
            remat.apply(model, "*", policy=policy)
        peak = remat.observe(lambda m=model, x=batch: m(x).square().mean()).measured
        activations, forward_end = peak.activation_bytes / MIB, peak.forward_end_bytes / MIB
        print(f"{name:20} activation peak {activations:6.1f} MiB, after forward {forward_end:6.1f} MiB", flush=True)
    report = remat.explain(model, batch)  # what the last one decides, value by value, with the reason
    print(f"\n{name}\n{report.plans[0].summary(top=4)}")


if __name__ == "__main__":
    main()
