"""A plan at other sizes than those it was made with, and what it says of sizes as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .errors import OptionError
from .expressions import evaluate
from .symbols import Origin, SizeSymbol

if TYPE_CHECKING:
    from .plan import Plan, SymbolRange

GIVEN = "given"
"""Where the value of a symbol comes from that somebody asked about."""

_MEANINGS = {"budget": "within the budget", "best": "the same decisions"}


def plan_at(plan: Plan, given: Mapping[str, int]) -> Plan:
    """The plan with bytes and peak as they are at other sizes.

    Times, and what is alive at the peak, are known for the sizes of the example only: the times stay, the rest goes.
    """
    symbols = _symbols_at(plan, given)
    values = {symbol.name: symbol.value for symbol in symbols}
    if not plan.peak.expression:
        raise OptionError("this plan's peak cannot be written down as an expression; plan again at those sizes")
    peak_bytes = evaluate(plan.peak.expression, values)
    return replace(
        plan,
        decisions=tuple(
            replace(d, num_bytes=evaluate(d.expression, values)) if d.expression else d for d in plan.decisions
        ),
        peak=replace(plan.peak, num_bytes=peak_bytes, node="", source="", alive=()),
        peak_without_recompute_bytes=None,
        shares=(),
        symbols=symbols,
    )


def plans_at(plans: Sequence[Plan], given: Mapping[str, int]) -> tuple[Plan, ...]:
    """Several plans at other sizes; a symbol has to be one of some plan's."""
    for name, value in given.items():
        if not any(name == symbol.name for plan in plans for symbol in plan.symbols):
            raise OptionError(f"{name}={value}: {_listed(plans)}")
    dynamic = [plan for plan in plans if plan.symbols]
    own = [{n: v for n, v in given.items() if n in {s.name for s in plan.symbols}} for plan in dynamic]
    return tuple(plan_at(plan, sizes) for plan, sizes in zip(dynamic, own, strict=True))


def _symbols_at(plan: Plan, given: Mapping[str, int]) -> tuple[SizeSymbol, ...]:
    known = {symbol.name: symbol for symbol in plan.symbols}
    for name, value in given.items():
        if name not in known:
            raise OptionError(f"{name}={value}: {_listed([plan])}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value}: expected a whole number from 1; {_listed([plan])}")
    values = {name: given.get(name, symbol.value) for name, symbol in known.items()}
    found = []
    for name, symbol in known.items():
        if name in given:
            found.append(replace(symbol, value=given[name], origin=GIVEN))
        else:
            value = evaluate(symbol.bound, values) if symbol.bound else symbol.value
            found.append(replace(symbol, value=value))
    return tuple(found)


def _listed(plans: Sequence[Plan]) -> str:
    symbols = {symbol.name: symbol.value for plan in plans for symbol in plan.symbols}
    if not symbols:
        return "this plan has no symbols: it was made for fixed sizes"
    return "the symbols of this plan are " + ", ".join(f"{name} (was {value})" for name, value in symbols.items())


# -------------------------------------------------------------------------------------------------- text


def sizes_text(plan: Plan) -> str:
    """`s0=4, s1=256`."""
    return ", ".join(f"{symbol.name}={symbol.value}" for symbol in plan.symbols)


def size_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a plan says of its sizes, as titles and texts; nothing if all of them are numbers."""
    for symbol in plan.symbols:
        bound = f" {symbol.bound}" if symbol.bound else ""
        how = symbol.origin + bound if symbol.origin == Origin.BOUND.value else symbol.origin
        yield "size", f"{symbol.name} = {symbol.value} ({how})"
    if plan.peak.expression:
        mebibytes = f"{plan.peak.num_bytes / 2**20:.2f} MiB"
        yield "peak in general", f"{plan.peak.expression} bytes, {mebibytes} at {sizes_text(plan)}"
    elif plan.symbols:
        yield "peak in general", "cannot be written down as an expression"
    for found in plan.ranges:
        yield _MEANINGS[found.meaning], range_text(found)
    if plan.guards:
        yield "planned again", "unless " + " and ".join(plan.guards)


def range_text(found: SymbolRange) -> str:
    """`s0 from 2 to 512 (proved)`."""
    end = "on" if found.high is None else f"to {found.high}"
    return f"{found.symbol} from {found.low} {end} ({'proved' if found.is_proved else 'sampled'})"
