"""Models for the tests of reports. On the `meta` device prices are those of a fixed machine, so dumps are stable."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat


def save_attn_out(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep what is named attn_out, recompute the rest."""
    if args[1:] == ("attn_out",):
        return remat.CheckpointPolicy.MUST_SAVE
    return remat.CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    """A transformer block whose attention and MLP are regions inside a region."""

    def __init__(self, width: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @remat.checkpoint_region(name="attention", policy=save_attn_out)
    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 4.0, dim=-1)
        mixed = (scores @ v).transpose(1, 2).reshape(batch, length, width)
        return remat.name(self.out(mixed), "attn_out")

    @remat.checkpoint_region(name="mlp")
    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm2(x))))

    @remat.checkpoint_region(name="block")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(x)
        return x + self.feed_forward(x)


class Stack(nn.Module):
    """Blocks and a head outside of any region."""

    def __init__(self, width: int = 64, num_blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(torch.tanh(x)), dim=-1).mean()


def nested_report(num_blocks: int = 1, **options: Any) -> remat.Report:
    """Explain the nested-region transformer on `meta`."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model, x = Stack(num_blocks=num_blocks), torch.randn(2, 16, 64, requires_grad=True)
    return remat.explain(model, x, **options)


@functools.cache
def nested_report_once() -> remat.Report:
    """The same, for tests that only look at it."""
    return nested_report()


class Plain(nn.Module):
    """An MLP without regions."""

    def __init__(self, width: int = 32, depth: int = 3, device: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin().exp()
        return x.sum()
