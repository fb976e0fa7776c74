"""Where each node's result lives: in memory of its own, in another node's, or nowhere because a compiler fuses it away.

An executor that runs the graph node by node gives every result memory, except views. A compiler that fuses writes a
result to memory only if something other than a fused loop reads it: a matrix product, a caller, another graph. What it
does not write is computed inside its readers' loops, so reading it means reading what it was computed from.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.fx as fx

from ..graph import (
    JointGraph,
    Role,
    base_is_viewed,
    base_of,
    hides_sharing,
    is_certain,
    is_laid_out_by_itself,
    overwritable,
    tensor_of,
)
from ..ops import FUSED_KINDS, INLINED_KINDS, Kind
from ..rewrites import holds_elements, left_over
from ..shared import Executor
from ..sizes import SizeNumber, Sizes, terms_of
from .workspace import workspace_of

SMALLEST_REDUCTION = 8
"""Of fewer elements, a sum is written out term by term (`unroll_reductions_threshold` of inductor's configuration)."""

_REDUCTIONS = frozenset(
    {
        torch.ops.aten.sum.dim_IntList,
        torch.ops.aten.mean.dim,
        torch.ops.aten.amax.default,
        torch.ops.aten.amin.default,
    }
)
"""Those whose second argument says over which dimensions."""


@dataclass(frozen=True, slots=True, eq=False)
class Storages:
    """What memory each node's result takes, by node position."""

    own_bytes: tuple[tuple[int, ...], ...]
    """Memory that running the node allocates: the bytes of each tensor it returns, none for a view."""
    own_sizes: tuple[tuple[SizeNumber, ...], ...]
    """Which sizes these are: what is equal here is equal whatever the symbols stand for."""
    executor: Executor
    sizes: Sizes
    base: tuple[int, ...]
    """The node whose memory a view shares; -1 for a node with memory of its own."""
    part: tuple[int, ...]
    """Which of the base's tensors a `getitem` takes; -1 for all of them."""
    is_fused: tuple[bool, ...]
    """Runs inside a loop that a compiler makes; all False for an executor that runs node by node."""
    is_inlined: tuple[bool, ...]
    """Has no memory where only fused nodes read it."""
    moves: tuple[bool, ...]
    """Reads elements from other places than it writes them to; only of nodes that are fused."""
    elements: tuple[object, ...]
    """How many elements its result has, or the symbols that say so."""
    is_deferred: tuple[bool, ...]
    """A matrix product that a compiler runs together with the sum that reads it, wherever that is."""
    groups_loops: bool
    """All loops between two kernels of their own are called as one function, before and after which memory is taken and
    freed: what a compiler does for a CPU."""
    relaid: frozenset[int]
    """Inputs of the step that a compiler copies into another layout; it hands the copy to backward."""
    overwrites: tuple[tuple[int, ...], ...]
    """The inputs to whose memory the node may write its result if nobody reads them later; none unless what runs the
    graph can be told so."""
    left_over: frozenset[int]
    """Gradients that stay in memory to the end of backward, with more than the step's result: see `gradients`."""
    workspace: Mapping[int, tuple[int, SizeNumber]]
    """Memory that nodes take only while they run, in bytes, and which size that is: what an allocator sees, and one
    who watches results does not."""


def find_storages(graph: JointGraph, executor: Executor, sizes: Sizes | None = None) -> Storages:
    """Find the memory of every node's result, as what runs the graph would give it."""
    fuses = executor.fuses
    sizes = Sizes.find(graph.nodes) if sizes is None else sizes
    shared = [_shared(graph, i) for i in range(len(graph.nodes))]
    own_sizes = tuple([() if base >= 0 else _own_sizes(graph, i, sizes, fuses) for i, (base, _) in enumerate(shared)])
    bases = [base for base, _ in shared]
    kinds = [_kind(graph, i) if fuses else None for i in range(len(graph.nodes))]
    deferred = [_product_of_sum(node) if fuses else None for node in graph.nodes]
    groups_loops = fuses and _runs_on_cpu(graph)
    products = {graph.resolve(product) for product in deferred if product is not None}
    return Storages(
        own_bytes=_as_bytes(own_sizes, sizes),
        own_sizes=own_sizes,
        executor=executor,
        sizes=sizes,
        base=tuple(bases),
        part=tuple(part for _, part in shared),
        is_fused=tuple(kind in FUSED_KINDS and deferred[i] is None for i, kind in enumerate(kinds)),
        is_inlined=tuple(
            kind in INLINED_KINDS and base < 0 and deferred[i] is None and not _is_written(graph, i, groups_loops)
            for i, (kind, (base, _)) in enumerate(zip(kinds, shared, strict=True))
        ),
        moves=tuple(kind is Kind.GATHER or _is_concatenation(graph, i) for i, kind in enumerate(kinds)),
        elements=tuple(_elements(tensor_of(node)) for node in graph.nodes) if fuses else (),
        is_deferred=tuple(i in products for i in range(len(graph.nodes))),
        groups_loops=groups_loops,
        relaid=frozenset(_relaid(graph)) if fuses else frozenset(),
        overwrites=_overwrites(graph, bases) if executor.overwrites else ((),) * len(graph.nodes),
        left_over=frozenset(map(graph.resolve, left_over(graph.module, len(graph.forward_outputs)))),
        workspace=dict(_workspace(graph, sizes)) if fuses else {},
    )


def _overwrites(graph: JointGraph, base: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Per node the inputs that it may write over; none whose memory something may share unsaid.

    Nor any if an input may lie in memory in another way than traced: nothing is then written over when the graph runs.
    """

    def owner(i: int) -> int:
        while base[i] >= 0:
            i = base[i]
        return i

    hiding = [i for i, node in enumerate(graph.nodes) if hides_sharing(node)]
    left_alone = {owner(j) for i in hiding for j in (i, *graph.inputs[i])}
    uncertain = _uncertain(graph)
    sources = [
        [graph.resolve(source) for source in overwritable(node)] if uncertain.isdisjoint(graph.inputs[i]) else []
        for i, node in enumerate(graph.nodes)
    ]
    return tuple([tuple([j for j in inputs if owner(j) not in left_alone]) for inputs in sources])


def _uncertain(graph: JointGraph) -> set[int]:
    """Nodes whose results may lie in memory in another way than tracing says, with all that follows them in that."""
    found: set[int] = set()
    for i, (node, op) in enumerate(zip(graph.nodes, graph.facts, strict=True)):
        if op is None or is_laid_out_by_itself(node.target, op, node.kwargs):
            continue
        values = [value for source in node.all_input_nodes if (value := tensor_of(source)) is not None]
        if not found.isdisjoint(graph.inputs[i]) or not is_certain(op, values):
            found.add(i)
    return found


def storages_at(storages: Storages, sizes: Sizes) -> Storages:
    """The same memory at other sizes of the same symbols."""
    num_bytes = sizes.table_bytes
    workspace = {i: (num_bytes[size], size) for i, (_, size) in storages.workspace.items()}
    return replace(storages, sizes=sizes, own_bytes=_as_bytes(storages.own_sizes, sizes), workspace=workspace)


def _workspace(graph: JointGraph, sizes: Sizes) -> Iterator[tuple[int, tuple[int, SizeNumber]]]:
    for i, node in enumerate(graph.nodes):
        num_bytes = workspace_of(node, sizes)
        if terms := terms_of(num_bytes):
            yield i, (sizes.value_of_terms(terms), sizes.number_of(terms))


def _kind(graph: JointGraph, i: int) -> Kind | None:
    """What a compiler takes a node for."""
    op, node = graph.facts[i], graph.nodes[i]
    if node.target in _REDUCTIONS and _is_written_out(node):
        return Kind.POINTWISE
    return None if op is None else op.kind


def _is_written(graph: JointGraph, i: int, groups_loops: bool) -> bool:
    """True for loops whose result a compiler writes to memory, whoever reads it."""
    op = graph.facts[i]
    return op is not None and (op.is_scatter or (op.is_concatenation and groups_loops))


def _is_concatenation(graph: JointGraph, i: int) -> bool:
    op = graph.facts[i]
    return op is not None and op.is_concatenation


def _elements(value: torch.Tensor | None) -> object:
    """The number of a tensor's elements, or the symbols it is made of: comparing sizes would state a condition."""
    number = None if value is None else value.numel()
    return number.node.expr if isinstance(number, torch.SymInt) else number


def _is_written_out(node: fx.Node) -> bool:
    """True for a reduction over a few elements at a time, which a compiler takes for plain arithmetic."""
    source, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    value = tensor_of(source) if isinstance(source, fx.Node) else None
    if value is None or value.dim() == 0 or not isinstance(dims, (list, tuple)) or not dims:
        return False
    sizes: list[int | torch.SymInt] = [value.shape[dim] for dim in dims if isinstance(dim, int)]
    if not all(isinstance(size, int) for size in sizes):
        return False
    num_elements = prod(int(size) for size in sizes)
    result = tensor_of(node)
    is_one = result is not None and all(isinstance(size, int) and size == 1 for size in result.shape)
    return num_elements < SMALLEST_REDUCTION and not is_one


def _runs_on_cpu(graph: JointGraph) -> bool:
    """True if most of what is computed is computed on a CPU."""
    values = [tensor_of(node) for node, role in zip(graph.nodes, graph.roles, strict=True) if role is Role.FORWARD]
    devices = [value.device.type for value in values if value is not None]
    return 2 * devices.count("cpu") > len(devices)


def _relaid(graph: JointGraph) -> Iterator[int]:
    """Images and filters that convolutions of forward read, unless their channels come last already."""
    for i, op in enumerate(graph.facts):
        if op is None or not op.is_convolution or graph.roles[i] is not Role.FORWARD:
            continue
        for j in graph.inputs[i]:
            value = tensor_of(graph.nodes[j]) if graph.roles[j] is Role.INPUT else None
            if value is not None and value.dim() == 4 and not value.is_contiguous(memory_format=torch.channels_last):
                yield j


def _product_of_sum(node: fx.Node) -> fx.Node | None:
    """The matrix product that a sum makes one kernel with, if nothing else reads it.

    A product that is there long before the other summand is not one of them: see `fusion.keep_products_early`.
    """
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or not node.all_input_nodes:
        return None
    last = max(node.all_input_nodes)
    return last if last.target is torch.ops.aten.mm.default and len(last.users) == 1 else None


def _shared(graph: JointGraph, i: int) -> tuple[int, int]:
    """The node whose memory this one's result is in, and which part of it; (-1, -1) if it has its own."""
    node, op = graph.nodes[i], graph.facts[i]
    if op is None or not graph.inputs[i]:
        return -1, -1
    first = graph.inputs[i][0]
    if op.is_mutating or base_is_viewed(graph, i):
        return first, -1
    if node.target is operator.getitem and isinstance(node.args[1], int):
        return first, node.args[1]
    return -1, -1


def _own_sizes(graph: JointGraph, i: int, sizes: Sizes, fuses: bool) -> tuple[SizeNumber, ...]:
    if graph.roles[i] in (Role.INPUT, Role.BACKWARD_INPUT, Role.CONSTANT, Role.DEAD):
        return ()
    like = None if fuses else _in_memory_like(graph, i)
    if like is not None:
        return (sizes.size_number(like),)
    return tuple([sizes.size_number(leaf) for leaf in _tensors(graph.nodes[i].meta.get("val"))])


def _in_memory_like(graph: JointGraph, i: int) -> torch.Tensor | None:
    """What has as much memory as a node's result, where a kernel of its own takes more than the result's elements."""
    op = graph.facts[i]
    if op is None or not (op.copies_storage or holds_elements(graph.nodes[i])):
        return None
    first = graph.inputs[i][0]
    return tensor_of(graph.nodes[base_of(graph, first) if op.copies_storage else first])


def _as_bytes(own_sizes: Sequence[tuple[SizeNumber, ...]], sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    num_bytes = sizes.table_bytes
    return tuple([tuple([num_bytes[size] for size in own]) for own in own_sizes])


def _tensors(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
