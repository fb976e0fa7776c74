"""Train a model that is sharded over two ranks by FSDP2, without and with regions, and see what each rank saves.

    python examples/fsdp2_two_ranks.py                              # starts two processes by itself
    torchrun --nproc-per-node 2 examples/fsdp2_two_ranks.py         # or is started by torchrun, on as many as you like

Runs on CPUs, over gloo, in less than a minute.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces its start and stop otherwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import remat

NUM_RANKS, WIDTH, HEADS = 2, 128, 4
MIB = 2**20


class Layer(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then transform, with dropout."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), 0.1)


def sharded_model(num_layers: int, region: dict[str, object] | None) -> nn.Module:
    """Build the model, the same on all ranks, mark its layers as regions if asked to, and shard it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(num_layers)])
    if region is not None:
        remat.apply(model, "*", **region)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(asked: argparse.Namespace, name: str, region: dict[str, object] | None) -> tuple[float, list[torch.Tensor]]:
    """Train two steps, then observe the memory of a third; return the loss and this rank's shards of gradients."""
    model = sharded_model(asked.layers, region)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())  # every rank has data, and dropout, of its own
    batches = torch.randn(3, asked.batch, asked.length, WIDTH)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    for batch in batches[:2]:
        optimizer.zero_grad()
        loss = step(batch)
        loss.backward()
        optimizer.step()
    gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    peak = remat.observe(step, batches[2]).measured.activation_bytes
    print(f"rank {dist.get_rank()}: {name:34} loss {loss:.6f}, peak {peak / MIB:6.1f} MiB", flush=True)
    return loss.item(), gradients


def main(asked: argparse.Namespace) -> None:
    """Train on this rank in three ways, and compare them."""
    loss, gradients = train(asked, "everything kept", None)
    ways = {
        "layers recomputed": {},
        "layers recomputed but for products": {"policy": remat.policies.save_matmuls()},
    }
    for name, region in ways.items():
        dist.barrier()
        our_loss, our_gradients = train(asked, name, region)
        same = our_loss == loss and all(map(torch.equal, our_gradients, gradients))
        assert same, f"rank {dist.get_rank()}: {name}: loss or gradients changed"
    dist.barrier()
    if dist.get_rank() == 0:
        print("losses and gradients are the same, bit for bit, on every rank")


def run_rank(rank: int, file: str, asked: argparse.Namespace) -> None:
    """Be one of the ranks that this script starts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=NUM_RANKS)
    main(asked)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="of the transformer (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank (default: %(default)s)")
    parser.add_argument("--length", type=int, default=250, help="of a sequence (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    asked = parse()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        main(asked)
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, args=(str(Path(folder) / "rendezvous"), asked), nprocs=NUM_RANKS)
