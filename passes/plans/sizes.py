"""A plan at other sizes than those it was made with, and what it says of sizes as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ..shared import OptionError, size
from ..sizes import Origin, SizeSymbol, evaluate, evaluate_real, rounded
from .contents import Decision, PlanContents, SymbolRange

P = TypeVar("P", bound=PlanContents)

TICKS_PER_SECOND = 10**9
"""Times are expressions of nanoseconds."""

GIVEN = "given"
"""Where the value of a symbol comes from that somebody asked about."""


def plan_at(plan: P, given: Mapping[str, int]) -> P:
    """The plan with bytes, peak and times as they are at other sizes.

    What is alive at the peak is known for the sizes of the example only, and goes. So are the times of a cost model
    that measures; they stay, and the plan says so.
    """
    symbols = _symbols_at(plan, given)
    values = {symbol.name: symbol.value for symbol in symbols}
    if not plan.peak.expression:
        raise OptionError("this plan's peak cannot be written down as an expression; plan again at those sizes")
    peak_bytes = evaluate(plan.peak.expression, values)
    return replace(
        plan,
        decisions=tuple(_decision_at(d, values) for d in plan.decisions),
        peak=replace(plan.peak, num_bytes=peak_bytes, node="", source="", alive=()),
        peak_without_recompute_bytes=None,
        extra_seconds=None,
        least_extra_seconds=None,
        shares=(),
        symbols=symbols,
        forward_seconds=_forward_seconds(plan, values),
    )


def _decision_at(decision: Decision, values: Mapping[str, int]) -> Decision:
    """A decision with its bytes and prices at other sizes; prices are whole nanoseconds, as the planner has them."""
    num_bytes, save, recompute = decision.num_bytes, decision.save_seconds, decision.recompute_seconds
    if decision.expression:
        num_bytes = evaluate(decision.expression, values)
    if decision.save_expression and save:  # keeping a tensor is never free, whatever its size
        save = max(1, round(evaluate_real(decision.save_expression, values))) / TICKS_PER_SECOND
    if decision.recompute_expression:
        recompute = round(evaluate_real(decision.recompute_expression, values)) / TICKS_PER_SECOND
    return replace(decision, num_bytes=num_bytes, save_seconds=save, recompute_seconds=recompute)


def _forward_seconds(plan: PlanContents, values: Mapping[str, int]) -> float | None:
    if plan.times is None or not plan.times.forward:
        return plan.forward_seconds
    return evaluate_real(plan.times.forward, values) / TICKS_PER_SECOND


def plans_at(plans: Sequence[P], given: Mapping[str, int]) -> tuple[P, ...]:
    """Several plans at other sizes; a symbol has to be one of some plan's."""
    for name, value in given.items():
        if not any(name == symbol.name for plan in plans for symbol in plan.symbols):
            raise OptionError(f"{name}={value}: {_listed(plans)}")
    dynamic = [plan for plan in plans if plan.symbols]
    own = [{n: v for n, v in given.items() if n in {s.name for s in plan.symbols}} for plan in dynamic]
    return tuple(plan_at(plan, sizes) for plan, sizes in zip(dynamic, own, strict=True))


def _symbols_at(plan: PlanContents, given: Mapping[str, int]) -> tuple[SizeSymbol, ...]:
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


def _listed(plans: Sequence[PlanContents]) -> str:
    symbols = {symbol.name: symbol.value for plan in plans for symbol in plan.symbols}
    if not symbols:
        return "this plan has no symbols: it was made for fixed sizes"
    return "the symbols of this plan are " + ", ".join(f"{name} (was {value})" for name, value in symbols.items())


# -------------------------------------------------------------------------------------------------- text


def sizes_text(plan: PlanContents) -> str:
    """`s0=4, s1=256`."""
    return ", ".join(f"{symbol.name}={symbol.value}" for symbol in plan.symbols)


def size_lines(plan: PlanContents) -> Iterator[tuple[str, str]]:
    """What a plan says of its sizes, as titles and texts; nothing if all of them are numbers."""
    for symbol in plan.symbols:
        bound = f" {symbol.bound}" if symbol.bound else ""
        how = symbol.origin + bound if symbol.origin == Origin.BOUND.value else symbol.origin
        yield "size", f"{symbol.name} = {symbol.value} ({how})"
    if plan.peak.expression:
        yield "peak in general", f"{plan.peak.expression} bytes, {size(plan.peak.num_bytes)} at {sizes_text(plan)}"
    elif plan.symbols:
        yield "peak in general", "cannot be written down as an expression"
    yield from _time_lines(plan)
    for found in plan.ranges:
        yield "within the budget", range_text(found)
    if plan.guards:
        most = "" if plan.most_ranges is None else f"; at most {plan.most_ranges} plans for all sizes"
        yield "planned again", "unless " + " and ".join(plan.guards) + most


def general_text(decision: Decision) -> str:
    """What a decision is about at any sizes: `128*s0 bytes, keep 0.25*s0 ns, run again 3*s0 ns`."""
    parts = (
        (decision.expression, "{} bytes"),
        (decision.save_expression, "keep {} ns"),
        (decision.recompute_expression, "run again {} ns"),
    )
    return ", ".join(form.format(rounded(text)) for text, form in parts if text)


def _time_lines(plan: PlanContents) -> Iterator[tuple[str, str]]:
    if not plan.symbols:
        return
    if plan.times is None:
        yield "times", "those of the example's sizes"
        return
    seconds = {"recompute": plan.recompute_seconds, "forward": plan.forward_seconds or 0.0}
    for name, text in (("recompute", plan.times.recompute), ("forward", plan.times.forward)):
        if text:
            yield f"{name} time", f"{rounded(text)} ns, {1e3 * seconds[name]:.3g} ms at {sizes_text(plan)}"
    if plan.times.note:
        yield "times", plan.times.note


def range_text(found: SymbolRange) -> str:
    """`s0 from 2 to 512 (proved)`."""
    end = "on" if found.high is None else f"to {found.high}"
    how = "proved" if found.is_proved else f"sampled at {', '.join(map(str, found.sampled))}"
    return f"{found.symbol} from {found.low} {end} ({how})"
