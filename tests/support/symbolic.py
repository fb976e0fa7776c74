"""Problems of every shape with symbols for sizes."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from remat.passes.search.problem import FlowProblem
from support.instances import SHAPES, Program


def symbol(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    source = ConstantSource(name)
    made = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    return env.create_symintnode(made, hint=hint, source=source)


def attentive(p: Program, rng: random.Random) -> fx.Node:
    """Values that grow with the rows, and with their square."""
    x = p.linear(p.given(32), 48)
    for _ in range(rng.randint(1, 3)):
        x = p.add(x, p.attend(p.tanh(p.linear(x, 48))))
    return x


def problem(number: int, rows: Any) -> FlowProblem:
    shape = (attentive, *SHAPES)[number % (1 + len(SHAPES))]
    program = Program(rows)
    return program.problem(shape(program, random.Random(number)))
