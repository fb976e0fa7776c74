"""Declared against observed: run one real step, and set its measured peak beside the predicted one.

Eager code and graphs that run node by node are counted op by op. Kernels that inductor compiles allocate out of the
dispatcher's sight; there the allocator's record gives the peak, and the variables of the generated code give names.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...eager import is_recomputing, local, watched_names
from ...passes.plans import Plan
from ...passes.shared import OptionError, is_users
from ..data import GraphReport, NodeRow, collected, printable, short_source, size
from ..report import Report
from .counting import (
    MemoryEvent,
    MemoryLog,
    Peak,
    alive_at_peak,
    gc_disabled,
    record_by_allocator,
    record_by_dispatch,
    summarise,
)
from .generated import buffer_of, buffers_marked

NUM_SHOWN = 15
"""How many of the values alive at the peak are printed."""

_ASSIGNMENT = re.compile(r"\s*(?P<name>\w+)(?::[^=]*)? = ")
_GENERATED = "<eval_with_key>"
"""File name of the code that FX generates for graphs."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One stretch of memory that was alive at the measured peak."""

    num_bytes: int
    op: str
    """The op that allocated it; empty where the allocator's record is all there is."""
    node: str = ""
    """The node of a compiled graph; empty in eager code."""
    label: str = ""
    """What `remat.name` called it."""
    region: str = ""
    source: str = ""
    is_recomputed: bool = False

    def __str__(self) -> str:
        what = " ".join(part for part in (self.node, f'"{self.label}"' if self.label else "", self.op) if part)
        notes = ["recomputed" if self.is_recomputed else "", f"region {self.region}" if self.region else ""]
        notes = [note for note in (*notes, short_source(self.source)) if note]
        return printable(f"{size(self.num_bytes):>11}  {what or 'unknown'}{'  ' if notes else ''}{', '.join(notes)}")


@dataclass(frozen=True, slots=True)
class Observation:
    """What one real step held, beside what was predicted."""

    measured: Peak
    alive: tuple[Observed, ...]
    """What was alive at the measured peak, largest first."""
    plans: tuple[Plan, ...]
    """The plans behind the step, if remat compiled it."""
    counter: str
    """How it was counted: "dispatch" or "allocator"."""

    @property
    def predicted_bytes(self) -> int | None:
        """The predicted activation peak; None without a plan, or with several, whose peaks are not one step's."""
        return self.plans[0].peak.num_bytes if len(self.plans) == 1 else None

    def __str__(self) -> str:
        lines = [
            f"measured peak   {size(self.measured.activation_bytes):>11}  ({_COUNTED[self.counter]})",
            *self._predictions(),
            f"after forward   {size(self.measured.forward_end_bytes):>11}",
            f"gradients       {size(self.measured.gradient_bytes):>11}  (not part of the peaks)",
            "alive at the measured peak:",
            *(f"  {value}" for value in self.alive[:NUM_SHOWN]),
        ]
        rest = self.alive[NUM_SHOWN:]
        if rest:
            lines.append(f"  {size(sum(v.num_bytes for v in rest)):>11}  in {len(rest)} smaller ones")
        return "\n".join(lines)

    def _predictions(self) -> Iterator[str]:
        for number, plan in enumerate(self.plans):
            note = f"of graph {number}, " if len(self.plans) > 1 else ""
            if self.predicted_bytes is not None:
                note = f"measured is {self.measured.activation_bytes / max(self.predicted_bytes, 1):.3f} of it, "
            yield f"predicted peak  {size(plan.peak.num_bytes):>11}  ({note}for {plan.peak.executor})"
        if not self.plans:
            yield f"predicted peak  {'-':>11}  (eager, or compiled before this; give report= to compare)"


_COUNTED = {"dispatch": "counted op by op", "allocator": "by the allocator's record"}


def observe(step: Callable[..., Any], *args: Any, report: Report | None = None, **kwargs: Any) -> Observation:
    """Run a training step and report its predicted and its measured activation peak.

    `step(*args, **kwargs)` returns the loss; backward is run here. The step runs twice, first to compile and to find
    the leaves whose gradients are its result; gradients that were there before are put back. Plans are those that
    `backend="remat"` makes in the first run, or those of `report` if the step was compiled before.
    """

    def forward() -> torch.Tensor:
        return _loss(step(*args, **kwargs))

    with collected() as graphs:
        loss = forward()
        leaves = _leaves(loss)
        with _gradients_put_aside(leaves):
            loss.backward()  # type: ignore[no-untyped-call]
    del loss
    found = tuple(graphs) if report is None else report.graphs
    with _gradients_put_aside(leaves):
        return _measured(forward, leaves, found)


def _loss(result: Any) -> torch.Tensor:
    if not isinstance(result, torch.Tensor) or not result.requires_grad or result.numel() != 1:
        shown = (
            f"a tensor of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        )
        raise OptionError(
            f"observe: the step returned {shown}; it must return the loss, one number that needs a gradient, "
            "and leave backward to observe"
        )
    return result


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose gradients a backward from here fills, in the order in which they are met."""
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.setdefault(id(node.variable), node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return list(found.values())


@contextmanager
def _gradients_put_aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def _measured(
    forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], graphs: Sequence[GraphReport]
) -> Observation:
    plans = tuple(graph.plan for graph in graphs)
    origins = _Origins(graphs)
    with gc_disabled(), watched_names(origins.note_name):
        if any(plan.peak.executor == "inductor" for plan in plans):
            log, counter = _counted_by_allocator(forward, leaves, origins), "allocator"
        else:
            log, counter = _counted_by_op(forward, leaves, origins)
    alive = [origins.of(number, num_bytes) for number, num_bytes in alive_at_peak(log).items()]
    alive.sort(key=lambda value: -value.num_bytes)
    return Observation(summarise(log), tuple(alive), plans, counter)


def _counted_by_op(
    forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], origins: _Origins
) -> tuple[MemoryLog, str]:
    """Count op by op, or by the allocator if something turns out to allocate out of sight."""
    try:
        return record_by_dispatch(origins.watching(forward), leaves, origins.note), "dispatch"
    except RuntimeError as error:
        if 'counter="allocator"' not in str(error):
            raise
    origins.known.clear()
    for leaf in leaves:
        leaf.grad = None
    return _counted_by_allocator(forward, leaves, origins), "allocator"


def _counted_by_allocator(
    forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], origins: _Origins
) -> MemoryLog:
    with buffers_marked():
        return record_by_allocator(forward, leaves, origins.note_buffer)


class _Origins:
    """Where each storage of a step came from."""

    def __init__(self, graphs: Sequence[GraphReport]) -> None:
        self.rows = {name: row for graph in graphs for name, row in graph.row.items()}
        self.runs_again = any(n > 1 for graph in graphs for n in graph.num_runs_in_backward.values())
        self.in_backward = False
        self.known: dict[int, Observed] = {}
        self.numbers: dict[int, int] = {}
        """By identity of storage objects; one that is used again after its object has died is noted again."""

    def watching(self, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The same forward, after which backward begins."""

        def run() -> torch.Tensor:
            self.in_backward = False
            self.known.clear()
            loss = forward()
            self.in_backward = True
            return loss

        return run

    def note(self, number: int, op: Any, storage: torch.UntypedStorage) -> None:
        """Note which op allocates a storage, and for whom: told while the op returns."""
        self.numbers[id(storage)] = number
        node, source = _running()
        execution = local.execution
        frame = None if execution is None else execution.frame
        region = "" if frame is None else "/".join(frame.names)
        row = self._row(node, op)
        if row is None:
            self.known[number] = Observed(0, str(op), node, "", region, source, is_recomputing())
            return
        again = self.in_backward and row.role == "FORWARD"
        self.known[number] = Observed(0, str(op), node, row.label, row.region, row.source, again)

    def _row(self, node: str, op: Any) -> NodeRow | None:
        """The node of the joint graph that is running, if its name can be trusted.

        Backward's copies of a node have its name with a number, which may be another node's name.
        """
        row = self.rows.get(node)
        if row is None or row.op != str(op) or (self.in_backward and self.runs_again):
            return None
        return row

    def note_buffer(self, mark: str, live: Mapping[int, MemoryEvent]) -> None:
        """Note which variable of generated code holds a storage; the last name counts, which backward gives."""
        found = buffer_of(mark)
        if found is None or found[0] not in live:
            return
        number, buffer = live[found[0]].storage, found[1]
        row = self.rows.get(buffer.name)
        if row is None:
            before = self.known.get(number, Observed(0, ""))
            named = replace(before, node=buffer.name, op=before.op or buffer.op)
            self.known[number] = before if before.source else named
        else:
            self.known[number] = Observed(0, row.op, buffer.name, row.label, row.region, row.source)

    def note_name(self, tensor: torch.Tensor, label: str) -> None:
        """Note what the program calls a value in eager code."""
        number = self.numbers.get(id(tensor.untyped_storage()))
        if number is not None:
            self.known[number] = replace(self.known[number], label=label)

    def of(self, number: int, num_bytes: int) -> Observed:
        """Say what a storage is."""
        return replace(self.known.get(number, Observed(0, "")), num_bytes=num_bytes)


def _running() -> tuple[str, str]:
    """The node of a compiled graph that is running, and the user's line; either may be empty."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code is not _measured.__code__:
        file = frame.f_code.co_filename
        if file.startswith(_GENERATED):
            match = _ASSIGNMENT.match(linecache.getline(file, frame.f_lineno))
            return ("" if match is None else match["name"]), ""
        if is_users(file):
            return "", f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "", ""
