"""Debug mode: every op of a forward and of its recomputation, and where it was called, for the error."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from remat.passes.torch_private import TorchDispatchMode, tree_map

from ...passes.shared import is_users
from ..types import CheckpointError

_MAX_STACK = 12  # lines of user code that are printed per op


@dataclass(slots=True)
class OpLog:
    """The ops of one run, as text, each with the user's stack."""

    ops: list[str] = field(default_factory=list)
    stacks: list[list[str]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    def name(self, tensor: torch.Tensor) -> str:
        """Number a tensor by first appearance."""
        return self.names.setdefault(id(tensor), f"${len(self.names)}")


class _LoggingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, log: OpLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = _call_text(self._log, func, args, kwargs)
        out = func(*args, **kwargs)
        self._log.ops.append(f"{_result_text(self._log, out)} = {call}")
        self._log.stacks.append(_user_stack())
        return out


def _describe(log: OpLog, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{log.name(tensor)}: {dtype}{list(tensor.shape)}"


def _call_text(log: OpLog, func: Any, args: Any, kwargs: Any) -> str:
    shown = tree_map(lambda x: _Text(log.name(x)) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    parts = [repr(a) for a in shown[0]] + [f"{k}={v!r}" for k, v in shown[1].items()]
    return f"torch.ops.{func}({', '.join(parts)})"


def _result_text(log: OpLog, out: Any) -> str:
    return repr(tree_map(lambda x: _Text(_describe(log, x)) if isinstance(x, torch.Tensor) else x, out))


class _Text(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _user_stack() -> list[str]:
    frames = [f for f in traceback.extract_stack() if is_users(f.filename)]
    return [f"{f.filename}:{f.lineno}:{f.name}" for f in frames[-_MAX_STACK:]]


class DebugLogs:
    """The two logs of one call of a region, and the error made from them."""

    def __init__(self) -> None:
        self.forward = OpLog()
        self.recompute = OpLog()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Log the forward."""
        return _LoggingMode(self.forward)

    @contextmanager
    def recompute_context(self) -> Iterator[None]:
        """Log a recomputation; an earlier one is forgotten."""
        self.recompute = OpLog()
        with _LoggingMode(self.recompute):
            yield

    def explain(self, error: CheckpointError) -> CheckpointError:
        """Return an error that shows both runs."""
        return CheckpointError(
            f"{error}\n\n"
            "You are seeing this error because you passed `debug=True` to checkpoint and the tensors saved "
            "in the "
            "original forward differ from those saved in the recomputation.\n\n"
            f"{self._first_difference()}\n"
            f"Operations executed during the original forward:\n{_listing(self.forward)}\n"
            f"Operations executed during recomputation:\n{_listing(self.recompute)}\n"
            '(Differences in "detach" calls are the mechanism\'s own.)'
        )

    def _first_difference(self) -> str:
        forward, recompute = _without_detach(self.forward), _without_detach(self.recompute)
        for number, (a, b) in enumerate(zip_longest(forward, recompute)):
            if a is None or b is None or a[0] != b[0]:
                return (
                    f"First op that differs, number {number}:\n  forward:   {_op_line(a)}\n  recompute: {_op_line(b)}\n"
                )
        return "Both runs executed the same ops as far as the recomputation went.\n"


def _without_detach(log: OpLog) -> list[tuple[str, list[str]]]:
    shown = []
    for op, stack in zip(log.ops, log.stacks, strict=True):
        if "aten.detach" not in op:
            # Numbers of tensors shift with every detach; what was run on which shapes does not.
            shown.append((_anonymous(op), stack))
    return shown


def _anonymous(op: str) -> str:
    return "".join(part.lstrip("0123456789") if i else part for i, part in enumerate(op.split("$")))


def _op_line(op: tuple[str, list[str]] | None) -> str:
    if op is None:
        return "(no op: this run had ended)"
    return f"{op[0]}   at {op[1][-1] if op[1] else 'an unknown line'}"


def _listing(log: OpLog) -> str:
    total = len(log.ops)
    lines = []
    for number, (op, stack) in enumerate(zip(log.ops, log.stacks, strict=True), start=1):
        lines.append(f"{op}   ({number} of {total})")
        lines.extend(f"    {line}" for line in stack)
    return "\n".join(lines) + "\n"
