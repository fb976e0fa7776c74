"""Joint graphs for tests of the passes, captured as AOTAutograd hands them over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from remat.passes.graph.constraints import Constraints, find_constraints
from remat.passes.graph.joint_graph import JointGraph
from remat.passes.write.halves import Halves, Rewrite


class Captured(Exception):
    """Ends a compilation once its joint graph is known."""


@dataclass(frozen=True)
class Joint:
    """A joint graph and how many of its outputs are forward's."""

    module: fx.GraphModule
    num_fwd_outputs: int

    def classify(self) -> JointGraph:
        return JointGraph.classify(self.module, self.num_fwd_outputs)

    def constraints(self) -> tuple[JointGraph, Constraints]:
        graph = self.classify()
        return graph, find_constraints(graph)


def capture(function: Callable[..., Any], *args: Any, **compile_kwargs: Any) -> Joint:
    """Trace a function's joint graph without running it."""
    seen: list[Joint] = []

    def record(gm: fx.GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **_: object) -> Any:
        seen.append(Joint(gm, num_fwd_outputs))
        raise Captured

    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=record, keep_inference_input_mutations=True
    )
    torch._dynamo.reset()
    try:
        torch.compile(function, backend=backend, fullgraph=True, **compile_kwargs)(*args)
    except Exception as error:
        if not seen:
            raise AssertionError("the function has no joint graph") from error
    return seen[0]


def named(graph: JointGraph, op: str, which: int = 0) -> int:
    """The position of the `which`-th node that calls an op, by the op's name (`mm`, `copy_`)."""
    found = [
        i
        for i, node in enumerate(graph.nodes)
        if node.op == "call_function" and str(node.target).split(".")[1:2] == [op]
    ]
    return found[which]


def rewritten(rewrite: Rewrite, graph: fx.Graph) -> None:
    """Apply a rewrite of finished graphs to one graph, as if it were a backward."""
    empty = fx.Graph()
    empty.output(())
    rewrite(Halves(fx.GraphModule({}, empty), fx.GraphModule({}, graph), num_fwd_outputs=0))
