"""What a plan says: what happens to every forward value that backward needs, why, and what it costs. Immutable data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..budgets import RegionShare
from ..graph import Reason
from ..shared import NOT_STORED
from ..sizes import SizeSymbol


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
class PlanContents:
    """All that a plan says of one joint graph: the decisions in graph order, and the order of backward."""

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
