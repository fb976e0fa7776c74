"""Names for what inductor's generated code allocates.

Its kernels run out of the dispatcher's sight, but the Python function that calls them keeps every buffer in a variable:
saved values under the names that they have in the joint graph, temporaries as `buf0`, `buf1`, ... While a step is
measured, each line of such a function is followed and leaves a mark in the profiler's record that says which address a
variable got. What runs on another thread (backward, with an accelerator) is not followed.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.profiler import record_function

MARK = "remat: buffer "
_ASSIGNED = re.compile(r"\s*(?P<names>\w+(?:, \w+)*,?) = ")
_CALL = re.compile(r"\s*(?:\w+ = )?(?P<function>[\w.]+)\(")
_ALLOCATION = re.compile(r"\s*\w+ = (?:empty_strided\w*|reinterpret_tensor)\(")
_NOT_WORK = ("assert_size_stride", "assert_alignment", "del", "return")
_ORIGINAL = re.compile(r"Original ATen: \[(?P<ops>[^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A variable of generated code."""

    name: str
    op: str
    """The kernel or op that is called with it first; empty for what the function is given."""


@contextmanager
def buffers_marked() -> Iterator[None]:
    """Follow generated code, and leave a mark for each tensor that a variable of it gets."""
    before = sys.gettrace()
    if before is not None:  # a debugger or a coverage tool: names are worth less than that
        yield
        return
    sys.settrace(_trace)
    try:
        yield
    finally:
        sys.settrace(before)


def buffer_of(mark: str) -> tuple[int, Buffer] | None:
    """Read a mark: the address, and what is there; None for anything else in the record."""
    if not mark.startswith(MARK):
        return None
    address, name, op = mark[len(MARK) :].split(" ", 2)
    return int(address), Buffer(name, op)


def _trace(frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG001 (the protocol of sys.settrace)
    is_generated = frame.f_code.co_name == "call" and "extern_kernels" in frame.f_globals
    return _Follower(frame.f_code.co_filename) if is_generated else None


class _Follower:
    """Follows one call of a generated function line by line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.assigned: tuple[str, ...] = ()
        self.line_number = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _Follower:  # noqa: ARG002 (as above)
        """Mark what the line before this event assigned."""
        # Asked for after every line: the frame keeps what it gave last, which must not outlive the line's own `del`.
        variables = frame.f_locals
        for name in self.assigned:
            value = variables.get(name)
            if isinstance(value, torch.Tensor):
                op = _first_use(self.file, name, self.line_number) if name.startswith("buf") else ""
                with record_function(f"{MARK}{value.untyped_storage().data_ptr()} {name} {op}"):
                    pass
        self.line_number = frame.f_lineno
        match = _ASSIGNED.match(linecache.getline(self.file, frame.f_lineno)) if event == "line" else None
        self.assigned = () if match is None else tuple(match["names"].rstrip(",").split(", "))
        return self


def _first_use(file: str, name: str, line_number: int) -> str:
    """The call that fills a buffer: the one of the line itself, or the first that is handed it."""
    lines = linecache.getlines(file)
    mentions = re.compile(rf"\b{name}\b")
    for index in range(line_number - 1, len(lines)):
        line = lines[index]
        call = _CALL.match(line)
        if call is None or not mentions.search(line) or _ALLOCATION.match(line) or call["function"] in _NOT_WORK:
            continue
        original = _ORIGINAL.search(lines[index - 1])
        return call["function"] if original is None else original["ops"].rsplit(", ")[-1]
    return ""
