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

Price = int | None
"""A whole number, or FORBIDDEN."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """All values of a problem, field by field as in `Value`: what is cut often at various prices is built once."""

    inputs: Sequence[tuple[int, ...]]
    needed: Sequence[bool]
    save_prices: Sequence[Price]
    recompute_prices: Sequence[Price]


def solve(values: Sequence[Value], solver: Solver | None = None) -> Cut:
    """Find the cheapest way to make every needed value available."""
    network = Network(
        inputs=[v.inputs for v in values],
        needed=[v.needed for v in values],
        save_prices=[v.save_price for v in values],
        recompute_prices=[v.recompute_price for v in values],
    )
    return solve_network(network, solver)


def solve_network(network: Network, solver: Solver | None = None) -> Cut:
    """Find the cheapest way to make every needed value of a network available."""
    surely_needed = _propagate_needs(network)
    never = _never_recomputed(network)
    recomputed = _decide_locally(network, surely_needed, never)
    solver = solver or default_solver
    solved: dict[tuple[_Row, ...], list[bool]] = {}
    for members in _components(network, surely_needed, never, recomputed):
        rows = _as_rows(network, members, surely_needed, never)
        if rows not in solved:
            solved[rows] = solver([Value(*row) for row in rows])
        for i, is_recomputed in zip(members, solved[rows], strict=True):
            recomputed[i] = is_recomputed
    return _as_cut(network, recomputed)


# -------------------------------------------------------------------------------------------------- shrinking


def _propagate_needs(network: Network) -> list[bool]:
    """Fact 2: mark what every legal choice makes available, following values that can only be recomputed."""
    sure = list(network.needed)
    reader: dict[int, int] = {}
    unsavable = [i for i, price in enumerate(network.save_prices) if price is FORBIDDEN]
    for i in reversed(unsavable):
        if not sure[i]:
            continue
        if network.recompute_prices[i] is FORBIDDEN:
            raise Contradiction(i, _chain(i, reader))
        for j in network.inputs[i]:
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


def _never_recomputed(network: Network) -> list[bool]:
    """Fact 1: saving is allowed and cheaper, whatever the rest of the cut looks like."""
    prices = zip(network.save_prices, network.recompute_prices, strict=True)
    return [again is FORBIDDEN or (save is not FORBIDDEN and again > save) for save, again in prices]


def _decide_locally(network: Network, surely_needed: Sequence[bool], never: Sequence[bool]) -> list[bool | None]:
    """Facts 1 and 3: True for recomputed, False for not, None where a solver has to look."""
    recomputed: list[bool | None] = [None] * len(never)
    unsure = {i for i, is_sure in enumerate(surely_needed) if not is_sure}
    for i, is_sure in enumerate(surely_needed):
        if not is_sure:
            continue
        if never[i]:
            recomputed[i] = False
        elif network.save_prices[i] is FORBIDDEN or unsure.isdisjoint(network.inputs[i]):
            recomputed[i] = True  # recomputing costs no more than saving
    return recomputed


def _components(
    network: Network, surely_needed: Sequence[bool], never: Sequence[bool], recomputed: Sequence[bool | None]
) -> list[list[int]]:
    """Group the open values that an edge of the network connects; each group is in order."""
    inputs = network.inputs
    group_of: dict[int, list[int]] = {i: [i] for i, choice in enumerate(recomputed) if choice is None}
    for i in group_of:
        if never[i]:
            continue
        for j in inputs[i]:
            if not surely_needed[j] and group_of[i] is not group_of[j]:
                small, large = sorted((group_of[i], group_of[j]), key=len)
                large += small
                for member in small:
                    group_of[member] = large
    groups = {id(group): group for group in group_of.values()}
    # A group in which nothing is needed costs nothing: its values stay unused.
    return [sorted(group) for group in groups.values() if any(surely_needed[i] for i in group)]


_Row = tuple[Price, Price, tuple[int, ...], bool]
"""The fields of a `Value`; plain tuples are made and compared faster."""


def _as_rows(
    network: Network, members: Sequence[int], surely_needed: Sequence[bool], never: Sequence[bool]
) -> tuple[_Row, ...]:
    """A component as a problem of its own, positions counted from zero."""
    position = {i: k for k, i in enumerate(members)}
    inputs, save, again = network.inputs, network.save_prices, network.recompute_prices
    return tuple(
        [
            (save[i], FORBIDDEN, (), surely_needed[i])
            if never[i]
            else (save[i], again[i], tuple([position[j] for j in inputs[i] if not surely_needed[j]]), surely_needed[i])
            for i in members
        ]
    )


def _as_cut(network: Network, recomputed: Sequence[bool | None]) -> Cut:
    """Walk back from what backward reads: whatever is reached and not recomputed is saved."""
    inputs, save_prices, recompute_prices = network.inputs, network.save_prices, network.recompute_prices
    choices = [Choice.UNUSED] * len(inputs)
    total = 0
    wanted = list(network.needed)
    for i in range(len(inputs) - 1, -1, -1):
        if not wanted[i]:
            continue
        if recomputed[i]:
            choices[i] = Choice.RECOMPUTE
            price = recompute_prices[i]
            for j in inputs[i]:
                wanted[j] = True
        else:
            choices[i] = Choice.SAVE
            price = save_prices[i]
        assert price is not FORBIDDEN
        total += price
    return Cut(tuple(choices), total)


# -------------------------------------------------------------------------------------------------- solvers


def solve_by_augmenting(component: Sequence[Value]) -> list[bool]:
    """Solve one component by shortest augmenting paths (Dinitz, 1970)."""
    flow = _Flow(component)
    while flow.find_distances():
        flow.augment()
    # What the source still reaches is its side of the minimum cut with the smallest source side.
    return [flow.distance[2 * i] < 0 for i in range(len(component))]


class _Flow:
    """A network with the flow through it; edge `e` and its way back, `e ^ 1`, are neighbours in every list."""

    def __init__(self, component: Sequence[Value]) -> None:
        num_nodes = 2 * len(component) + 2
        self.source, self.sink = num_nodes - 2, num_nodes - 1
        self.infinite = 1 + sum(p for v in component for p in (v.save_price, v.recompute_price) if p is not None)
        self.edges: list[list[int]] = [[] for _ in range(num_nodes)]
        """Per node, the edges that leave it."""
        self.heads: list[int] = []
        self.left: list[int] = []
        """Per edge, how much more may flow through it."""
        self.distance: list[int] = []
        """Per node, its distance from the source along edges that are not full; -1 if there is no such path."""
        for i, value in enumerate(component):
            self._add(self.source, 2 * i, value.recompute_price)
            self._add(2 * i, 2 * i + 1, value.save_price)
            for j in value.inputs:
                self._add(2 * j + 1, 2 * i, FORBIDDEN)
            if value.needed:
                self._add(2 * i + 1, self.sink, FORBIDDEN)

    def _add(self, tail: int, head: int, price: Price) -> None:
        self.edges[tail].append(len(self.heads))
        self.edges[head].append(len(self.heads) + 1)
        self.heads += (head, tail)
        self.left += (self.infinite if price is FORBIDDEN else price, 0)

    def find_distances(self) -> bool:
        """Measure distances from the source; False if the sink is out of reach."""
        edges, heads, left = self.edges, self.heads, self.left
        distance = self.distance = [-1] * len(edges)
        distance[self.source] = 0
        reached = [self.source]
        for node in reached:
            for e in edges[node]:
                if left[e] and distance[heads[e]] < 0:
                    distance[heads[e]] = distance[node] + 1
                    reached.append(heads[e])
        return distance[self.sink] >= 0

    def augment(self) -> None:
        """Fill shortest paths until each has a full edge."""
        edges, heads, left, distance = self.edges, self.heads, self.left, self.distance
        untried = [len(leaving) for leaving in edges]
        """Per node, how many of its edges may still lead to the sink."""
        path: list[int] = []
        node = self.source
        while True:
            if node == self.sink:
                self._push(path)
                path, node = [], self.source
            elif untried[node]:
                e = edges[node][untried[node] - 1]
                if left[e] and distance[heads[e]] == distance[node] + 1:
                    path.append(e)
                    node = heads[e]
                else:
                    untried[node] -= 1
            elif path:
                node = heads[path.pop() ^ 1]
                untried[node] -= 1
            else:
                return

    def _push(self, path: Sequence[int]) -> None:
        left = self.left
        amount = min([left[e] for e in path])
        for e in path:
            left[e] -= amount
            left[e ^ 1] += amount


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
"""Below this many values our own solver is done before scipy's arrays are built (measured: equal at about 200)."""

_SMALLEST_FOR_NETWORKX = 4000
"""Below this many values our own solver is faster (measured: five times at 400, equal at about 4000)."""


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
    """Our own, or for large components scipy where it is installed, and for very large ones networkx."""
    if _HAS_SCIPY and len(component) >= _SMALLEST_FOR_SCIPY and fits_scipy(component):
        return solve_with_scipy(component)
    if len(component) >= _SMALLEST_FOR_NETWORKX:
        return solve_with_networkx(component)
    return solve_by_augmenting(component)
