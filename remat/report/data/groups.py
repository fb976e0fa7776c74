"""Thousands of nodes as a hundred boxes.

A box is a run of nodes that are executed one after the other and share a region and module path. Since boxes follow the
order of execution, no two of them depend on each other in a circle, whatever they are grouped by. Paths are cut shorter
and shorter until there are few enough boxes; what is still too many is cut into even pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .model import FORWARD_ROLES, GraphReport, NodeRow

MAX_BOXES = 240
"""How many boxes a picture has at most, forward and backward together."""

MAX_DEPTH = 12
"""How many parts of a path are looked at."""


@dataclass(frozen=True, slots=True)
class Box:
    """Nodes that run one after the other and are drawn as one."""

    title: str
    region: str
    """The region path that all of them share; empty outside regions."""
    in_forward: bool
    nodes: tuple[str, ...]
    bytes_by_state: dict[str, int]
    """Bytes that are saved, recomputed or offloaded here; to make a view again takes none."""

    @property
    def state(self) -> str:
        """The decision on most of its bytes; empty if there is none."""
        return max(self.bytes_by_state, key=lambda s: (self.bytes_by_state[s], s), default="")


@dataclass(frozen=True, slots=True)
class Arrow:
    """Values that one box computes and another one reads."""

    source: int
    target: int
    num_bytes: int
    crosses: bool
    """From forward to backward."""
    values: tuple[str, ...]


def boxes_of(graph: GraphReport, limit: int = MAX_BOXES) -> tuple[Box, ...]:
    """Group the nodes that run, in the order in which they run; each half gets half of the boxes."""
    forward = [graph.row[name] for name in graph.forward]
    backward = [graph.row[name] for name in graph.plan.order]
    return (
        *(_box(graph, rows, in_forward=True) for rows in _grouped(forward, limit // 2, adopts=False)),
        *(_box(graph, rows, in_forward=False) for rows in _grouped(backward, limit // 2, adopts=True)),
    )


def _grouped(half: Sequence[NodeRow], limit: int, *, adopts: bool) -> list[list[NodeRow]]:
    """Cut a half into runs, with paths as long as the limit allows."""
    if len(half) <= limit:
        return [[row] for row in half]
    for depth in range(MAX_DEPTH, 0, -1):
        groups = _runs(half, depth, adopts)
        if len(groups) <= limit:
            return groups
    return _pieces(groups, limit)


def _runs(half: Sequence[NodeRow], depth: int, adopts: bool) -> list[list[NodeRow]]:
    """Neighbours with the same path.

    Backward's sums of gradients belong to no module. There a node without a path goes with what ran before it.
    """
    groups: list[list[NodeRow]] = []
    current: tuple[str, str] | None = None
    for row in half:
        key = ("/".join(row.region.split("/")[:depth]), ".".join(row.module.split(".")[:depth]))
        if groups and (key == current or (adopts and key == ("", ""))):
            groups[-1].append(row)
        else:
            groups.append([row])
            current = key
    return groups


def _pieces(groups: Sequence[list[NodeRow]], number: int) -> list[list[NodeRow]]:
    """Join neighbours so that a number of groups is left."""
    size = -(-len(groups) // max(number, 1))
    return [[row for group in groups[k : k + size] for row in group] for k in range(0, len(groups), size)]


def _box(graph: GraphReport, rows: Sequence[NodeRow], *, in_forward: bool) -> Box:
    totals: dict[str, int] = {}
    for row in rows:
        state = graph.state_of(row.name) if in_forward else "recomputed" * (row.role in FORWARD_ROLES)
        if state and not (row.is_view and state == "recomputed"):
            totals[state] = totals.get(state, 0) + row.num_bytes
    return Box(
        title=_title([row for row in rows if in_forward or row.region or row.module] or rows, len(rows)),
        region=_common("/", [row.region for row in rows if in_forward or row.region or row.module]),
        in_forward=in_forward,
        nodes=tuple(row.name for row in rows),
        bytes_by_state=totals,
    )


def _title(rows: Sequence[NodeRow], num_rows: int) -> str:
    if num_rows == 1:
        row = rows[0]
        return f"{row.name}: {row.op.removesuffix('.default')}" + (f" ({row.label})" if row.label else "")
    region, module = _common("/", [row.region for row in rows]), _common(".", [row.module for row in rows])
    path = f"{region} ({module})" if region and module else region or module
    return f"{path or f'{rows[0].name} … {rows[-1].name}'} · {num_rows} ops"


def _common(separator: str, paths: Sequence[str]) -> str:
    """The part that paths have in common."""
    if not paths:
        return ""
    first, *others = dict.fromkeys(paths)
    parts = first.split(separator) if first else []
    for other in others:
        pairs = zip(parts, other.split(separator), strict=False)
        parts = [a for a, _ in _while_equal(pairs)]
    return separator.join(parts)


def _while_equal(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for a, b in pairs:
        if a != b:
            return
        yield a, b


def arrows_of(graph: GraphReport, boxes: Sequence[Box]) -> tuple[Arrow, ...]:
    """Who reads whose results; a reader reads the latest copy of a value."""
    latest: dict[str, int] = {}
    found: dict[tuple[int, int], dict[str, int]] = {}
    for number, box in enumerate(boxes):
        for name in box.nodes:
            for read in graph.row[name].inputs:
                source = latest.get(read)
                if source is not None and source != number:
                    row = graph.row[graph.row[read].base or read]
                    found.setdefault((source, number), {})[row.name] = row.num_bytes
            latest[name] = number
    return tuple(
        Arrow(a, b, sum(values.values()), boxes[a].in_forward and not boxes[b].in_forward, tuple(values))
        for (a, b), values in sorted(found.items())
    )
