"""The choice as a flow problem: which nodes are one value, what each value's prices are, and what a cut of it saves.

A view costs nothing to make again and keeps its base's storage alive, so no minimum cut can gain from saving it
instead of its base: views are joined to their bases before the cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..graph import Constraint, Constraints, JointGraph, Reason, base_is_viewed, explain_policy
from ..prices import Costs
from ..shared import InfeasibleCut, source_line
from .min_cut import FORBIDDEN, Choice, Contradiction, Cut, Network, Price, solve_network

PREFERENCE = 4
"""How many times dearer it is to recompute what a policy would rather save. A choice, not a measurement: a preference
yields where the budget cannot be met otherwise, or only at several times the cost."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the prices of a value are made of; those of equal layers are equal."""

    save_ticks: int
    recompute_ticks: int
    num_bytes: int
    extra_ticks_per_byte: float
    may_save: bool
    may_recompute: bool
    prefers: Reason | None

    def prices(self, ticks_per_byte: float) -> tuple[Price, Price]:
        """The prices of saving and of recomputing if every kept byte costs extra."""
        save_ticks = self.save_ticks + round((ticks_per_byte + self.extra_ticks_per_byte) * self.num_bytes)
        recompute_ticks = self.recompute_ticks
        if self.prefers is Reason.POLICY_RECOMPUTE:
            save_ticks += recompute_ticks
        elif self.prefers is Reason.POLICY_SAVE:
            recompute_ticks = PREFERENCE * recompute_ticks + save_ticks
        return save_ticks if self.may_save else FORBIDDEN, recompute_ticks if self.may_recompute else FORBIDDEN


@dataclass(frozen=True, eq=False)
class FlowProblem:
    """The values of a graph; a value is known by its position here."""

    graph: JointGraph
    constraints: Constraints
    costs: Costs
    bases: tuple[int, ...]
    """Per value, the node that computes it."""
    value_of: dict[int, int]
    """Node position to value; nodes that backward has anyway are missing."""
    needed: frozenset[int]
    """Values that backward reads directly."""
    inputs: tuple[tuple[int, ...], ...]
    """Per value, the values that computing it reads."""
    extra_ticks_per_byte: Mapping[int, float] = field(default_factory=dict)
    """What keeping a byte of a value costs in addition, because memory is short where it belongs."""

    @staticmethod
    def build(graph: JointGraph, constraints: Constraints, costs: Costs) -> FlowProblem:
        """Join views to their bases."""
        bases: list[int] = []
        value_of: dict[int, int] = {}
        for i, constraint in enumerate(constraints.of):
            if constraint is None or constraint.is_free:
                continue
            base = _joined_base(graph, constraints, i, constraint)
            if base is not None and base in value_of:
                value_of[i] = value_of[base]
            else:
                value_of[i] = len(bases)
                bases.append(i)
        return FlowProblem(
            graph=graph,
            constraints=constraints,
            costs=costs,
            bases=tuple(bases),
            value_of=value_of,
            needed=frozenset(value_of[i] for i in graph.needed if i in value_of),
            inputs=tuple(tuple(dict.fromkeys(value_of[j] for j in graph.inputs[i] if j in value_of)) for i in bases),
        )

    def constraint(self, value: int) -> Constraint:
        """What may be done with a value."""
        constraint = self.constraints.of[self.bases[value]]
        assert constraint is not None
        return constraint

    def num_bytes(self, value: int) -> int:
        """What keeping a value takes."""
        return self.costs.num_bytes[self.bases[value]]

    @property
    def move_ticks_per_byte(self) -> float:
        """What keeping a byte costs anyway, on average: the unit in which prices per byte are stated."""
        total_bytes = sum(self.costs.num_bytes)
        return sum(self.costs.save_ticks) / total_bytes if total_bytes else 0.0

    @cached_property
    def cheapest(self) -> Cut:
        """The cheapest legal choice if memory costs nothing."""
        return self.cut()

    def cut(self, ticks_per_byte: float = 0.0, kept: Collection[int] = (), unpriced: Collection[int] = ()) -> Cut:
        """Find the cheapest legal choice if every kept byte costs extra, except those of `unpriced` values.

        `kept` values are there for nothing.
        """
        try:
            return solve_network(self._network(ticks_per_byte, frozenset(kept), frozenset(unpriced)))
        except Contradiction as contradiction:
            raise InfeasibleCut(_explain(self, contradiction)) from None

    def saved(self, cut: Cut) -> tuple[int, ...]:
        """The nodes whose results a cut saves, in graph order."""
        return tuple(i for i, choice in zip(self.bases, cut.choices, strict=True) if choice is Choice.SAVE)

    def price_of(self, cut: Cut) -> int:
        """What a choice costs at the prices of this problem."""
        network = self._network(0.0, frozenset(), frozenset())
        total = 0
        for choice, save, again in zip(cut.choices, network.save_prices, network.recompute_prices, strict=True):
            if choice is not Choice.UNUSED:
                price = save if choice is Choice.SAVE else again
                assert price is not None
                total += price
        return total

    def _network(self, ticks_per_byte: float, kept: frozenset[int], unpriced: frozenset[int]) -> Network:
        kinds, kind_of = self._terms
        there = [v for v in kept if kinds[kind_of[v]].may_save]
        save_prices, recompute_prices = self._prices(ticks_per_byte)
        usual = self._prices(0.0) if unpriced else ((), ())
        for v in unpriced:
            save_prices[v], recompute_prices[v] = usual[0][v], usual[1][v]
        needed = self._is_needed
        for v in there:
            save_prices[v], recompute_prices[v] = 0, FORBIDDEN
        if there:
            needed = list(needed)
            for v in there:
                needed[v] = True
        return Network(self.inputs, needed, save_prices, recompute_prices)

    def _prices(self, ticks_per_byte: float) -> tuple[list[Price], list[Price]]:
        kinds, kind_of = self._terms
        save = [terms.prices(ticks_per_byte) for terms in kinds]
        return [save[k][0] for k in kind_of], [save[k][1] for k in kind_of]

    @cached_property
    def _is_needed(self) -> list[bool]:
        return [v in self.needed for v in range(len(self.bases))]

    @cached_property
    def _terms(self) -> tuple[list[Terms], list[int]]:
        """The different terms that there are, and which of them each value has."""
        found: dict[Terms, int] = {}
        kind_of = [found.setdefault(self._terms_of(v), len(found)) for v in range(len(self.bases))]
        return list(found), kind_of

    def _terms_of(self, v: int) -> Terms:
        i, constraint, costs = self.bases[v], self.constraint(v), self.costs
        return Terms(
            save_ticks=costs.save_ticks[i],
            recompute_ticks=costs.recompute_ticks[i],
            num_bytes=costs.num_bytes[i],
            extra_ticks_per_byte=self.extra_ticks_per_byte.get(v, 0.0),
            may_save=constraint.no_save is None,
            may_recompute=constraint.no_recompute is None,
            prefers=constraint.prefers,
        )


def _joined_base(graph: JointGraph, constraints: Constraints, i: int, constraint: Constraint) -> int | None:
    """The value a view is joined to, if it is a view that nobody constrained."""
    if not base_is_viewed(graph, i) or i in constraints.saved_by_copy:
        return None
    if constraint.no_recompute is not None or constraint.no_save not in (None, Reason.NOT_A_TENSOR):
        return None
    base = graph.inputs[i][0]
    base_constraint = constraints.of[base]
    if base_constraint is None or base_constraint.no_save not in (None, Reason.NOT_A_TENSOR):
        return None
    # The list that `split` returns is not a tensor, but its parts lead through it to the tensor that was split.
    return base if base_constraint.no_save is None or base_is_viewed(graph, base) else None


def _explain(problem: FlowProblem, found: Contradiction) -> str:
    """Say which value is stuck, the two causes, and on whose behalf it is needed."""
    graph, bases = problem.graph, problem.bases
    node, constraint = graph.nodes[bases[found.value]], problem.constraint(found.value)
    assert constraint.no_save is not None and constraint.no_recompute is not None
    lines = [
        f"`{node.name}` ({node.target}) is needed by backward but may be neither saved nor recomputed:",
        f"  - not saved: {constraint.no_save.value}",
        f"  - not recomputed: {constraint.no_recompute.value}",
    ]
    if found.chain:
        lines.append("it is needed to recompute " + ", ".join(f"`{graph.nodes[bases[v]].name}`" for v in found.chain))
    asked, source = explain_policy(node), source_line(node.stack_trace or "")
    if asked:
        lines.append(asked)
    if source:
        lines.append(f"at {source}")
    lines.append(
        "Let the policy save this op (or what is computed from it), or take the op out of the checkpointed region."
    )
    return "\n".join(lines)
