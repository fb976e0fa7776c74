"""`remat.name`: call a value something, so that policies and dumps can speak of it."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import torch
import torch.fx as fx

from ..eager import note_name
from ..passes.shared import OptionError, RematError
from ..passes.torch_private import HigherOrderOperator, constant_in_graphs, is_faking, trace_as_wrapper, tracer
from .trace import note_traced_name

T = TypeVar("T", bound=torch.Tensor)


def name(x: T, label: str) -> T:
    """Return `x` itself, named: `h = remat.name(h, "attn_out")`.

    The policy of the region around is asked about it as `fn(ctx, op, x, "attn_out")`, where `op` is
    `remat.passes.ops.name_op()`, and what it answers holds for the value, whatever it said of the op that
    made it. PREFER_RECOMPUTE is what policies say of what they do not know, and changes nothing.
    """
    if torch.compiler.is_dynamo_compiling():
        return _operator_of(label)(_itself, x)  # type: ignore[no-any-return]
    _check(x, label)
    if tracer() is not None:
        note_traced_name(x, label)
        return x
    return note_name(x, label)


def _check(x: Any, label: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise OptionError(f"remat.name names a tensor, not {type(x).__name__}")
    if not isinstance(label, str) or not label:
        raise OptionError(f'remat.name(x, {label!r}): a name is a text that is not empty, such as "attn_out"')


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


class NameOperator(HigherOrderOperator):
    """Carries a name through Dynamo. Its body is an identity that nobody runs."""

    def __init__(self, operator_name: str, label: str) -> None:
        super().__init__(operator_name, cacheable=True)  # type: ignore[no-untyped-call]
        self.label = label

    def __call__(self, body: Any, /, *args: Any) -> Any:
        """Note the name, and return the value as the body does. Its sizes come along where they are dynamic."""
        (x,) = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if tracer() is not None:
            note_traced_name(x, self.label)
        elif not is_faking():
            x = note_name(x, self.label)
        return (x,) if isinstance(body, fx.GraphModule) else x


_operators: dict[str, NameOperator] = {}


@constant_in_graphs
def _operator_of(label: str) -> NameOperator:
    """The operator of a name, known to Dynamo, which calls this while it traces."""
    if label not in _operators:
        _check(torch.empty(0), label)
        operator = NameOperator(f"remat_name_{_identifier(label)}", label)
        if not trace_as_wrapper(operator):
            raise RematError("remat.name: this version of torch cannot carry names into graphs")
        _operators[label] = operator
    return _operators[label]


def _identifier(label: str) -> str:
    """The label as an identifier that no other label has."""
    return re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", label.replace("_", "__"))
