"""A joint graph of any size, written node by node: tracing a hundred thousand nodes would take minutes.

It looks like what AOTAutograd and inductor's decompositions make of a deep residual network: ``primals_*`` and
``tangents_*`` placeholders, forward, then a backward that reads forward's values, each node with its own fake tensor
(views share their base's storage) and the tag of its half. Blocks take turns between normalised gated MLPs, attention
and plain MLPs, and their inner widths differ from block to block, so a planner cannot solve one block and be done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers the ops that inductor makes of dropout
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

aten, prims = torch.ops.aten, torch.ops.prims
TOKENS, WIDTH = 256, 64
NUM_INNER_WIDTHS = 61
"""A prime, so that inner widths and kinds of block repeat together only after 183 blocks."""

Vjp = Callable[[fx.Node], list[tuple[fx.Node, fx.Node]]]


@dataclass(frozen=True)
class SyntheticJoint:
    """A joint graph and what a partition function is told about it."""

    module: fx.GraphModule
    num_fwd_outputs: int
    static_lifetime_input_indices: list[int]


def synthetic_joint(num_nodes: int) -> SyntheticJoint:
    """Build a joint graph of at least ``num_nodes`` nodes, exceeding that by less than one round of blocks."""
    one_round, two_rounds = (_build(rounds * len(_BLOCKS)) for rounds in (1, 2))
    first = len(one_round.module.graph.nodes)
    per_round = len(two_rounds.module.graph.nodes) - first
    num_rounds = 1 + max(0, -(-(num_nodes - first) // per_round))
    return _build(num_rounds * len(_BLOCKS))


def _build(num_blocks: int) -> SyntheticJoint:
    with FakeTensorMode():
        return _Builder().build(num_blocks)


class _Builder:
    """Writes forward nodes and remembers how each is differentiated, then writes backward in reverse."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.tape: list[tuple[fx.Node, Vjp]] = []
        self.tag = "is_forward"
        self.num_seeds = 0

    def build(self, num_blocks: int) -> SyntheticJoint:
        """Write the whole graph."""
        shapes = [shape for block in range(num_blocks) for shape in _weight_shapes(block)]
        x = inputs = self.placeholder("primals_1", (TOKENS, WIDTH))
        weights = [self.placeholder(f"primals_{i + 2}", shape) for i, shape in enumerate(shapes)]
        tangent = self.placeholder("tangents_1", (TOKENS, WIDTH))
        num_dropouts = sum(_BLOCKS[block % len(_BLOCKS)] in (_attention, _mlp) for block in range(num_blocks))
        self.seeds = self.call(prims.inductor_seeds.default, num_dropouts, torch.device("cpu"))
        remaining = iter(weights)
        for block in range(num_blocks):
            x = _BLOCKS[block % len(_BLOCKS)](self, x, [next(remaining) for _ in _weight_shapes(block)])
        self.tag = "is_backward"
        gradients = self.backward(x, tangent)
        self.graph.output([x, gradients[inputs], *(gradients[weight] for weight in weights)])
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return SyntheticJoint(module, 1, list(range(1, len(weights) + 1)))

    def backward(self, result: fx.Node, tangent: fx.Node) -> dict[fx.Node, fx.Node]:
        """Write the gradient of every node that the result depends on."""
        gradients = {result: tangent}
        for node, vjp in reversed(self.tape):
            for target, gradient in vjp(gradients.pop(node)):
                if target in gradients:
                    gradient = self.call(aten.add.Tensor, gradients[target], gradient)
                gradients[target] = gradient
        return gradients

    # --- nodes ---

    def placeholder(self, name: str, shape: tuple[int, ...]) -> fx.Node:
        """Write an input of the graph."""
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape)
        return node

    def call(self, op: Any, *args: Any) -> fx.Node:
        """Write one op; its fake tensor comes from running the op on those of its inputs."""
        node = self.graph.call_function(op, args)
        node.meta["partitioner_tag"] = self.tag
        node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def record(self, node: fx.Node, vjp: Vjp) -> fx.Node:
        """Remember how to differentiate a forward node."""
        self.tape.append((node, vjp))
        return node

    # --- differentiable ops ---

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """Write a + b of equal shapes."""
        return self.record(self.call(aten.add.Tensor, a, b), lambda g: [(a, g), (b, g)])

    def mul(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """Write a * b of equal shapes."""
        return self.record(
            self.call(aten.mul.Tensor, a, b),
            lambda g: [(a, self.call(aten.mul.Tensor, g, b)), (b, self.call(aten.mul.Tensor, g, a))],
        )

    def linear(self, x: fx.Node, weight: fx.Node) -> fx.Node:
        """Write x @ weight.T with the weight stored as PyTorch stores it."""
        transposed = self.call(aten.permute.default, weight, [1, 0])

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            to_weight = self.call(aten.mm.default, self.call(aten.permute.default, g, [1, 0]), x)
            back = self.call(aten.permute.default, transposed, [1, 0])
            return [(x, self.call(aten.mm.default, g, back)), (weight, to_weight)]

        return self.record(self.call(aten.mm.default, x, transposed), vjp)

    def silu(self, x: fx.Node) -> fx.Node:
        """Write x * sigmoid(x), decomposed."""
        sigmoid = self.call(aten.sigmoid.default, x)

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            complement = self.call(aten.sub.Tensor, self.call(aten.mul.Tensor, sigmoid, -1.0), -1.0)
            inner = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, x, complement), 1.0)
            slope = self.call(aten.mul.Tensor, sigmoid, inner)
            return [(x, self.call(aten.mul.Tensor, g, slope))]

        return self.record(self.call(aten.mul.Tensor, x, sigmoid), vjp)

    def relu(self, x: fx.Node) -> fx.Node:
        """Write a ReLU, whose backward reads a mask."""
        result = self.call(aten.relu.default, x)

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            mask = self.call(aten.le.Scalar, result, 0.0)
            zero = self.call(aten.full.default, [], 0.0)
            return [(x, self.call(aten.where.self, mask, zero, g))]

        return self.record(result, vjp)

    def norm(self, x: fx.Node, scale: fx.Node) -> fx.Node:
        """Write a root-mean-square norm, decomposed."""
        mean = self.call(aten.mean.dim, self.call(aten.pow.Tensor_Scalar, x, 2), [1], True)
        factor = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, mean, 1e-6))
        normal = self.call(aten.mul.Tensor, x, factor)

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            to_scale = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, g, normal), [0])
            scaled = self.call(aten.mul.Tensor, g, scale)
            inner = self.call(aten.sum.dim_IntList, self.call(aten.mul.Tensor, scaled, normal), [1], True)
            along = self.call(aten.mul.Tensor, normal, self.call(aten.div.Scalar, inner, WIDTH))
            to_x = self.call(aten.mul.Tensor, self.call(aten.sub.Tensor, scaled, along), factor)
            return [(x, to_x), (scale, to_scale)]

        return self.record(self.call(aten.mul.Tensor, normal, scale), vjp)

    def softmax(self, x: fx.Node) -> fx.Node:
        """Write a softmax over rows, decomposed."""
        shifted = self.call(aten.sub.Tensor, x, self.call(aten.amax.default, x, [1], True))
        exponent = self.call(aten.exp.default, shifted)
        result = self.call(aten.div.Tensor, exponent, self.call(aten.sum.dim_IntList, exponent, [1], True))

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            weighted = self.call(aten.mul.Tensor, g, result)
            total = self.call(aten.sum.dim_IntList, weighted, [1], True)
            return [(x, self.call(aten.sub.Tensor, weighted, self.call(aten.mul.Tensor, result, total)))]

        return self.record(result, vjp)

    def dropout(self, x: fx.Node) -> fx.Node:
        """Write dropout as inductor decomposes it: one seed of the graph's, random numbers from it, a mask."""
        seed = self.call(prims.inductor_lookup_seed.default, self.seeds, self.num_seeds)
        self.num_seeds += 1
        numbers = self.call(prims.inductor_random.default, list(x.meta["val"].shape), seed, "rand")
        mask = self.call(aten.gt.Scalar, numbers, 0.1)

        def masked(value: fx.Node) -> fx.Node:
            return self.call(aten.mul.Tensor, self.call(aten.mul.Tensor, mask, value), 1 / 0.9)

        return self.record(masked(x), lambda g: [(x, masked(g))])

    def matmul_transposed(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """Write a @ b.T of two activations."""
        transposed = self.call(aten.permute.default, b, [1, 0])

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            to_b = self.call(aten.mm.default, self.call(aten.permute.default, g, [1, 0]), a)
            return [(a, self.call(aten.mm.default, g, b)), (b, to_b)]

        return self.record(self.call(aten.mm.default, a, transposed), vjp)

    def matmul(self, a: fx.Node, b: fx.Node) -> fx.Node:
        """Write a @ b of two activations."""

        def vjp(g: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
            to_a = self.call(aten.mm.default, g, self.call(aten.permute.default, b, [1, 0]))
            to_b = self.call(aten.mm.default, self.call(aten.permute.default, a, [1, 0]), g)
            return [(a, to_a), (b, to_b)]

        return self.record(self.call(aten.mm.default, a, b), vjp)


def _inner_width(block: int) -> int:
    return 32 + 8 * (block * 17 % NUM_INNER_WIDTHS)


def _weight_shapes(block: int) -> list[tuple[int, ...]]:
    inner = _inner_width(block)
    into, out = (inner, WIDTH), (WIDTH, inner)
    kinds: list[list[tuple[int, ...]]] = [[(WIDTH,), into, into, out], [(WIDTH,), into, into, into, out], [into, out]]
    return kinds[block % len(kinds)]


def _gated_mlp(b: _Builder, x: fx.Node, weights: list[fx.Node]) -> fx.Node:
    scale, gate, up, down = weights
    h = b.norm(x, scale)
    return b.add(x, b.linear(b.mul(b.silu(b.linear(h, gate)), b.linear(h, up)), down))


def _attention(b: _Builder, x: fx.Node, weights: list[fx.Node]) -> fx.Node:
    scale, query, key, value, out = weights
    h = b.norm(x, scale)
    scores = b.dropout(b.softmax(b.matmul_transposed(b.linear(h, query), b.linear(h, key))))
    return b.add(x, b.linear(b.matmul(scores, b.linear(h, value)), out))


def _mlp(b: _Builder, x: fx.Node, weights: list[fx.Node]) -> fx.Node:
    up, down = weights
    return b.add(x, b.dropout(b.linear(b.relu(b.linear(x, up)), down)))


_BLOCKS = (_gated_mlp, _attention, _mlp)
