"""Small joint graphs of many shapes, written node by node: what an exact planner can still solve."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.passes.graph.constraints import find_constraints
from remat.passes.graph.joint_graph import JointGraph
from remat.passes.prices.cost import Machine, Roofline, price
from remat.passes.search.problem import FlowProblem

aten = torch.ops.aten
TOKENS = 64
WIDTHS = (16, 32, 48, 64, 96, 128)
MACHINE = Machine(flops_per_second=2.0**35, bytes_per_second=2.0**34)
"""A slow machine, on which a product of these matrices takes a few times as long as a pass over them."""

Vjp = Callable[[fx.Node], list[tuple[fx.Node, fx.Node]]]


@dataclass(frozen=True)
class Instance:
    """A named problem."""

    name: str
    problem: FlowProblem

    @property
    def graph(self) -> JointGraph:
        return self.problem.graph


class Program:
    """Writes forward and remembers how to differentiate it, then writes backward in reverse."""

    def __init__(self, rows: int | torch.SymInt | None = None) -> None:
        self.rows = TOKENS if rows is None else rows
        self.names_shapes = rows is None
        self.graph = fx.Graph()
        self.tape: list[tuple[fx.Node, Vjp]] = []
        self.weights: list[fx.Node] = []
        self.tag = "is_forward"

    def given(self, width: int, rows: int | None = None) -> fx.Node:
        """Add an input that needs no gradient."""
        return self._placeholder(f"primals_{len(self.graph.nodes)}", (self.rows if rows is None else rows, width))

    def width(self, x: fx.Node) -> int:
        return x.meta["val"].shape[1]

    def linear(self, x: fx.Node, width: int) -> fx.Node:
        weight = self.given(width, rows=self.width(x))
        self.weights.append(weight)

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            to_weight = self._call(aten.mm.default, self._call(aten.permute.default, x, [1, 0]), g)
            if x.op == "placeholder":
                return [(weight, to_weight)]
            back = self._call(aten.mm.default, g, self._call(aten.permute.default, weight, [1, 0]))
            return [(x, back), (weight, to_weight)]

        return self._record(self._call(aten.mm.default, x, weight), vjp)

    def tanh(self, x: fx.Node) -> fx.Node:
        y = self._call(aten.tanh.default, x)
        return self._record(y, lambda g: [(x, self._call(aten.tanh_backward.default, g, y))])

    def gelu(self, x: fx.Node) -> fx.Node:
        y = self._call(aten.gelu.default, x)
        return self._record(y, lambda g: [(x, self._call(aten.gelu_backward.default, g, x))])

    def exp(self, x: fx.Node) -> fx.Node:
        y = self._call(aten.exp.default, x)
        return self._record(y, lambda g: [(x, self._call(aten.mul.Tensor, g, y))])

    def sin(self, x: fx.Node) -> fx.Node:
        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            return [(x, self._call(aten.mul.Tensor, g, self._call(aten.cos.default, x)))]

        return self._record(self._call(aten.sin.default, x), vjp)

    def mul(self, a: fx.Node, b: fx.Node) -> fx.Node:
        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            return [(a, self._call(aten.mul.Tensor, g, b)), (b, self._call(aten.mul.Tensor, g, a))]

        return self._record(self._call(aten.mul.Tensor, a, b), vjp)

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self._record(self._call(aten.add.Tensor, a, b), lambda g: [(a, g), (b, g)])

    def attend(self, x: fx.Node) -> fx.Node:
        """Mix rows by how alike they are: the only values whose size is a square."""
        scores = self._call(aten.mm.default, x, self._call(aten.permute.default, x, [1, 0]))

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            # Only of what is mixed, not of the scores: what is read and when is all that matters here.
            return [(x, self._call(aten.mm.default, self._call(aten.permute.default, scores, [1, 0]), g))]

        return self._record(self._call(aten.mm.default, scores, x), vjp)

    def cat(self, a: fx.Node, b: fx.Node) -> fx.Node:
        first, both = self.width(a), self.width(a) + self.width(b)

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            left = self._call(aten.slice.Tensor, g, 1, 0, first)
            return [(a, left), (b, self._call(aten.slice.Tensor, g, 1, first, both))]

        return self._record(self._call(aten.cat.default, [a, b], 1), vjp)

    def problem(self, result: fx.Node) -> FlowProblem:
        """Sum the result, write backward, and price it."""
        loss = self._call(aten.sum.default, result)
        shape = list(result.meta["val"].shape)
        tangent = self._placeholder("tangents_1", ())
        self.tag = "is_backward"
        # A graph holds no symbolic numbers but as nodes, so where rows may be one the shape is read off a tensor.
        given = (
            (aten.expand.default, tangent, shape) if self.names_shapes else (aten.expand_as.default, tangent, result)
        )
        gradients = {result: self._call(*given)}
        for node, vjp in reversed(self.tape):
            if node in gradients:
                self._pull(gradients, vjp, gradients.pop(node))
        self.graph.output([loss, *(gradients.get(weight) for weight in self.weights)])
        graph = JointGraph.classify(fx.GraphModule(torch.nn.Module(), self.graph), 1)
        costs = price(graph, Roofline({"cpu": MACHINE}, fuses=False))
        return FlowProblem.build(graph, find_constraints(graph), costs)

    def _pull(self, gradients: dict[fx.Node, fx.Node], vjp: Vjp, gradient: fx.Node) -> None:
        for target, part in vjp(gradient):
            if target.op == "placeholder" and target not in self.weights:
                continue
            whole = gradients.get(target)
            gradients[target] = part if whole is None else self._call(aten.add.Tensor, whole, part)

    def _placeholder(self, name: str, shape: tuple[int, ...]) -> fx.Node:
        nodes = list(self.graph.nodes)
        first = next((n for n in nodes if n.op != "placeholder"), None)
        with self.graph.inserting_before(first) if first is not None else self.graph.inserting_after():
            node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape)
        return node

    def _call(self, op: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(op, args)
        node.meta["partitioner_tag"] = self.tag
        node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def _record(self, node: fx.Node, vjp: Vjp) -> fx.Node:
        self.tape.append((node, vjp))
        return node


# -------------------------------------------------------------------------------------------------- shapes

UNARY = (Program.tanh, Program.gelu, Program.exp, Program.sin)


def chain(p: Program, rng: random.Random) -> fx.Node:
    """Layers of one width."""
    x, width = p.given(32), rng.choice(WIDTHS)
    for _ in range(rng.randint(4, 7)):
        x = rng.choice(UNARY)(p, p.linear(x, width))
    return x


def uneven_chain(p: Program, rng: random.Random) -> fx.Node:
    """Layers of different widths."""
    x = p.given(32)
    for _ in range(rng.randint(4, 7)):
        x = rng.choice(UNARY)(p, p.linear(x, rng.choice(WIDTHS)))
    return x


def activations(p: Program, rng: random.Random) -> fx.Node:
    """Few products, many pointwise ops."""
    x = p.linear(p.given(32), rng.choice(WIDTHS))
    for _ in range(rng.randint(6, 11)):
        x = rng.choice(UNARY)(p, x)
    return p.linear(x, rng.choice(WIDTHS))


def residual(p: Program, rng: random.Random) -> fx.Node:
    """A stream to which blocks add."""
    width = rng.choice(WIDTHS)
    x = p.linear(p.given(32), width)
    for _ in range(rng.randint(2, 4)):
        inner = rng.choice(UNARY)(p, p.linear(x, rng.choice(WIDTHS)))
        x = p.add(x, p.linear(inner, width))
    return x


def gated(p: Program, rng: random.Random) -> fx.Node:
    """Gated blocks."""
    width = rng.choice(WIDTHS)
    x = p.linear(p.given(32), width)
    for _ in range(rng.randint(2, 3)):
        inner = rng.choice(WIDTHS)
        x = p.linear(p.mul(rng.choice(UNARY)(p, p.linear(x, inner)), p.linear(x, inner)), width)
    return x


def u_net(p: Program, rng: random.Random) -> fx.Node:
    """Down and up again, with skips across."""
    x, skips = p.given(32), []
    for width in sorted(rng.sample(WIDTHS, rng.randint(2, 4)), reverse=True):
        x = rng.choice(UNARY)(p, p.linear(x, width))
        skips.append(x)
    x = skips.pop()
    for skip in reversed(skips):
        x = p.linear(p.cat(rng.choice(UNARY)(p, x), skip), p.width(skip))
    return x


def towers(p: Program, rng: random.Random) -> fx.Node:
    """Two towers that meet."""
    width = rng.choice(WIDTHS)
    ends = []
    for _ in range(2):
        x = p.given(32)
        for w in (rng.choice(WIDTHS), width):
            x = rng.choice(UNARY)(p, p.linear(x, w))
        ends.append(x)
    return rng.choice(UNARY)(p, p.linear(p.mul(*ends), rng.choice(WIDTHS)))


def encoder_decoder(p: Program, rng: random.Random) -> fx.Node:
    """A memory that every later block reads."""
    width = rng.choice(WIDTHS)
    memory = rng.choice(UNARY)(p, p.linear(p.given(32), width))
    memory = rng.choice(UNARY)(p, p.linear(memory, width))
    x = p.given(32)
    for _ in range(rng.randint(2, 3)):
        x = p.mul(p.linear(x, width), memory)
    return rng.choice(UNARY)(p, x)


def dag(p: Program, rng: random.Random) -> fx.Node:
    """Ops on whatever is there."""
    live = [p.linear(p.given(32), rng.choice(WIDTHS)) for _ in range(2)]
    for _ in range(rng.randint(6, 11)):
        live.append(_random_op(p, rng, live))
    unread = [x for x in live if not x.users]
    result = unread[0]
    for other in unread[1:]:
        result = p.cat(result, other)
    return result


def _random_op(p: Program, rng: random.Random, live: list[fx.Node]) -> fx.Node:
    a, b = rng.choice(live[-4:]), rng.choice(live)
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(UNARY)(p, a)
    if kind < 0.65:
        return p.linear(a, rng.choice(WIDTHS))
    if kind < 0.75:
        return p.cat(a, b)
    if p.width(a) != p.width(b):
        b = p.linear(b, p.width(a))
    return p.mul(a, b) if kind < 0.9 else p.add(a, b)


SHAPES = (chain, uneven_chain, activations, residual, gated, u_net, towers, encoder_decoder, dag, dag)


def instance(number: int) -> Instance:
    """The same instance for the same number, everywhere."""
    shape = SHAPES[number % len(SHAPES)]
    rng = random.Random(number)
    with FakeTensorMode():
        program = Program()
        return Instance(f"{shape.__name__}-{number}", program.problem(shape(program, rng)))


def instances(numbers: range) -> Iterator[Instance]:
    return (instance(number) for number in numbers)
