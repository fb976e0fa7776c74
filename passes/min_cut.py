"""Flow problem in, cheapest legal choice out. Knows networkx, and nothing of FX or torch.

Each value v has a price to save it and a price to recompute it. In the network

    source -- recompute price --> v.in -- save price --> v.out        u.out -- infinite --> v.in   for each input u of v
                                                         v.out -- infinite --> sink                if backward reads v

a cut that puts `v.in` on the sink's side recomputes v and pays for it once, and one that separates `v.in` from `v.out`
saves it. A minimum cut is therefore the cheapest way to give backward all it needs, chains of recomputation included.
(Picard's maximum closure, 1976, with one more edge per value.)

Most of the network never reaches a solver. Three facts shrink it, all exact:

1. Where recomputing v costs more than saving it, v is never recomputed, so nothing is needed on v's behalf.
2. Where v is needed for certain, its readers' edges say nothing new. Such values separate the network.
3. Where v is needed for certain and all its inputs are there, the cheaper of its two prices is right.

What is left falls into components that share no edge; equal components (the layers of a model) are solved once.
Prices are integers, and of all minimum cuts the one that recomputes most is taken: it is unique, so the answer depends
on neither the solver nor the order in which it visits nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec

import networkx as nx
from networkx.algorithms.flow import boykov_kolmogorov

FORBIDDEN = None
"""The price of what may not be done."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the flow problem; prices are whole numbers, or FORBIDDEN."""

    save_price: int | None
    recompute_price: int | None
    inputs: tuple[int, ...]
    """Positions of the values that recomputing this one reads; all of them smaller than its own."""
    needed: bool
    """Backward reads it."""


class Choice(Enum):
    """What the cut does with a value."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Cut:
    """The cheapest choice for every value, and its price."""

    choices: tuple[Choice, ...]
    price: int


class Contradiction(Exception):
    """A value is needed for certain but may be neither saved nor recomputed."""

    def __init__(self, value: int, chain: tuple[int, ...]) -> None:
        super().__init__(value, chain)
        self.value = value
        self.chain = chain
        """The recomputed values, last one first, on whose behalf it is needed."""


Solver = Callable[[Sequence[Value]], list[bool]]
"""Solve one component: for each of its values, is it recomputed (`v.in` on the sink's side)?"""


def solve(values: Sequence[Value], solver: Solver | None = None) -> Cut:
    """Find the cheapest way to make every needed value available."""
    surely_needed = _propagate_needs(values)
    recomputed = _decide_locally(values, surely_needed)
    solver = solver or default_solver
    solved: dict[tuple[Value, ...], list[bool]] = {}
    for members in _components(values, surely_needed, recomputed):
        component = _as_problem(values, members, surely_needed)
        if component not in solved:
            solved[component] = solver(component)
        for i, is_recomputed in zip(members, solved[component], strict=True):
            recomputed[i] = is_recomputed
    return _as_cut(values, [bool(r) for r in recomputed])


# -------------------------------------------------------------------------------------------------- shrinking


def _propagate_needs(values: Sequence[Value]) -> list[bool]:
    """Fact 2: mark what every legal choice makes available, following values that can only be recomputed."""
    sure = [v.needed for v in values]
    reader: dict[int, int] = {}
    for i in range(len(values) - 1, -1, -1):
        value = values[i]
        if not sure[i] or value.save_price is not FORBIDDEN:
            continue
        if value.recompute_price is FORBIDDEN:
            raise Contradiction(i, _chain(i, reader))
        for j in value.inputs:
            if not sure[j]:
                sure[j] = True
                reader[j] = i
    return sure


def _chain(i: int, reader: dict[int, int]) -> tuple[int, ...]:
    chain = []
    while i in reader:
        i = reader[i]
        chain.append(i)
    return tuple(chain)


def never_recomputed(value: Value) -> bool:
    """Fact 1: saving is allowed and cheaper, whatever the rest of the cut looks like."""
    if value.recompute_price is FORBIDDEN:
        return True
    return value.save_price is not FORBIDDEN and value.recompute_price > value.save_price


def _decide_locally(values: Sequence[Value], surely_needed: Sequence[bool]) -> list[bool | None]:
    """Facts 1 and 3: True for recomputed, False for not, None where a solver has to look."""
    recomputed: list[bool | None] = []
    for i, value in enumerate(values):
        if surely_needed[i] and never_recomputed(value):
            recomputed.append(False)
        elif value.save_price is FORBIDDEN and surely_needed[i]:
            recomputed.append(True)
        elif surely_needed[i] and all(surely_needed[j] for j in value.inputs):
            recomputed.append(True)  # never_recomputed is false: recomputing costs no more than saving
        else:
            recomputed.append(None)
    return recomputed


def _components(
    values: Sequence[Value], surely_needed: Sequence[bool], recomputed: Sequence[bool | None]
) -> list[list[int]]:
    """Group the open values that an edge of the network connects, in order of their first member."""
    leader = list(range(len(values)))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for i, value in enumerate(values):
        if recomputed[i] is None and not never_recomputed(value):
            for j in value.inputs:
                if not surely_needed[j]:
                    leader[max(find(i), find(j))] = min(find(i), find(j))
    groups: dict[int, list[int]] = {}
    for i, choice in enumerate(recomputed):
        if choice is None:
            groups.setdefault(find(i), []).append(i)
    # A group in which nothing is needed costs nothing: its values stay unused.
    return [group for group in groups.values() if any(surely_needed[i] for i in group)]


def _as_problem(values: Sequence[Value], members: Sequence[int], surely_needed: Sequence[bool]) -> tuple[Value, ...]:
    """A component as a problem of its own, positions counted from zero."""
    position = {i: k for k, i in enumerate(members)}
    return tuple(
        Value(
            save_price=values[i].save_price,
            recompute_price=FORBIDDEN if never_recomputed(values[i]) else values[i].recompute_price,
            inputs=()
            if never_recomputed(values[i])
            else tuple(position[j] for j in values[i].inputs if not surely_needed[j]),
            needed=surely_needed[i],
        )
        for i in members
    )


def _as_cut(values: Sequence[Value], recomputed: Sequence[bool]) -> Cut:
    """Walk back from what backward reads: whatever is reached and not recomputed is saved."""
    choices = [Choice.UNUSED] * len(values)
    price = 0
    wanted = [v.needed for v in values]
    for i in range(len(values) - 1, -1, -1):
        if not wanted[i]:
            continue
        value = values[i]
        if recomputed[i]:
            choices[i] = Choice.RECOMPUTE
            assert value.recompute_price is not FORBIDDEN
            price += value.recompute_price
            for j in value.inputs:
                wanted[j] = True
        else:
            choices[i] = Choice.SAVE
            assert value.save_price is not FORBIDDEN
            price += value.save_price
    return Cut(tuple(choices), price)


# -------------------------------------------------------------------------------------------------- solvers


class Side(Enum):
    """The two network nodes of a value."""

    IN = "in"
    OUT = "out"


def solve_with_networkx(component: Sequence[Value]) -> list[bool]:
    """Solve one component with networkx; a missing capacity is its infinity."""
    network = nx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    for i, value in enumerate(component):
        _add_edge(network, "source", (i, Side.IN), value.recompute_price)
        _add_edge(network, (i, Side.IN), (i, Side.OUT), value.save_price)
        for j in value.inputs:
            _add_edge(network, (j, Side.OUT), (i, Side.IN), None)
        if value.needed:
            _add_edge(network, (i, Side.OUT), "sink", None)
    residual = boykov_kolmogorov(network, "source", "sink")
    kept = _reachable(residual, "source")
    return [(i, Side.IN) not in kept for i in range(len(component))]


def _add_edge(network: nx.DiGraph, tail: object, head: object, price: int | None) -> None:
    if price is None:
        network.add_edge(tail, head)
    else:
        network.add_edge(tail, head, capacity=price)


def _reachable(residual: nx.DiGraph, start: object) -> set[object]:
    """The source side of the minimum cut that has the smallest source side."""
    seen = {start}
    stack = [start]
    while stack:
        for head, edge in residual[stack.pop()].items():
            if head not in seen and edge["flow"] < edge["capacity"]:
                seen.add(head)
                stack.append(head)
    return seen


_LARGEST_INT32 = 2**31 - 1
_SMALLEST_FOR_SCIPY = 200
"""Below this many values networkx is done before scipy's arrays are built (measured: equal at about 150)."""


def fits_scipy(component: Sequence[Value]) -> bool:
    """Scipy's flow is counted in 32 bits: all prices together must fit, or a sum could wrap around."""
    return (
        sum(price for v in component for price in (v.save_price, v.recompute_price) if price is not None)
        < _LARGEST_INT32
    )


def solve_with_scipy(component: Sequence[Value]) -> list[bool]:
    """Solve one component with scipy's compiled Dinic algorithm; the same cut as networkx finds."""
    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    infinite = _LARGEST_INT32
    n = len(component)
    source, sink = 2 * n, 2 * n + 1
    tails: list[int] = []
    heads: list[int] = []
    capacities: list[int] = []

    def add(tail: int, head: int, price: int | None) -> None:
        tails.append(tail)
        heads.append(head)
        capacities.append(infinite if price is None else price)

    for i, value in enumerate(component):
        add(source, 2 * i, value.recompute_price)
        add(2 * i, 2 * i + 1, value.save_price)
        for j in value.inputs:
            add(2 * j + 1, 2 * i, None)
        if value.needed:
            add(2 * i + 1, sink, None)
    shape = (2 * n + 2, 2 * n + 2)
    network = csr_matrix((np.array(capacities, dtype=np.int32), (tails, heads)), shape=shape, dtype=np.int32)
    flow = maximum_flow(network, source, sink, method="dinic").flow
    residual = network.astype(np.int64) - flow.astype(np.int64)
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    kept = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return [2 * i not in kept for i in range(n)]


_HAS_SCIPY = find_spec("scipy") is not None


def default_solver(component: Sequence[Value]) -> list[bool]:
    """networkx, or scipy where it is installed and the component is large."""
    if _HAS_SCIPY and len(component) >= _SMALLEST_FOR_SCIPY and fits_scipy(component):
        return solve_with_scipy(component)
    return solve_with_networkx(component)
