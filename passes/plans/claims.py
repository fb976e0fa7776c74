"""What a stored plan says twice is said alike, and what it says in expressions can be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..shared.fields import Damaged, refused
from ..sizes.expressions import evaluate, evaluate_real, is_relation

if TYPE_CHECKING:
    from .plan import Plan

EXECUTORS = ("inductor", "node by node")

UNREADABLE = (ValueError, OverflowError, RecursionError, MemoryError)
"""What evaluating an expression raises that remat has not written."""


def check_claims(plan: Plan) -> None:
    """Check what types do not say of a plan's fields; raise what names the first that is wrong."""
    _check_names(plan)
    _check_words(plan)
    if plan.symbols:  # format 2 had none, so that nothing could be evaluated
        _check_expressions(plan, {symbol.name: symbol.value for symbol in plan.symbols})
    for k, guard in enumerate(plan.guards):
        if not is_relation(guard):
            raise refused(f"guards[{k}]", guard, "a relation between sizes, such as 's0 <= 512'")


def _check_expressions(plan: Plan, values: Mapping[str, int]) -> None:
    """Expressions can be evaluated, and make what is stated beside them."""
    for path, text, num_bytes in _byte_claims(plan):
        found = _value(path, text, values)
        if found != num_bytes:
            raise Damaged(f"{path} is {text!r}, which makes {found} bytes, but num_bytes beside it is {num_bytes}")
    for path, text in _time_claims(plan):
        _check_real(path, text, values)


def _check_names(plan: Plan) -> None:
    """Nothing is decided twice, and no symbol is described twice."""
    for path, names in (("decisions", [d.value for d in plan.decisions]), ("symbols", [s.name for s in plan.symbols])):
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            places = " and ".join(f"{path}[{k}]" for k, name in enumerate(names) if name == twice)
            raise Damaged(f"{places} are about the same {twice!r}, expected one entry for each")


def _check_words(plan: Plan) -> None:
    """Fields that hold one of a few words, or a symbol's name."""
    if plan.peak.executor not in EXECUTORS:
        raise refused("peak.executor", plan.peak.executor, " or ".join(map(repr, EXECUTORS)))
    symbols = [symbol.name for symbol in plan.symbols]
    for k, found in enumerate(plan.ranges):
        if found.symbol not in symbols:
            raise refused(f"ranges[{k}].symbol", found.symbol, f"one of the plan's symbols, {', '.join(symbols)}")


def _byte_claims(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Bytes that are stated as an expression and as a number."""
    if plan.peak.expression:
        yield "peak.expression", plan.peak.expression, plan.peak.num_bytes
    for k, decision in enumerate(plan.decisions):
        if decision.expression:
            yield f"decisions[{k}].expression", decision.expression, decision.num_bytes


def _time_claims(plan: Plan) -> Iterator[tuple[str, str]]:
    """Where expressions are that need not make whole numbers."""
    for k, decision in enumerate(plan.decisions):
        yield f"decisions[{k}].save_expression", decision.save_expression
        yield f"decisions[{k}].recompute_expression", decision.recompute_expression
    if plan.times is not None:
        yield "times.forward", plan.times.forward
        yield "times.recompute", plan.times.recompute
        yield "times.keep", plan.times.keep
    for k, symbol in enumerate(plan.symbols):
        yield f"symbols[{k}].bound", symbol.bound


def _value(path: str, text: str, values: Mapping[str, int]) -> int:
    try:
        return evaluate(text, values)
    except UNREADABLE as error:
        raise Damaged(f"{path} cannot be evaluated: {error}") from error


def _check_real(path: str, text: str, values: Mapping[str, int]) -> None:
    if not text:
        return
    try:
        evaluate_real(text, values)
    except UNREADABLE as error:
        raise Damaged(f"{path} cannot be evaluated: {error}") from error
