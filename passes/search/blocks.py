"""Cut the forward order at its narrow points into a chain of blocks.

After every forward node some values are still to be read by later ones: they cross. Where few bytes cross, all that
follows can be computed again from little. Values that cross many points (masks, an encoder's output, the skips of a
U-Net) are part of every boundary that they cross; whoever holds one boundary has part of the next one already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..graph import JointGraph, Role
from ..memory import roots
from .problem import FlowProblem
from .tuning import Tuning

UNCROSSABLE = 2**80
"""Bytes of a value that may not be saved: no block ends where it is still to be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A stretch of the forward order, with its part of backward."""

    values: tuple[int, ...]
    """The values it computes, in order."""
    by_products: tuple[int, ...]
    """Values computed from them that only backward needs, such as a dropout's mask."""
    crossing: frozenset[int]
    """The values that exist after it and that later blocks read."""
    backward: tuple[int, ...]
    """Backward's nodes, by position, that belong to it."""


def find_blocks(problem: FlowProblem, tuning: Tuning) -> tuple[Block, ...]:
    """Split the forward order where few bytes cross."""
    ends = _last_forward_use(problem)
    forward = [v for v, i in enumerate(problem.bases) if problem.graph.roles[i] is Role.FORWARD]
    crossing_bytes = _crossing_bytes(problem, forward, ends)
    content = [problem.num_bytes(v) for v in forward]
    cuts = _merge(content, crossing_bytes, _narrow_points(crossing_bytes, content, tuning), tuning)
    return _blocks(problem, forward, cuts, ends)


def _last_forward_use(problem: FlowProblem) -> list[int]:
    """Per value, the last value of forward that reads it; its own number if none does."""
    roles, bases = problem.graph.roles, problem.bases
    last = list(range(len(bases)))
    for v, inputs in enumerate(problem.inputs):
        if roles[bases[v]] is Role.FORWARD:
            for u in inputs:
                last[u] = max(last[u], v)
    # The views of a value are joined to it, but what reads them is not: follow every node once more.
    for i, inputs in enumerate(problem.graph.inputs):
        reader = problem.value_of.get(i)
        if reader is not None and roles[i] is Role.FORWARD:
            for j in inputs:
                if j in problem.value_of:
                    last[problem.value_of[j]] = max(last[problem.value_of[j]], reader)
    return last


def _crossing_bytes(problem: FlowProblem, forward: Sequence[int], last: Sequence[int]) -> list[int]:
    """Per forward value, the bytes that cross the point after it; immense where something crosses that has no copy."""
    position = {v: k for k, v in enumerate(forward)}
    changes = [0] * (len(forward) + 1)
    for k, v in enumerate(forward):
        end = position.get(last[v], k)
        if end > k:
            num_bytes = problem.num_bytes(v) if problem.constraint(v).no_save is None else UNCROSSABLE
            changes[k] += num_bytes
            changes[end] -= num_bytes
    return list(accumulate(changes[:-1]))


def _narrow_points(crossing: Sequence[int], content: Sequence[int], tuning: Tuning) -> list[int]:
    """The last point of each valley, and in long stretches without one every point at which no neighbour is lower."""
    lows = [
        k
        for k in range(len(crossing) - 1)
        if crossing[k] <= min(crossing[k - 1] if k else UNCROSSABLE, crossing[k + 1]) and crossing[k] < UNCROSSABLE
    ]
    valleys = _valleys(crossing)
    bounds = [-1, *valleys, len(crossing) - 1]
    longest = sum(content) / tuning.few_blocks
    flat = [
        k
        for start, end in pairwise(bounds)
        if sum(content[start + 1 : end + 1]) > longest
        for k in lows
        if start < k < end
    ]
    return _without_hills(crossing, sorted({*valleys, *flat}), tuning.highest_hill)


def _without_hills(crossing: Sequence[int], points: Sequence[int], highest_hill: float) -> list[int]:
    """Drop points on a hill between two valleys that are far narrower."""
    before, after = _lower_before(crossing, points), _lower_before(crossing, points[::-1])[::-1]
    return [
        k
        for k, left, right in zip(points, before, after, strict=True)
        if crossing[k] <= highest_hill * max(left, right)
    ]


def _lower_before(crossing: Sequence[int], points: Sequence[int]) -> list[float]:
    """Per point, the bytes at the nearest point before it where fewer cross; beyond measure if there is none."""
    lower: list[float] = []
    rising: list[int] = []
    for k in points:
        while rising and crossing[rising[-1]] >= crossing[k]:
            rising.pop()
        lower.append(crossing[rising[-1]] if rising else math.inf)
        rising.append(k)
    return lower


def _valleys(crossing: Sequence[int]) -> list[int]:
    """The last point of each valley: fewer bytes cross than before it and after it."""
    points, falling = [], True
    for k in range(len(crossing) - 1):
        if crossing[k + 1] > crossing[k]:
            if falling and crossing[k] < UNCROSSABLE:
                points.append(k)
            falling = False
        elif crossing[k + 1] < crossing[k]:
            falling = True
    return points


def _merge(sizes: Sequence[int], crossing: Sequence[int], points: list[int], tuning: Tuning) -> list[int]:
    """Drop boundaries that enclose too little, then the least useful ones until there are few enough."""
    total = [0, *accumulate(sizes)]

    def content(start: int, end: int) -> int:
        return total[end + 1] - total[start + 1]

    kept: list[int] = []
    for point in points:
        start = kept[-1] if kept else -1
        if kept and content(start, point) < tuning.min_content * crossing[point]:
            if crossing[point] < crossing[start]:
                kept[-1] = point
            continue
        kept.append(point)
    while len(kept) >= tuning.max_blocks:
        bounds = [-1, *kept, len(sizes) - 1]
        merged = [content(bounds[k], bounds[k + 2]) for k in range(len(kept))]
        del kept[merged.index(min(merged))]
    return kept


def _blocks(
    problem: FlowProblem, forward: Sequence[int], cuts: Sequence[int], last: Sequence[int]
) -> tuple[Block, ...]:
    bounds = [*cuts, len(forward) - 1]
    starts = [0, *(end + 1 for end in cuts)]
    values = [tuple(forward[start : end + 1]) for start, end in zip(starts, bounds, strict=True)]
    block_of = {v: k for k, members in enumerate(values) for v in members}
    crossings: list[frozenset[int]] = []
    alive: set[int] = set()
    for k, members in enumerate(values):
        alive.update(members)
        alive = {v for v in alive if block_of.get(last[v], k) > k}
        crossings.append(frozenset(alive))
    backward = _backward_of_blocks(problem, len(values), block_of)
    by_products = _by_products(problem, len(values), block_of)
    return tuple(Block(*row) for row in zip(values, by_products, crossings, backward, strict=True))


def _by_products(problem: FlowProblem, num_blocks: int, block_of: dict[int, int]) -> list[tuple[int, ...]]:
    """Give what only backward needs to the last block that it is computed from."""
    found: list[list[int]] = [[] for _ in range(num_blocks)]
    of = dict(block_of)
    for v, inputs in enumerate(problem.inputs):
        if v not in of:
            of[v] = max((of[u] for u in inputs), default=0)
            found[of[v]].append(v)
    return [tuple(values) for values in found]


def _backward_of_blocks(problem: FlowProblem, num_blocks: int, block_of: dict[int, int]) -> list[tuple[int, ...]]:
    """Give each node of backward to the block that it undoes.

    Backward undoes blocks in reverse order, with stragglers: the gradient of something that many blocks read is
    computed early, from values of an early block. So a node stands where the latest block is that a node from there on
    still reads a value of. A constant that the loss and every layer's gradient read says nothing about the place. What
    reads no value of any block belongs to the one before: nothing has to be recomputed for it first.
    """
    nodes: list[list[int]] = [[] for _ in range(num_blocks)]
    current, waiting = 0, []
    constants = _made_of_nothing(problem.graph)
    for root in reversed(roots(problem.graph)):
        waiting.append(root)
        if read := _forward_values_read(problem.graph, problem, root, constants):
            current = max([current, *(block_of.get(v, 0) for v in read)])
            nodes[current] += waiting
            waiting = []
    nodes[current] += waiting
    return [tuple(reversed(group)) for group in nodes]


def _made_of_nothing(graph: JointGraph) -> set[int]:
    """Nodes whose results depend on no input: filled tensors, ranges, and what is computed from them."""
    found: set[int] = set()
    for i, inputs in enumerate(graph.inputs):
        if graph.roles[i] in (Role.FORWARD, Role.EITHER, Role.CONSTANT) and found.issuperset(inputs):
            found.add(i)
    return found


def _forward_values_read(graph: JointGraph, problem: FlowProblem, root: int, constants: set[int]) -> list[int]:
    """The forward values a backward node reads, seen through what only backward computes; constants do not count."""
    found: list[int] = []
    stack = list(graph.inputs[root])
    while stack:
        j = stack.pop()
        if j not in problem.value_of or j in constants:
            continue
        if graph.roles[j] is Role.EITHER:
            stack.extend(graph.inputs[j])
        else:
            found.append(problem.value_of[j])
    return found
