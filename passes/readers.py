"""Who reads each value: loops, which a compiler fuses, or kernels of their own, which want their inputs in memory.

A value that a matrix product of forward reads is written to memory whether it is saved or not, so saving it adds no
write. A value that a matrix product of backward reads has to be in memory there too: recomputing it adds a write that
recomputing something for a fused loop does not. These two facts decide most of what a default plan gains or loses.
"""

from __future__ import annotations

from dataclasses import dataclass

from .constraints import base_is_viewed
from .joint_graph import JointGraph, Role
from .op_facts import Kind

_LOOP_KINDS = frozenset(
    [Kind.POINTWISE, Kind.TRANSCENDENTAL, Kind.SLOW_TRANSCENDENTAL, Kind.GATHER, Kind.RANDOM, Kind.REDUCTION]
)


@dataclass(frozen=True, slots=True)
class Readers:
    """What kinds of nodes read a value, its views included."""

    forward_kernel: bool = False
    """In memory during forward in any case: a kernel of its own reads it, or the caller gets it."""
    backward_kernel: bool = False
    backward_loop: bool = False

    def __or__(self, other: Readers) -> Readers:
        return Readers(
            self.forward_kernel or other.forward_kernel,
            self.backward_kernel or other.backward_kernel,
            self.backward_loop or other.backward_loop,
        )


NOBODY = Readers()
_FORWARD_KERNEL = Readers(forward_kernel=True)
_BACKWARD_KERNEL = Readers(backward_kernel=True)
_BACKWARD_LOOP = Readers(backward_loop=True)


def find_readers(graph: JointGraph) -> tuple[Readers, ...]:
    """Look at every reader of every value; a view passes on what reads it."""
    readers = [NOBODY] * len(graph.nodes)
    for output in graph.forward_outputs:
        if hasattr(output, "op"):
            readers[graph.resolve(output)] |= _FORWARD_KERNEL
    for i in range(len(graph.nodes) - 1, -1, -1):
        if graph.facts[i] is None or graph.roles[i] is Role.DEAD:
            continue
        seen_as = readers[i] if base_is_viewed(graph, i) else _reading(graph, i)
        if seen_as is not NOBODY:
            for j in graph.inputs[i]:
                readers[j] |= seen_as
    return tuple(found | _FORWARD_KERNEL if _is_kernel(graph, i) else found for i, found in enumerate(readers))


def _reading(graph: JointGraph, i: int) -> Readers:
    """How a node looks to what it reads."""
    op = graph.facts[i]
    assert op is not None
    if graph.roles[i] is Role.FORWARD:
        return NOBODY if op.kind in _LOOP_KINDS or op.kind is Kind.FREE else _FORWARD_KERNEL
    return _BACKWARD_LOOP if op.kind in _LOOP_KINDS or op.kind is Kind.FREE else _BACKWARD_KERNEL


def _is_kernel(graph: JointGraph, i: int) -> bool:
    """True for the result of a kernel of its own, whose output is in memory by nature."""
    op = graph.facts[i]
    if op is None:
        return False
    if op.kind is Kind.FREE and graph.inputs[i]:
        return _is_kernel(graph, graph.inputs[i][0]) if not op.is_view else False
    return op.kind in (Kind.MATMUL, Kind.OTHER)
