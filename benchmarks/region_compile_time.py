"""What regions cost at compile time, against `torch.utils.checkpoint` around the same layers.

    python benchmarks/region_compile_time.py [--layers 32] [--rounds 3] [--inner aot_eager]

Both sides compile the same model with `backend="remat"` from an empty compiler, in turns, in one process. The printed
ratio is between medians; target: at most 1.15.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat

Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then feed forward."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).transpose(1, 3)
        attended = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """A stack of layers, each called through `call`."""

    def __init__(self, layers: int, call: Call) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(32, 2) for _ in range(layers))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = self.call(layer, x)
        return x.sum()


def in_a_region(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a layer as a region of remat's."""
    return layer(x)


def in_a_checkpoint(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a layer under torch's checkpoint."""
    return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


SIDES: dict[str, Call] = {
    "checkpoint_region": remat.checkpoint_region(name="layer")(in_a_region),
    "torch.utils.checkpoint": in_a_checkpoint,
}


def compile_seconds(call: Call, layers: int, inner: str) -> float:
    """Compile one training step from an empty compiler; return the seconds it takes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(layers, call), torch.randn(2, 16, 32)
    compiled: Any = torch.compile(model, backend="remat", options={"inner": inner}, fullgraph=True)
    start = time.perf_counter()
    compiled(x).backward()
    return time.perf_counter() - start


def main() -> None:
    """Print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inner", default="aot_eager")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    for call in SIDES.values():
        compile_seconds(call, 1, options.inner)  # imports, and what is cached per op
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(options.rounds):
        for name, call in SIDES.items():
            seconds[name].append(compile_seconds(call, options.layers, options.inner))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, median in medians.items():
        print(f"{name:24} {median:8.2f} s")
    ratio = medians["checkpoint_region"] / medians["torch.utils.checkpoint"]
    print(f"{'ratio':24} {ratio:8.2f}   ({options.layers} regions, inner={options.inner}; target: at most 1.15)")


if __name__ == "__main__":
    main()
