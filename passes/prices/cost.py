"""What it costs, in seconds, to recompute a value or to keep it.

A cost model answers two questions: what does running this call once more, inside backward, add to the step, and what
does keeping these bytes add? It is asked once per distinct call. A model that computes its answers by one formula at
all sizes may say so (`is_formula`): it is then asked about calls whose sizes are expressions, too.

Roofline   the larger of flops over peak flops and bytes over bandwidth, on a CPU their sum; ops that will be fused into
           their readers are charged for their arithmetic in those loops alone, since what they read is in registers
           anyway, and for writing their result if a kernel of its own reads that.
Flops      flops over peak flops; what has no flop count is free.
Callback   a user's function, `fn(call: OpCall) -> float` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from ..graph import JointGraph, Role, tensor_of
from ..ops import Kind
from ..shared import OptionError, RematError, fingerprint
from ..sizes import Sizes, TensorSpec, largest
from ..torch_private import without_modes
from .op_call import UNKNOWN_USE, OpCall, SizesLike, Use, call_of
from .uses import find_uses

LONGEST_SECONDS = 1e9
"""A price above this is taken for a mistake."""

TICKS_PER_SECOND = 10**9
"""Prices are whole numbers, so that equal graphs give equal plans: one tick is a nanosecond."""

MOVES_TO_SAVE = 2
"""A kept value goes out of the cache and comes back in: written once, read once, also where a kernel writes it anyway,
since memory that is not kept is used again while it is still cached."""

ARITHMETIC: Mapping[Kind, float] = {
    Kind.FREE: 0.0,
    Kind.POINTWISE: 0.02,
    Kind.TRANSCENDENTAL: 0.6,
    Kind.SLOW_TRANSCENDENTAL: 3.0,
    Kind.GATHER: 1.0,
    Kind.RANDOM: 30.0,
}
"""What a fused op adds to its reader's loop, per element, as a part of the time to move four bytes through memory.

Measured on one core of two machines, with inductor's vectorised kernels (`python benchmarks/fused_arithmetic.py`):
eight more additions and products in a loop add nothing that can be seen, or 0.6, exp 0.4 and 0.6, sigmoid 0.8 and 1.9,
erf and log 0.9 and 1.6, tanh 3 and 6, a random number 22 and 37.
A gather reads its result's size from somewhere.
"""

KERNEL_ARITHMETIC: Mapping[Kind, float] = {
    **ARITHMETIC,
    Kind.TRANSCENDENTAL: 2.5,
    Kind.SLOW_TRANSCENDENTAL: 12.0,
    Kind.EXP_REDUCTION: 3.5,
}
"""The same for an op that is a kernel of its own, beside what it moves through memory.

Measured on one core with torch's kernels on the CPU (`python benchmarks/kernel_prices.py`): sigmoid, silu and gelu 2.3,
exp 3.1, log and erf 4 to 5, tanh 12, softmax 3.2, log_softmax 3.8, dropout 43 for its two results.
"""

UNKNOWN_WORK = 10.0
"""How often an op without a flop count is taken to pass over its inputs and outputs. Not measured: it may be a copy, or
a decomposition, or the user's own attention; this keeps what it computes unless memory is short."""

SLOW_PASSES = {"cpu": 5}
"""How many times a slow reduction's own kernel takes to copy its input, by device. Batch normalisation in training took
4.5 to 5.5 times as long as a copy on one core, group and layer normalisation one to two times."""

ATTENTION_ARITHMETIC = {"cpu": 4.0}
"""What attention does beside its products, per pair of a query and a key, in the unit of ARITHMETIC, by device: its
softmax, and that its products are small. One core took 1.3 ns per pair beyond the products with heads of 32, 0.3 to 0.8
with heads of 64, where moving four bytes takes 0.25."""

WAITS_FOR_MEMORY = frozenset({"cpu"})
"""Devices on which products do not compute while they wait for memory. One core took 2.8 ms for 48 products of 250x32
by 32x250, whose arithmetic takes 1.5 ms and whose bytes take 1.7 ms. Large products are as dear either way."""

ACCELERATOR_SPEEDUP = 10.0
"""How much cheaper arithmetic is there, compared with memory. Not measured: from the data sheets of current GPUs."""


PRICED_ROLES = (Role.INPUT, Role.FORWARD, Role.EITHER)
"""Whose results can be kept, or computed again."""


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a device computes and moves data."""

    flops_per_second: float
    """Of single-precision matrix products; double precision counts half."""
    bytes_per_second: float
    """Of a large copy, read and write added."""
    half_speed: float = 2.0
    """How much faster products of half precision are: many times on an accelerator that has units for them, a tenth on
    a CPU that has none."""

    def compute_seconds(self, flops: int, dtype: torch.dtype) -> float:
        """Time for a matrix product of a type."""
        speed = self.half_speed if dtype.itemsize == 2 else 4 / dtype.itemsize
        return flops / (speed * self.flops_per_second)


DEFAULT_MACHINE = Machine(flops_per_second=2.0**43, bytes_per_second=2.0**40)
"""For devices that cannot be measured (`meta`): the balance of a data-centre GPU in single precision, rounded."""


class CostModel(Protocol):
    """Prices recomputation and keeping."""

    def recompute_seconds(self, call: OpCall) -> float:
        """What one more run of the call inside backward adds to the step."""

    def save_seconds(self, num_bytes: int, device: str) -> float:
        """What keeping `num_bytes` for backward adds to the step."""

    def cache_key(self) -> str:
        """Two models with the same key price everything alike."""


@runtime_checkable
class Formulas(Protocol):
    """A cost model that can say what a call costs in terms of its sizes."""

    def is_formula(self, call: OpCall) -> bool:
        """True if `recompute_seconds` takes calls like this one with expressions for sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The prices of every forward-side value, in ticks, by node position."""

    save_ticks: tuple[int, ...]
    recompute_ticks: tuple[int, ...]
    """What the first recomputation adds: nothing, for what only backward needs."""
    num_bytes: tuple[int, ...]
    run_ticks: tuple[int, ...]
    """What each further recomputation adds."""
    likes: Likes | None = None
    """Which nodes have the same prices at all sizes."""


@dataclass(frozen=True, slots=True, eq=False)
class Likes:
    """Groups of nodes that cost the same whatever the sizes are."""

    group_of: tuple[int, ...]
    """By node position."""
    examples: tuple[tuple[fx.Node, Role, Use], ...]
    """A node of each group, its role, and what becomes of it if it is recomputed."""

    @staticmethod
    def find(graph: JointGraph, sizes: Sizes, *, fuses: bool = False) -> Likes:
        """Group nodes by role, by what they return and, if they call something, by the call and its use."""
        forms = sizes.forms if sizes.values else sizes
        numbers: dict[object, int] = {}
        examples: list[tuple[fx.Node, Role, Use]] = []
        group_of = []
        uses = find_uses(graph, sizes) if fuses else [UNKNOWN_USE] * len(graph.nodes)
        for example in zip(graph.nodes, graph.roles, uses, strict=True):
            number = numbers.setdefault(_what_decides(*example, forms), len(numbers))
            if number == len(examples):
                examples.append(example)
            group_of.append(number)
        return Likes(tuple(group_of), tuple(examples))

    def use_of(self, i: int) -> Use:
        """What becomes of a node's result, or of one that costs the same, if it is recomputed."""
        return self.examples[self.group_of[i]][2]


def _what_decides(node: fx.Node, role: Role, use: Use, forms: SizesLike) -> object:
    """All that the prices of a node depend on, beside the sizes."""
    if role not in PRICED_ROLES:
        return None
    if node.op == "call_function":
        return role, tensor_of(node) is not None, call_of(node, forms, use)
    tensor = tensor_of(node)
    return role, None if tensor is None else forms.spec_of(tensor)


def price(
    graph: JointGraph,
    model: CostModel,
    sizes: Sizes | None = None,
    likes: Likes | None = None,
    *,
    fuses: bool = False,
) -> Costs:
    """Price every forward-side value of a graph, at given sizes or at those of the example.

    A graph that was priced before need not be looked through again: `likes` says which nodes cost the same. `fuses`
    says that loops will be made of several ops: what a result costs then depends on who reads it, too.
    """
    sizes = Sizes.find(graph.nodes) if sizes is None else sizes
    likes = Likes.find(graph, sizes, fuses=fuses) if likes is None else likes
    asked = _Asked(model, sizes)
    rows = [_price_node(node, role, use, asked) for node, role, use in likes.examples]
    columns = zip(*[rows[group] for group in likes.group_of], strict=True) if rows else ((), (), (), ())
    save_ticks, recompute_ticks, num_bytes, run_ticks = columns
    return Costs(save_ticks, recompute_ticks, num_bytes, run_ticks, likes)


class _Asked:
    """A cost model that remembers its answers."""

    def __init__(self, model: CostModel, sizes: Sizes) -> None:
        self.model, self.sizes = model, sizes
        self.known: dict[OpCall, float] = {}

    def recompute_seconds(self, node: fx.Node, use: Use) -> float:
        call = call_of(node, self.sizes, use)
        if call not in self.known:
            self.known[call] = _checked(self.model.recompute_seconds(call), call)
        return self.known[call]


def _checked(seconds: float, call: OpCall) -> float:
    if not 0.0 <= seconds <= LONGEST_SECONDS:
        raise OptionError(
            f"the cost model returned {seconds!r} for {call.target}; "
            f"a price is a number of seconds from 0 to {LONGEST_SECONDS:g}"
        )
    return seconds


def _price_node(node: fx.Node, role: Role, use: Use, asked: _Asked) -> tuple[int, int, int, int]:
    """Ticks to save, ticks to recompute, bytes, ticks to run."""
    if role not in PRICED_ROLES:
        return 0, 0, 0, 0
    num_bytes = save_ticks = run_ticks = 0
    tensor = tensor_of(node)
    if tensor is not None:
        num_bytes = asked.sizes.bytes_of(tensor)
        save_ticks = max(1, ticks(asked.model.save_seconds(num_bytes, tensor.device.type)))
    if node.op == "call_function":
        run_ticks = ticks(asked.recompute_seconds(node, use))
    # What only backward needs is computed once, wherever it runs: running it there adds nothing.
    recompute_ticks = run_ticks if role is Role.FORWARD else 0
    return save_ticks, recompute_ticks, num_bytes, run_ticks


def ticks(seconds: float) -> int:
    """Seconds as a whole number of ticks."""
    return round(seconds * TICKS_PER_SECOND)


# -------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class Roofline:
    """The larger of compute time and memory time, with fused ops charged for what they add."""

    machines: Mapping[str, Machine] = field(default_factory=dict)
    """By device type; others get DEFAULT_MACHINE."""
    fuses: bool = True
    """What runs the graph fuses ops; if not, each of them reads and writes memory."""

    def machine(self, device: str) -> Machine:
        """The constants of a device."""
        return self.machines.get(device, DEFAULT_MACHINE)

    def recompute_seconds(self, call: OpCall) -> float:
        """What one more run of the call inside backward adds to the step."""
        machine = self.machine(call.device)
        memory = (call.input_bytes + call.output_bytes) / machine.bytes_per_second
        kind = call.facts.kind
        if kind is Kind.FREE or (self.fuses and kind in ARITHMETIC):
            written = call.output_bytes / machine.bytes_per_second if call.is_written and self.fuses else 0.0
            return _arithmetic_seconds(call, machine, ARITHMETIC) + written
        if kind is Kind.SLOW_REDUCTION:
            return memory if self.fuses else SLOW_PASSES.get(call.device, 1) * memory
        if kind is Kind.REDUCTION or (self.fuses and kind is Kind.EXP_REDUCTION):
            return memory
        if kind in KERNEL_ARITHMETIC:
            return memory + _arithmetic_seconds(call, machine, KERNEL_ARITHMETIC)
        compute = _compute_seconds(call, machine)
        if compute is None:
            return UNKNOWN_WORK * memory
        return compute + memory if call.device in WAITS_FOR_MEMORY else largest(compute, memory)

    def is_formula(self, call: OpCall) -> bool:  # noqa: ARG002 (others can say it of some calls only)
        """Every price is one."""
        return True

    def save_seconds(self, num_bytes: int, device: str) -> float:
        """Bytes over bandwidth, out and back."""
        return MOVES_TO_SAVE * num_bytes / self.machine(device).bytes_per_second

    def cache_key(self) -> str:
        """The machine constants; the others change only with remat's version."""
        return f"{type(self).__name__} {sorted(self.machines.items())} {self.fuses}"


@dataclass(frozen=True, slots=True)
class Flops(Roofline):
    """Count floating-point operations only."""

    def recompute_seconds(self, call: OpCall) -> float:
        """Compute time of the ops that have a flop count; the rest is free."""
        return _compute_seconds(call, self.machine(call.device)) or 0.0


@dataclass(frozen=True, slots=True)
class Callback(Roofline):
    """A user's function for recomputation, bandwidth for keeping."""

    function: Callable[[OpCall], float] = field(kw_only=True)

    def recompute_seconds(self, call: OpCall) -> float:
        """Ask the user."""
        with without_modes():
            seconds = self.function(call)
            if isinstance(seconds, (bool, str)) or not hasattr(seconds, "__float__"):
                raise OptionError(
                    f"the cost model returned {seconds!r} for {call.target}; it must return seconds as a number"
                )
            try:
                return float(seconds)
            except OverflowError:
                return math.inf

    def is_formula(self, call: OpCall) -> bool:  # noqa: ARG002 (nobody knows what the function does)
        """A user's function is asked about numbers."""
        return False

    def cache_key(self) -> str:
        """The function's code and constants."""
        return f"Callback {fingerprint(self.function)} {sorted(self.machines.items())}"


def _arithmetic_seconds(call: OpCall, machine: Machine, table: Mapping[Kind, float]) -> float:
    """What an op computes, beside what it reads and writes."""
    per_element = table[call.facts.kind] * 4 / machine.bytes_per_second
    if call.device != "cpu" and call.facts.kind is not Kind.GATHER:
        per_element /= ACCELERATOR_SPEEDUP
    return per_element * sum(spec.numel for spec in (call.outputs if call.loop is None else (call.loop,)))


def _compute_seconds(call: OpCall, machine: Machine) -> float | None:
    """Time for a call's arithmetic; None if nothing is known of that."""
    flops = flops_of(call)
    if flops is None:
        return None
    seconds = machine.compute_seconds(flops, call.outputs[0].dtype)
    if getattr(call.target, "overloadpacket", None) in _ATTENTION:
        per_pair = ATTENTION_ARITHMETIC.get(call.device, 0.0) * 4 / machine.bytes_per_second
        seconds += per_pair * _num_pairs(call)
    return seconds


def _num_pairs(call: OpCall) -> Any:
    """Of a query and a key, in all heads: an expression where sizes are."""
    query, key = (spec for spec in call.args[:2] if isinstance(spec, TensorSpec))
    return math.prod(query.shape[:-1]) * key.shape[-2]


_aten = torch.ops.aten
_SAME_FORMULA: Mapping[object, object] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_fused_attention_overrideable: _aten._scaled_dot_product_flash_attention,
}
"""Attention for which torch has no flop formula: it does what that for which it has one does."""

_ATTENTION = frozenset(_SAME_FORMULA)
"""Attention that runs on CPUs, and elsewhere in place of kernels that torch knows."""


def _grouped_flops(rows: Any, experts: Any, *_: Any, out_val: Any, **__: Any) -> Any:
    """Products of rows with the matrix of their own group, `_grouped_mm`: each row meets one matrix."""
    del experts
    inner = getattr(rows, "shape", rows)[-1]
    return 2 * math.prod(getattr(out_val, "shape", out_val)) * inner


_OWN_FORMULAS: Mapping[object, Callable[..., Any]] = {_aten._grouped_mm: _grouped_flops}
"""Flop formulas that torch lacks."""


def flops_of(call: OpCall) -> int | None:
    """Floating-point operations of a call by torch's formulas, an expression if its sizes are; None if it has none."""
    packet = getattr(call.target, "overloadpacket", None)
    formula = flop_registry.get(_SAME_FORMULA.get(packet, packet)) or _OWN_FORMULAS.get(packet)
    if formula is None or not call.outputs:
        return None
    with without_modes():
        outputs = tuple(_as_meta(o) for o in call.outputs)
        args = [_as_meta(a) for a in call.args]
        kwargs = {name: _as_meta(value) for name, value in call.kwargs}
        try:
            flops = formula(*args, **kwargs, out_val=outputs if len(outputs) > 1 else outputs[0])
            return int(flops) if isinstance(flops, (int, float)) else flops
        except Exception as error:
            raise RematError(f"the flop formula registered for {call.target} raised {error!r}") from error


def _as_meta(arg: Any) -> Any:
    """Arguments as a flop formula wants them: tensors without data, or shapes alone where sizes are expressions."""
    if isinstance(arg, TensorSpec):
        if not all(isinstance(size, int) for size in arg.shape):
            return arg.shape
        return torch.empty(arg.shape, dtype=arg.dtype, device="meta")
    if isinstance(arg, tuple):
        return [_as_meta(a) for a in arg]
    return arg
