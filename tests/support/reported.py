"""Models for the tests of reports. On the `meta` device prices are those of a fixed machine, so dumps are stable."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.passes.graph.constraints import Reason
from remat.passes.plans.contents import PredictedPeak
from remat.passes.plans.plan import Plan
from remat.report.data.model import Alive, GraphReport, NodeRow, Timeline


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


HOSTILE = (
    "<script>document.title = 'owned'</script>",
    "</script><img src=x onerror=\"document.title = 'owned'\">",
    "quotes \" and ' and `${1}` and \\ and &amp; and ]]>",
    "línea\u2028\u202e🧨\x00\x1b[31m",
    "lone surrogate \ud800",
    "two\nlines\r\n",
)
"""What a user's names may hold."""


def hostile_report(num_values: int) -> remat.Report:
    """A chain of values whose names, modules, regions and sources are hostile; some of them have no bytes."""
    names = [f"v{k}" for k in range(num_values)]
    texts = [HOSTILE[k % len(HOSTILE)] for k in range(num_values)]
    sizes = [1024 * (k % 7) for k in range(num_values)]
    forward = [_row(f"v{k}", f"v{k - 1}" if k else "x", "FORWARD", sizes[k], texts[k], k) for k in range(num_values)]
    backward = [_row(f"g{k}", f"v{k}", "BACKWARD", 0, texts[k], k) for k in reversed(range(num_values))]
    nodes = (_row("x", "", "INPUT", 8, "x", 0), *forward, *backward)
    saved = [k % 3 == 0 for k in range(num_values)]
    order = [name for k in reversed(range(num_values)) for name in ([] if saved[k] else [f"v{k}"]) + [f"g{k}"]]
    memory = [Alive(f"v{k}", sizes[k], k, num_values + k if saved[k] else k + 1) for k in range(num_values) if sizes[k]]
    live = [0] * (num_values + len(order))
    for m in memory:
        for moment in (m.first, m.last):
            live[moment] += m.num_bytes
    decisions = tuple(_decision(row, is_saved) for row, is_saved in zip(forward, saved, strict=True))
    peak = PredictedPeak(max(live), "v0", in_forward=True, source=HOSTILE[0], alive=(), executor="inductor")
    plan = Plan(
        decisions, tuple(order), (), peak, None, None, "cut", tuple(f"{row.name} = {row.op}" for row in nodes), "key"
    )
    timeline = Timeline(num_values, tuple(live), tuple(memory))
    graph = GraphReport(plan, nodes, tuple(names), (names[-1],), ("g0",), timeline)
    return remat.Report((graph,), function=HOSTILE[0], graph_breaks=HOSTILE, versions={"remat": HOSTILE[1]})


def _row(name: str, read: str, role: str, num_bytes: int, text: str, k: int) -> NodeRow:
    return NodeRow(
        name=name,
        op="placeholder" if role == "INPUT" else text,
        arguments=read,
        inputs=(read,) if read else (),
        value="float32[0]",
        role=role,
        base=name if role == "FORWARD" else "",
        same_as=name,
        is_view=False,
        num_bytes=num_bytes,
        save_seconds=1e-6,
        recompute_seconds=1e-6 * (k % 5),
        no_save="",
        no_recompute=text if k % 11 == 0 else "",
        prefers="",
        source=f"{text}:{k}",
        module=f"{text}.{k // 100}",
        region=f"{text}/{k // 10}" if k % 2 else "",
        policy="",
        label=text if k % 5 == 0 and role == "FORWARD" else "",
    )


def _decision(row: NodeRow, is_saved: bool) -> remat.Decision:
    return remat.Decision(
        value=row.name,
        op=row.op,
        action=remat.Action.SAVE if is_saved else remat.Action.RECOMPUTE,
        reason=Reason.ON_CUT if is_saved else Reason.OFF_CUT,
        num_bytes=row.num_bytes,
        save_seconds=row.save_seconds,
        recompute_seconds=row.recompute_seconds,
        num_recomputes=0 if is_saved else 1,
        source=row.source,
        module=row.module,
        region=row.region,
        policy="",
        name=row.label,
    )
