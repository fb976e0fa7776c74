"""One call of an operator, reduced to what its cost depends on: op, shapes, dtypes, strides, plain arguments.

Two nodes with the same call cost the same, so a cost model is asked once per distinct call: a model of a hundred equal
layers has some dozens of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx as fx

from ..ops import OpFacts, facts_of_call
from ..sizes import TensorSpec, hint_of, spec_of


@dataclass(frozen=True, slots=True)
class Use:
    """What becomes of a recomputed result."""

    loop: fx.Node | None = None
    """A node over whose elements the result is computed, if those are more than its own."""
    is_written: bool = False
    """A kernel of backward reads it from memory."""


UNKNOWN_USE = Use()


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operator with the arguments that decide its cost."""

    target: Any
    args: tuple[Any, ...]
    """Tensors as TensorSpec, sequences as tuples, other arguments as they are."""
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec, ...]
    loop: TensorSpec | None = None
    """If the call will be part of a compiler's loop over more elements than its result has: what that loop makes."""
    is_written: bool = False
    """It will be part of a compiler's loop, but its result is written to memory for a kernel of backward."""

    @property
    def facts(self) -> OpFacts:
        """What is known of the call."""
        return facts_of_call(self.target, self.args, dict(self.kwargs))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors it reads."""
        return tuple(_specs_in((self.args, self.kwargs)))

    @property
    def input_bytes(self) -> int:
        """Bytes it reads if every input is read once."""
        return sum(spec.num_bytes for spec in self.inputs)

    @property
    def output_bytes(self) -> int:
        """Bytes it writes."""
        return sum(spec.num_bytes for spec in self.outputs)

    @property
    def device(self) -> str:
        """Type of the device it runs on."""
        for spec in (*self.outputs, *self.inputs):
            return spec.device
        return "cpu"


class SizesLike(Protocol):
    """Says what number a size stands for."""

    def of(self, size: int | torch.SymInt) -> int:
        """The number that a size stands for."""

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""


class _Examples:
    """Sizes of the example that a graph was traced with."""

    def of(self, size: int | torch.SymInt) -> int:
        return hint_of(size)

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        return spec_of(tensor)


_EXAMPLES = _Examples()


def call_of(node: fx.Node, sizes: SizesLike | None = None, use: Use = UNKNOWN_USE) -> OpCall:
    """Describe the call that a node makes, at given sizes or at those of the example."""
    sizes = _EXAMPLES if sizes is None else sizes
    loop = None if use.loop is None else use.loop.meta["val"]
    return OpCall(
        target=node.target,
        args=tuple([_described(a, sizes) for a in node.args]),
        kwargs=tuple([(k, _described(v, sizes)) for k, v in node.kwargs.items()]) if node.kwargs else (),
        outputs=tuple(_specs_in(_spec_of_value(node.meta.get("val"), sizes))),
        loop=None if loop is None else sizes.spec_of(loop),
        is_written=use.is_written,
    )


def _spec_of_value(value: Any, sizes: SizesLike) -> Any:
    if isinstance(value, torch.Tensor):
        return sizes.spec_of(value)
    if isinstance(value, (list, tuple)):
        return tuple([_spec_of_value(v, sizes) for v in value])
    return None


def _described(arg: Any, sizes: SizesLike) -> Any:
    if isinstance(arg, fx.Node):
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor):
            return sizes.spec_of(value)
        if isinstance(value, torch.SymInt):
            return sizes.of(value)
        if isinstance(value, (list, tuple)) and arg.op == "call_function":
            return _spec_of_value(value, sizes)
        return arg.op
    if isinstance(arg, (list, tuple)):
        return tuple([_described(a, sizes) for a in arg])
    if isinstance(arg, slice):
        return repr(arg)
    if isinstance(arg, dict):
        return tuple([(k, _described(v, sizes)) for k, v in arg.items()])
    return arg


def _specs_in(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    if isinstance(value, tuple):
        return [spec for item in value for spec in _specs_in(item)]
    return []
