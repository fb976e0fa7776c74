"""The plan: what happens to every forward value that backward needs, why, and what it costs. Immutable."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from ..budgets.budget import RegionShare
from ..graph.constraints import Reason
from ..shared.fields import NOT_STORED, Damaged, read, refused, shown, stored
from ..shared.files import parsed_file, replace_file
from ..shared.readable import size
from ..shared.source import source_line as source_line
from ..sizes.symbols import SizeSymbol
from .sizes import plan_at, size_lines, sizes_text

FORMAT = 1
"""Version of the JSON form; a reader refuses any other."""

DIGEST_LENGTH = 32
"""Characters of a digest: it tells edits and damage, and guards against nobody."""


class Action(Enum):
    """How a forward value reaches backward."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one forward value that backward needs, and why."""

    value: str
    op: str
    action: Action
    reason: Reason
    num_bytes: int
    save_seconds: float
    """What keeping it adds to the step, as far as the cost model knows."""
    recompute_seconds: float
    """What running it again in backward adds to the step, each time."""
    num_recomputes: int
    """How often backward runs it."""
    source: str
    """The line of the user's program, `file:line`; empty if it is not known."""
    module: str
    """The module path, `layers.3.mlp`; empty if it is not known."""
    region: str = ""
    """The region path, `decoder/mlp#2`; empty outside regions."""
    policy: str = ""
    """What the region's policy answered, `MUST_SAVE`; empty outside regions."""
    name: str = ""
    """What `remat.name` called the value; empty for most."""
    expression: str = ""
    """Its bytes in terms of the plan's symbols; empty if they are the same at all sizes."""
    save_expression: str = ""
    """Nanoseconds that keeping it adds, in terms of the plan's symbols; empty if no size is a symbol, or if the cost
    model knows them for the sizes of the example only."""
    recompute_expression: str = ""
    """The same of running it again, each time."""
    is_view: bool = False
    """It shows memory that another value is in, so that to make it again takes none."""


@dataclass(frozen=True, slots=True)
class PredictedPeak:
    """The largest sum of live bytes that simulating the plan finds."""

    num_bytes: int
    node: str
    """The op that runs at that moment."""
    in_forward: bool
    source: str
    """The line of the user's program that the op comes from; empty if it is not known."""
    alive: tuple[tuple[str, int], ...]
    """The largest values alive there, with their bytes."""
    executor: str
    """For whom: "inductor" fuses ops, "node by node" does not."""
    expression: str = ""
    """The bytes in terms of the plan's symbols; empty if no size is a symbol, or if it cannot be written down."""


@dataclass(frozen=True, slots=True)
class TimeExpressions:
    """What a plan's parts take, in nanoseconds in terms of its symbols; empty where only numbers are known."""

    forward: str
    """All that forward runs."""
    recompute: str
    """What all recomputation adds to the step."""
    keep: str
    """What keeping values adds."""
    note: str = ""
    """What is not known, and why; empty if everything is."""


@dataclass(frozen=True, slots=True)
class SymbolRange:
    """Values of one symbol for which a plan keeps within its budget, the other symbols being what they were."""

    symbol: str
    low: int
    high: int | None
    """None if there is no end."""
    is_proved: bool
    """Known for every value; if not, some values were looked at."""
    sampled: tuple[int, ...] = ()
    """The values that were looked at, if it is not proved."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions of one joint graph, in graph order, and the order of backward."""

    decisions: tuple[Decision, ...]
    order: tuple[str, ...]
    """What backward runs, by name; a forward node's name means: recompute it here."""
    phases: tuple[int, ...]
    """Where in the order recomputed values are forgotten, so that compilers do not merge what runs before and after."""
    peak: PredictedPeak
    budget_bytes: int | None
    """The bound on the peak that the plan was made for."""
    peak_without_recompute_bytes: int | None
    """The predicted peak if everything that backward reads were kept; None if nobody asked."""
    planner: str
    """Which planner proposed it."""
    graph: tuple[str, ...]
    """The joint graph that it was made for, a line per node."""
    key: str
    """Options and versions under which it was made."""
    shares: tuple[RegionShare, ...] = ()
    """The regions that have a budget of their own, in graph order."""
    symbols: tuple[SizeSymbol, ...] = ()
    """The symbols in the sizes of its tensors, and what they stood for."""
    ranges: tuple[SymbolRange, ...] = ()
    """For which sizes its budget holds."""
    guards: tuple[str, ...] = ()
    """Conditions on sizes; where one of them does not hold, the graph is compiled and planned anew."""
    most_ranges: int | None = None
    """At most how many plans serve all sizes of this graph, each in its range; None if this one serves all of them."""
    forward_seconds: float | None = None
    """What running forward once more would take, by the cost model."""
    extra_seconds: float | None = None
    """What keeping and recomputing add to the step, by the cost model; None at other sizes than it was made for."""
    least_extra_seconds: float | None = None
    """What no plan within the budget undercuts, by the cost model; None without a budget, or if this one exceeds it."""
    times: TimeExpressions | None = None
    """Times at other sizes; None if no size is a symbol, or nobody asked."""
    file: str = field(default="", compare=False, metadata=NOT_STORED)
    """Where it was read from, for messages; empty if it was made by this process."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the joint graph that the plan was made for."""
        return len(self.graph)

    @property
    def saved(self) -> tuple[Decision, ...]:
        """The values that are kept."""
        return tuple(d for d in self.decisions if d.action is Action.SAVE)

    @property
    def recomputed(self) -> tuple[Decision, ...]:
        """The values that are computed again."""
        return tuple(d for d in self.decisions if d.num_recomputes)

    @property
    def offloaded(self) -> tuple[Decision, ...]:
        """The values that wait in host memory."""
        return tuple(d for d in self.decisions if d.action is Action.OFFLOAD)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward, inputs and parameters not counted."""
        return sum(d.num_bytes for d in self.saved)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that are computed again, each value counted once; views take no memory."""
        return sum(d.num_bytes for d in self.recomputed if not d.is_view)

    @property
    def recompute_seconds(self) -> float:
        """What all recomputation adds to the step, as far as the cost model knows."""
        return sum(d.num_recomputes * d.recompute_seconds for d in self.decisions)

    def to_json(self) -> str:
        """The plan as JSON text, one decision a line, fit for diffs."""
        data = {"format": FORMAT, "digest": self.digest, **self._content()}
        rows = (f"  {json.dumps(name)}: {_json_rows(value)}" for name, value in data.items())
        return "{\n" + ",\n".join(rows) + "\n}\n"

    @property
    def digest(self) -> str:
        """A short text that is another one for every other plan."""
        text = json.dumps(self._content(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]

    def _content(self) -> dict[str, Any]:
        return {**stored(self), "decisions": [_decision_to_dict(d) for d in self.decisions]}

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote, or the plan of a report that has one graph."""
        return _only_plan(text, "")

    def at(self, sizes: Mapping[str, int]) -> Plan:
        """The plan with bytes, peak and times as they are at other sizes, by the names of its symbols."""
        return plan_at(self, sizes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a file that is there already is replaced as a whole."""
        replace_file(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote."""
        return parsed_file(path, partial(_only_plan, file=os.fspath(path)))

    def summary(self, top: int = 10) -> str:
        """A dozen lines for a terminal: totals, the peak, then the largest saved values."""
        largest = sorted(self.saved, key=lambda d: -d.num_bytes)[:top]
        where = f"{'forward' if self.peak.in_forward else 'backward'}, {self.peak.node}  {self.peak.source}".rstrip()
        where = where if self.peak.node else f"at {sizes_text(self)}"  # at other sizes another op may set it
        lines = [
            f"joint graph of {self.num_nodes} nodes: backward needs {len(self.decisions)} forward values",
            f"  saved       {len(self.saved):6}  {size(self.saved_bytes):>13}",
            f"  recomputed  {len(self.recomputed):6}  {size(self.recomputed_bytes):>13}"
            f"  for {1e3 * self.recompute_seconds:.2f} ms (estimated)",
            f"  peak                {size(self.peak.num_bytes):>13}  predicted for {self.peak.executor}; {where}",
        ]
        if self.budget_bytes is not None:
            lines.append(f"  budget              {size(self.budget_bytes):>13}  {self.budget_text()}")
        lines += [f"  {title:18}  {text}" for title, text in (*self.share_lines(), *size_lines(self))]
        if self.offloaded:
            num_bytes = sum(d.num_bytes for d in self.offloaded)
            lines.append(f"  offloaded   {len(self.offloaded):6}  {size(num_bytes):>13}")
        if largest:
            lines.append("largest saved values:")
            width = max(len(d.value) for d in largest)
            lines += [
                f"  {d.value:{width}}  {size(d.num_bytes):>13}  {d.reason.value}  {d.source}".rstrip() for d in largest
            ]
        return "\n".join(lines)

    def budget_text(self) -> str:
        """Whether the budget is met, by which planner, and at what price; empty if there is none."""
        if self.budget_bytes is None:
            return ""
        excess = self.peak.num_bytes - self.budget_bytes
        how = "this is the lowest plan found" if self.peak.node else "it is for other sizes"
        over = f"exceeded by {size(excess)}: {how}; " if excess > 0 else ""
        return f"{over}planner: {self.planner}{self.bound_text()}"

    def share_lines(self) -> Iterator[tuple[str, str]]:
        """What regions with a budget of their own take of it, as titles and texts."""
        for share in self.shares:
            excess = share.predicted_bytes - share.budget_bytes
            over = f", exceeded by {size(excess)}: no plan found keeps within it" if excess > 0 else ""
            of = f"{size(share.predicted_bytes)} of {size(share.budget_bytes)}"
            yield "region", f"{share.path}: {of}{over}"

    def bound_text(self) -> str:
        """What the plan adds to the step, beside what any plan within its budget does; empty if that is not known."""
        if self.extra_seconds is None or self.least_extra_seconds is None:
            return ""
        added, least = 1e3 * self.extra_seconds, 1e3 * self.least_extra_seconds
        return f"; adds {added:.2f} ms (estimated), no plan within it less than {least:.2f}"

    def __str__(self) -> str:
        return self.summary()


def _only_plan(text: str, file: str) -> Plan:
    plans = plans_from_json(text, file)
    if len(plans) != 1:
        raise ValueError(f"this is a report of {len(plans)} graphs; a plan is for one")
    return plans[0]


def plans_from_json(text: str, file: str = "") -> tuple[Plan, ...]:
    """Read a plan, or all plans of a report; `file` is where the text comes from."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no plan: {error}") from error
    if not isinstance(data, dict) or "format" not in data:
        raise ValueError("this is no plan: a plan is a JSON object that says its format")
    if "graphs" not in data:
        return (_checked_plan(data, "", file),)
    try:
        found = [graph["plan"] for graph in data["graphs"]]
    except (KeyError, TypeError) as error:
        raise ValueError("this is no plan, and no report that holds plans") from error
    return tuple(_checked_plan(plan, f"graphs[{number}].plan.", file) for number, plan in enumerate(found))


def _checked_plan(data: Any, path: str, file: str) -> Plan:
    """A plan all of whose fields have their types, and that is as it was saved.

    `path` is what the names of fields begin with in its file.
    """
    if not isinstance(data, dict):
        raise ValueError(f"this plan is damaged: {refused(path.removesuffix('.'), data, 'an object with fields')}")
    number = data.get("format")
    if isinstance(number, bool) or number != FORMAT:
        raise ValueError(f"this plan has format {shown(number)}; this version of remat reads format {FORMAT}")
    try:
        plan = read(Plan, {name: value for name, value in data.items() if name not in ("format", "digest")})
        _check_digest(plan, data.get("digest"))
    except Damaged as error:
        raise ValueError(f"this plan is damaged: {path}{error}") from error
    return replace(plan, file=file)


def _check_digest(plan: Plan, stated: object) -> None:
    if stated != plan.digest:
        raise Damaged(
            f"digest is {shown(stated)}, but that of what the plan holds is {plan.digest!r}: it was edited or damaged "
            "after it was saved.\nMake the plan anew; or, if you meant the edit, write the second digest in place of "
            "the first. What the plan does is checked again when it is applied."
        )


def _json_rows(value: Any) -> str:
    """JSON text of one field; long lists have a line per item."""
    if not isinstance(value, (list, tuple)) or not value:
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"


def _decision_to_dict(decision: Decision) -> dict[str, Any]:
    return {**asdict(decision), "action": decision.action.name, "reason": decision.reason.name}
