"""Read off inductor's kernels what they do with memory.

Inductor makes a kernel of several loops, and a buffer of every loop's result; most buffers never leave their kernel.
Some are parts of another one (what a concatenation is put together from), some are one of several results of an op.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..torch_private import CompiledHalf, origins_of
from .kernels import Kernel, Kernels


def describe_kernels(half: CompiledHalf) -> Kernels:
    """What the kernels of one half of a step do with memory."""
    reader = _Reader(half)
    devices = [device.type for kernel in half.kernels if (device := kernel.get_device()) is not None]
    return Kernels(
        kernels=[reader.kernel(k) for k in range(len(half.kernels))],
        given={name: reader.bytes_of(value) for name, value in half.graph.graph_inputs.items()},
        returned=reader.returned,
        is_backward=bool(half.graph.is_backward),
        groups_loops=2 * devices.count("cpu") > len(devices),
    )


class _Reader:
    """Knows whose memory a buffer is in, and who makes it."""

    def __init__(self, half: CompiledHalf) -> None:
        self.kernels, self.graph, self.ir = half
        self.scheduler = self.graph.scheduler
        self.buffers: dict[str, Any] = {b.get_name(): b for kernel in self.kernels for b in kernel.get_outputs()}
        self.number = {part.get_name(): k for k, kernel in enumerate(self.kernels) for part in kernel.get_nodes()}
        """Per loop or op, the kernel it is in."""
        self.inside = {name: place for kernel in self.kernels for name, place in _places_inside(kernel)}
        """Per loop or op, where in its kernel: what is read at the place where it is made never is in memory."""
        self.returned = frozenset(self.owner(name) for name in self.graph.get_output_names())
        self.made: list[dict[str, int]] = [{} for _ in self.kernels]
        known: set[str] = set()
        for k, kernel in enumerate(self.kernels):
            for name in map(self.owner, self._leaving(k, kernel)):
                if name in self.buffers and name not in known:
                    known.add(name)
                    self.made[self._maker(name, k)][name] = self.bytes_of(self.buffers[name].node)

    def kernel(self, k: int) -> Kernel:
        """What one kernel does."""
        kernel = self.kernels[k]
        return Kernel(
            name=kernel.get_name(),
            nodes=tuple(origins_of(kernel)),
            is_loop=not kernel.is_extern() and not kernel.is_template(),
            made=self.made[k],
            used=frozenset(self._used(kernel)),
            overwritten=dict(self._overwritten(k, kernel)),
        )

    def owner(self, name: str) -> str:
        """The buffer or input whose memory a buffer is in."""
        name = self.scheduler.mutation_real_name.get(name, name)
        if name not in self.buffers:
            return name
        node = self.buffers[name].node
        if isinstance(node.get_output_spec(), self.ir.NonOwningLayout):
            return self.owner(node.get_output_spec().view.get_name())
        shared = node.get_inputs_that_alias_output()
        return self.owner(shared[0]) if shared else name

    def bytes_of(self, value: Any) -> int:
        """What a buffer or input takes: nothing if it is no tensor, or if all of it is in other buffers."""
        spec = value.maybe_get_output_spec() if hasattr(value, "maybe_get_output_spec") else None
        if spec is None or isinstance(spec, (self.ir.NoneLayout, self.ir.MultiOutputLayout)):
            return 0
        count = self.graph.sizevars.optimization_hint(value.get_numel(), fallback=0)
        return int(count) * int(value.get_dtype().itemsize)

    def _leaving(self, k: int, kernel: Any) -> Iterator[str]:
        """Buffers of a kernel that somebody else reads, or that an op makes whether it is read or not."""
        for buffer in kernel.get_outputs():
            name, place = buffer.get_name(), self.inside.get(buffer.defining_op.get_name())
            users = [part.get_name() for part in _users(buffer)]
            outside = [user for user in users if self.number.get(user) != k or self.inside.get(user) != place]
            if outside or len(kernel.get_nodes()) == 1 or self.owner(name) in self.returned:
                yield name

    def _maker(self, name: str, k: int) -> int:
        """The kernel that allocates a buffer: one of several results of an op is there once the op has run."""
        node = self.buffers[name].node
        if isinstance(node, self.ir.MultiOutput):
            parent = self.buffers.get(node.inputs[0].get_name())
            return k if parent is None else self.number[parent.defining_op.get_name()]
        return k

    def _used(self, kernel: Any) -> Iterator[str]:
        for part in kernel.get_nodes():
            yield from (self.owner(dep.name) for dep in part.read_writes.reads)
            yield from (self.owner(buffer.get_name()) for buffer in part.get_outputs())

    def _overwritten(self, k: int, kernel: Any) -> Iterator[tuple[str, str]]:
        """Which result takes the place of which input: what inductor will decide when it generates code."""
        taken: set[str] = set()
        for part in kernel.get_nodes():
            if part.is_extern() or not hasattr(part, "ancestors"):
                continue
            for name in (buffer.get_name() for buffer in part.get_outputs() if buffer.get_name() in self.made[k]):
                for read in part.read_writes.reads:
                    old = read.name
                    if old not in taken and self._may_overwrite(part, k, name, old):
                        taken.add(old)
                        yield name, old
                        break

    def _may_overwrite(self, part: Any, k: int, name: str, old: str) -> bool:
        donated = self.scheduler.name_to_donated_buffer.get(old)
        buffer = self.buffers.get(old) if donated is None else donated
        if buffer is None or self.owner(old) != old or old in self.returned or buffer.node is None:
            return False
        if isinstance(buffer.node, self.ir.NopKernel) or self._is_row(buffer, k):
            return False  # other kernels have put it together from its parts, or it is no whole buffer
        readers = [user for user in buffer.users if self.number.get(user.node.get_name(), k) >= k]
        left = [user for user in readers if user.node.get_name() not in part.ancestors]
        is_last = len(left) == 1 and left[0].node is part and left[0].can_inplace
        return is_last and self.bytes_of(buffer.node) == self.bytes_of(self.buffers[name].node)

    def _is_row(self, buffer: Any, k: int) -> bool:
        """True for what one kernel alone makes and reads row by row, in a loop over the rows around several others."""
        if buffer.defining_op is None or not _hands_on_rows(self.kernels[k]):
            return False
        return all(self.number.get(part.get_name()) == k for part in (buffer.defining_op, *_users(buffer)))


def _users(buffer: Any) -> list[Any]:
    return [user.node for user in buffer.users]


def _places_inside(kernel: Any) -> Iterator[tuple[str, int]]:
    """Number the loops that a kernel runs one after the other, for each loop or op in it."""
    is_split = hasattr(kernel, "outer_loop_fusion_depth") and not _hands_on_rows(kernel)
    for number, group in enumerate(kernel.get_outer_nodes() if is_split else [kernel]):
        for part in group.get_nodes():
            yield part.get_name(), number


def _hands_on_rows(kernel: Any) -> bool:
    """Do the loops inside a loop over rows keep what they hand each other in a buffer for one row?

    They do if all of them run over as many dimensions; otherwise it is in memory.
    """
    if not hasattr(kernel, "outer_loop_fusion_depth"):
        return False
    ranges = [
        max(group.get_nodes(), key=lambda part: part.is_reduction()).group[1] for group in kernel.get_outer_nodes()
    ]
    return all(sum(map(len, sizes)) == kernel.outer_loop_fusion_depth + 1 for sizes in ranges)
