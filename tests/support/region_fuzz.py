"""Random programs with nested regions and random policies, made from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat

ANSWERS = list(remat.CheckpointPolicy)

Values = list[torch.Tensor]


def random_policy(rng: random.Random) -> Any:
    """A policy that answers at random, but the same way every time it is asked in the same order."""
    if rng.random() < 0.3:
        return None
    seed = rng.random()
    without = {remat.CheckpointPolicy.MUST_RECOMPUTE} if rng.random() < 0.5 else set()
    answers = [answer for answer in ANSWERS if answer not in without]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        names = [a for a in args if isinstance(a, str)]
        shape = tuple(getattr(ctx.op_output, "shape", ()))
        return random.Random(f"{seed} {op} {names} {shape}").choice(answers)

    return policy


class RandomProgram(nn.Module):
    """A chain of random steps over a few values, some of them regions that hold such chains."""

    def __init__(self, seed: int, mark: Callable[..., Any], steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("count", torch.zeros(8))
        self.mark = mark
        self.body = self.chain(random.Random(seed), depth=0)

    def chain(self, rng: random.Random, depth: int) -> Callable[[Values], Values]:
        steps = [self.step(rng, depth) for _ in range(rng.randint(2, 5))]

        def run(values: Values) -> Values:
            for step in steps:
                values = step(values)
            return values

        return run

    def step(self, rng: random.Random, depth: int) -> Callable[[Values], Values]:
        if depth < 3 and rng.random() < 0.4:
            inner = self.chain(rng, depth + 1)
            return self.mark(name=f"level{depth}", policy=random_policy(rng))(inner)
        make = rng.choice(self.steps)
        return make(self, rng)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body([x, x * 0.5])


def unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def make(model: RandomProgram, rng: random.Random) -> Any:
        i = rng.randrange(2)
        return lambda values: [function(v) if k == i else v for k, v in enumerate(values)]

    return make


def linear(model: RandomProgram, rng: random.Random) -> Any:
    layer, i = rng.choice(list(model.linears)), rng.randrange(2)
    return lambda values: [layer(v) if k == i else v for k, v in enumerate(values)]


def named(model: RandomProgram, rng: random.Random) -> Any:
    label, i = f"v{rng.randrange(3)}", rng.randrange(2)
    return lambda values: [remat.name(v, label) if k == i else v for k, v in enumerate(values)]


def counted(model: RandomProgram, rng: random.Random) -> Any:
    def run(values: Values) -> Values:
        model.count.add_(1.0)
        return [values[0] * model.count.clone(), values[1]]

    return run


def combined(model: RandomProgram, rng: random.Random) -> Any:
    return lambda values: [values[0] + values[1].tanh(), values[0] * values[1].sigmoid()]


def split(model: RandomProgram, rng: random.Random) -> Any:
    def run(values: Values) -> Values:
        left, right = values[0].chunk(2, dim=1)
        return [torch.cat([right.tanh(), left], dim=1), values[1]]

    return run


def topk(model: RandomProgram, rng: random.Random) -> Any:
    return lambda values: [values[0] * values[1].topk(2)[0].sum(1, keepdim=True).tanh(), values[1]]


STEPS = [
    unary(torch.sin),
    unary(F.gelu),
    unary(lambda v: v.sigmoid()),
    unary(lambda v: v.t().tanh().t()),
    unary(lambda v: (v * 2).relu_()),
    unary(lambda v: v.softmax(-1)),
    unary(lambda v: F.layer_norm(v, (8,))),
    unary(lambda v: F.dropout(v, 0.3, True)),
    linear,
    linear,
    named,
    combined,
    split,
    topk,
]
STEPS_WITH_STATE = [*STEPS, counted]
