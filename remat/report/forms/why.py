"""The chain of reasons for one value: what was allowed, what each choice costs, and what would turn the decision.

The other choice is worked out on the report's own data: flip one value, and compare what is kept and what is run again.
To keep a value leaves out runs of the schedule; to recompute one, walk from backward's readers up to what is at hand.
That is the price the cut compares; a budget adds a price per byte to it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...passes.graph import Reason
from ...passes.plans import Action, Decision, general_text
from ...passes.shared import OptionError
from ..data import FORWARD_ROLES, PAST, GraphReport, NodeRow, duration, printable, short_source, size

NUM_SHOWN = 5
"""How many values of one name, or names in one line, are printed."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The decision that was not taken."""

    action: Action
    obstacle: str
    """Why it is not allowed; empty if it is."""
    extra_seconds: float
    """What it would add to the step."""
    extra_bytes: int
    """What it would add to the bytes that are kept."""
    also_recomputed: tuple[str, ...]
    """Values that would be recomputed because of it."""
    no_longer_saved: tuple[str, ...]
    """Saved values that backward would not need any more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Why one value of one graph got its decision."""

    graph: int
    value: str
    decision: Decision | None
    """None for what backward does not need, or has anyway."""
    reasons: tuple[str, ...]
    alternative: Alternative | None

    def __str__(self) -> str:
        return "\n".join(printable(line) for line in self.reasons)


@dataclass(frozen=True, slots=True)
class Why:
    """The answers for everything that has a name."""

    asked: str
    answers: tuple[Answer, ...]

    def __str__(self) -> str:
        shown = [str(answer) for answer in self.answers[:NUM_SHOWN]]
        if len(self.answers) > NUM_SHOWN:
            shown.append(f"… and {len(self.answers) - NUM_SHOWN} more values of this name, in `.answers`")
        return "\n\n".join(shown)


def why(graphs: Sequence[GraphReport], asked: str) -> Why:
    """Find the values of a name and say why each got its decision."""
    if not isinstance(asked, str):
        raise OptionError(f"why({asked!r}): expected a node, or the name of a value")
    found = [(number, row) for number, graph in enumerate(graphs) for row in _named(graph, asked)]
    if not found:
        known = dict.fromkeys(n for graph in graphs for row in graph.nodes for n in (row.label, row.name) if n)
        near = difflib.get_close_matches(asked, list(known), n=3)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise OptionError(f"why({asked!r}): no graph of this report has a value of that name.{hint}")
    answers: dict[tuple[int, str], Answer] = {}
    for number, row in found:
        answer = _answer(graphs[number], number, row)
        answers.setdefault((number, answer.value), answer)  # a value and its views carry the same name
    return Why(asked, tuple(answers.values()))


def _named(graph: GraphReport, asked: str) -> list[NodeRow]:
    """The node of that name, or all values that the program called so."""
    if asked in graph.row:
        return [graph.row[asked]]
    return [row for row in graph.nodes if row.label == asked]


def _answer(graph: GraphReport, number: int, row: NodeRow) -> Answer:
    base = graph.row.get(row.base or row.same_as, row)
    if row.same_as != row.name:
        base = graph.row[graph.row[row.same_as].base or row.same_as]
    decision = graph.decision.get(base.name)
    alternative = _alternative(graph, base, decision) if decision is not None else None
    lines = [*_headline(graph, row, base, decision), *_verdict(graph, base, decision, alternative)]
    return Answer(number, base.name, decision, tuple(lines), alternative)


def _headline(graph: GraphReport, row: NodeRow, base: NodeRow, decision: Decision | None) -> Iterator[str]:
    label = f' ("{row.label}")' if row.label else ""
    state = "nothing to decide" if decision is None else graph.state_of(base.name)
    yield f"{row.name}{label}: {state}"
    yield f"  {row.op}  {row.value}, {size(row.num_bytes)}"
    origin = [f"region {row.region}" if row.region else "", f"module {row.module}" if row.module else ""]
    origin = [part for part in (*origin, short_source(row.source)) if part]
    if origin:
        yield f"  from {', '.join(origin)}"
    if row.same_as != row.name:
        yield f"  computes the same as {row.same_as}, which stands for it"
    elif base.name != row.name:
        yield f"  a view of {base.name}, which is what is decided on"


def _verdict(
    graph: GraphReport, row: NodeRow, decision: Decision | None, alternative: Alternative | None
) -> Iterator[str]:
    if decision is None or alternative is None:
        yield f"  {_undecided(row)}"
        return
    yield f"  because: {decision.reason.value}"
    yield from _constraints(row, decision)
    yield f"  price of keeping it: {duration(row.save_seconds)}, {size(row.num_bytes)} until backward has read it"
    runs = f", run {decision.num_recomputes} times" if decision.num_recomputes > 1 else ""
    yield f"  price of running it again: {duration(row.recompute_seconds)}{runs}"
    general = general_text(decision)
    if general:
        yield f"  at other sizes: {general}"
    yield from _other_choice(alternative)
    yield from _what_would_change(graph, row, decision, alternative)


def _undecided(row: NodeRow) -> str:
    if row.role in ("INPUT", "CONSTANT"):
        return "an input, parameter or constant: backward has it anyway, so keeping it costs nothing"
    if row.role == "BACKWARD_INPUT":
        return "given to backward by its caller"
    if row.role == "BACKWARD":
        return "computed by backward from a gradient: it cannot exist earlier"
    if row.role == "DEAD":
        return "nothing needs it: neither graph computes it"
    if not row.base:
        return "a number that both graphs know"
    return "backward needs neither it nor anything that is recomputed from it: it lives in forward only"


def _constraints(row: NodeRow, decision: Decision) -> Iterator[str]:
    if row.policy:
        yield f"  the region's policy answered {row.policy}"
    if row.prefers:
        yield f"  preference: {row.prefers}; under a budget that is a price, not an order"
    if row.no_save and decision.reason.value != row.no_save:
        yield f"  may not be saved: {row.no_save}"
    if row.no_recompute and decision.reason.value != row.no_recompute:
        yield f"  may not be recomputed: {row.no_recompute}"


def _other_choice(other: Alternative) -> Iterator[str]:
    if other.obstacle:
        return
    verb = "keeping" if other.action is Action.SAVE else "recomputing"
    sign = "adds" if other.extra_seconds >= 0 else "takes"
    yield (
        f"  {verb} it instead {sign} {duration(abs(other.extra_seconds))} "
        f"{'to' if sign == 'adds' else 'off'} the step, and changes what is kept by "
        f"{'-' if other.extra_bytes < 0 else '+'}{size(abs(other.extra_bytes))}"
    )
    if other.also_recomputed:
        yield f"    it would also recompute {_listed(other.also_recomputed)}"
    if other.no_longer_saved:
        yield f"    backward would not need {_listed(other.no_longer_saved)} any more"


def _what_would_change(graph: GraphReport, row: NodeRow, decision: Decision, other: Alternative) -> Iterator[str]:
    verb = PAST[other.action]
    if other.obstacle:
        yield f"  for it to be {verb}: {other.obstacle}"
        return
    plan, at_peak = graph.plan, graph.timeline.alive_at(graph.timeline.peak_moment)
    is_at_peak = any(memory.node == row.name for memory in at_peak)
    if other.action is Action.RECOMPUTE:
        yield f"  for it to be {verb}: {_dearer(other, is_at_peak, plan.peak.num_bytes)}"
    else:
        yield f"  for it to be {verb}: {_cheaper(row, decision, other, plan.budget_bytes)}"


def _dearer(other: Alternative, is_at_peak: bool, peak_bytes: int) -> str:
    """What would make recomputing a kept value pay."""
    if is_at_peak:
        press = f"it is alive at the predicted peak, so a memory_budget below {size(peak_bytes)} presses on it"
    else:
        press = "it is not alive at the predicted peak, so only a far lower memory_budget would press on it"
    if other.extra_bytes >= 0 or other.extra_seconds <= 0:
        return f"{press}; or a policy that says so"
    per_mib = other.extra_seconds / (-other.extra_bytes / 2**20)
    return f"a MiB must be worth more than {duration(per_mib)}; {press}; or a policy that says so"


def _cheaper(row: NodeRow, decision: Decision, other: Alternative, budget_bytes: int | None) -> str:
    """What would make keeping a recomputed value pay."""
    if decision.reason is Reason.BACKWARD_ONLY:
        return "nothing is gained: backward runs it once either way"
    if decision.reason in (Reason.OFF_FOR_BUDGET, Reason.AGAINST_SAVE) or (
        other.extra_seconds <= 0 and budget_bytes is not None
    ):
        bound = "of its region" if budget_bytes is None else f"than {size(budget_bytes)}"
        return f"a larger memory_budget {bound}, or a policy that says so"
    if other.extra_seconds <= 0:
        return "a policy that says so; by these prices alone the two choices are equal or better"
    now, more = duration(row.recompute_seconds), duration(row.recompute_seconds + other.extra_seconds)
    return f"running it again must cost more than {more} (now {now}), or a policy says so"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - NUM_SHOWN
    return ", ".join(names[:NUM_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# -------------------------------------------------------------------------------------------------- the other choice


@dataclass(frozen=True, slots=True)
class _Reached:
    """What backward takes from forward for a choice of saved values."""

    recomputed: dict[str, None]
    received: dict[str, None]

    def seconds(self, graph: GraphReport) -> float:
        kept = sum(graph.row[name].save_seconds for name in self.received)
        return kept + sum(graph.row[name].recompute_seconds for name in self.recomputed)

    def num_bytes(self, graph: GraphReport) -> int:
        return sum(graph.row[name].num_bytes for name in self.received)


def _reach(graph: GraphReport, saved: set[str]) -> _Reached:
    """Walk up from backward's readers to what is saved or there anyway."""
    reached = _Reached({}, {})
    stack = [name for row in graph.nodes if row.role == "BACKWARD" for name in row.inputs]
    stack += graph.backward_results
    seen: set[str] = set()
    while stack:
        name = stack.pop()
        row = graph.row[name]
        if name in seen or not row.base:
            continue
        seen.add(name)
        if row.base in saved:
            reached.received[row.base] = None
        elif row.role in FORWARD_ROLES:
            reached.recomputed[name] = None
            stack.extend(row.inputs)
    return reached


def _alternative(graph: GraphReport, row: NodeRow, decision: Decision) -> Alternative:
    """Flip one value."""
    return _if_kept(graph, row) if decision.action is Action.RECOMPUTE else _if_recomputed(graph, row)


def _if_kept(graph: GraphReport, row: NodeRow) -> Alternative:
    """Keep a value that is recomputed: what is there for nothing else goes, each of its runs."""
    freed = [(graph.nodes[f.node], f.is_run) for f in graph.runs.freed_by_keeping(graph.position[row.name])]
    dropped = [kept for kept, is_run in freed if not is_run]
    saved_seconds = sum(found.recompute_seconds if is_run else found.save_seconds for found, is_run in freed)
    return Alternative(
        action=Action.SAVE,
        obstacle=_obstacle(graph, row, Action.SAVE, ()),
        extra_seconds=row.save_seconds - saved_seconds,
        extra_bytes=row.num_bytes - sum(kept.num_bytes for kept in dropped),
        also_recomputed=(),
        no_longer_saved=_in_order(graph, [kept.name for kept in dropped]),
    )


def _if_recomputed(graph: GraphReport, row: NodeRow) -> Alternative:
    """Recompute a value that is kept, and what it is computed from as far as that is not at hand."""
    saved = {d.value for d in graph.plan.decisions if d.action is not Action.RECOMPUTE}
    now, then = _reach(graph, saved), _reach(graph, saved - {row.name})
    newly = [name for name in then.recomputed if name not in now.recomputed and name != row.name]
    return Alternative(
        action=Action.RECOMPUTE,
        obstacle=_obstacle(graph, row, Action.RECOMPUTE, newly),
        extra_seconds=then.seconds(graph) - now.seconds(graph),
        extra_bytes=then.num_bytes(graph) - now.num_bytes(graph),
        also_recomputed=_in_order(graph, newly),
        no_longer_saved=_in_order(graph, [n for n in now.received if n not in then.received and n != row.name]),
    )


def _in_order(graph: GraphReport, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=graph.position.__getitem__))


def _obstacle(graph: GraphReport, row: NodeRow, action: Action, newly: Sequence[str]) -> str:
    if action is Action.SAVE:
        return f"it may not be: {row.no_save}{_remedy(row.no_save)}" if row.no_save else ""
    if row.no_recompute:
        return f"it may not be: {row.no_recompute}{_remedy(row.no_recompute)}"
    stuck = [name for name in newly if graph.row[name].no_recompute]
    if stuck:
        return f"`{stuck[0]}` would have to be recomputed with it, and may not: {graph.row[stuck[0]].no_recompute}"
    return ""


def _remedy(reason: str) -> str:
    remedies = {
        Reason.POLICY_SAVE.value: "; the policy would have to answer PREFER_RECOMPUTE or MUST_RECOMPUTE",
        Reason.POLICY_RECOMPUTE.value: "; the policy would have to answer PREFER_SAVE or MUST_SAVE, "
        "or a memory_budget turn its preference into a price",
        Reason.POLICY_OFFLOAD.value: "; the policy would have to answer otherwise",
        Reason.REGION_OUTPUT.value: "; the region would have to include what reads it",
        Reason.NOT_A_TENSOR.value: "",
        Reason.EXPLICIT_GENERATOR.value: "; draw from the default generator, whose state is replayed",
    }
    return remedies.get(reason, "")
