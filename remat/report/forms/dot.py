"""The graphs in Graphviz's language: `dot -Tsvg report.dot`. Nothing is needed to write it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..data import Arrow, Box, GraphReport, ReportData, arrows_of, boxes_of, printable, size

COLOURS = {"saved": "#9ec5fe", "recomputed": "#ffd59e", "offloaded": "#d0b3ff", "": "#eeeeee"}


def dot(report: ReportData) -> str:
    """One digraph; each joint graph is a cluster with a cluster for each of its halves, regions inside."""
    lines = [
        "digraph remat {",
        '  graph [rankdir="TB", fontname="sans-serif", compound="true"];',
        '  node [shape="box", style="filled,rounded", fontname="sans-serif", fontsize="10"];',
        '  edge [color="#888888", arrowsize="0.6"];',
    ]
    for number, graph in enumerate(report.graphs):
        lines += _graph(graph, number)
    return "\n".join([*lines, "}", ""])


def line_width(num_bytes: int) -> float:
    """How thick a line is for what it carries: one for up to a KiB, one more for every 16 times as much."""
    return round(1 + max(0.0, math.log2(max(num_bytes, 1) / 1024)) / 4, 2)


def _graph(graph: GraphReport, number: int) -> Iterator[str]:
    boxes = boxes_of(graph)
    yield f'  subgraph "cluster_{number}" {{'
    yield f"    label={_quoted(f'graph {number}: {graph.plan.num_nodes} nodes')};"
    for half, in_forward in (("forward", True), ("backward", False)):
        yield f'    subgraph "cluster_{number}_{half}" {{'
        yield f"      label={_quoted(half)};"
        members = [k for k, box in enumerate(boxes) if box.in_forward is in_forward]
        yield from _regions(boxes, members, (), f"{number}_{half}", "      ")
        yield "    }"
    yield from (_arrow(arrow, number) for arrow in arrows_of(graph, boxes))
    yield "  }"


def _regions(
    boxes: Sequence[Box], members: Sequence[int], path: tuple[str, ...], prefix: str, indent: str
) -> Iterator[str]:
    """The boxes of a region, and its inner regions as clusters."""
    inner: dict[str, list[int]] = {}
    for k in members:
        parts = tuple(boxes[k].region.split("/")) if boxes[k].region else ()
        if len(parts) > len(path):
            inner.setdefault(parts[len(path)], []).append(k)
        else:
            yield indent + _box(boxes[k], k, prefix)
    for place, (name, within) in enumerate(inner.items()):
        yield f'{indent}subgraph "cluster_{prefix}_{place}" {{'
        yield f'{indent}  label={_quoted(name)}; style="rounded"; color="#999999";'
        yield from _regions(boxes, within, (*path, name), f"{prefix}_{place}", indent + "  ")
        yield f"{indent}}}"


def _box(box: Box, k: int, prefix: str) -> str:
    totals = "".join(f"\n{state} {size(n)}" for state, n in sorted(box.bytes_by_state.items()))
    graph_number = prefix.split("_")[0]
    return f'"{graph_number}_{k}" [label={_quoted(box.title + totals)}, fillcolor="{COLOURS[box.state]}"];'


def _arrow(arrow: Arrow, number: int) -> str:
    colour = ', color="#1f6fd0"' if arrow.crosses else ""
    tooltip = _quoted(f"{', '.join(arrow.values[:5])}: {size(arrow.num_bytes)}")
    width = line_width(arrow.num_bytes)
    return (
        f'    "{number}_{arrow.source}" -> "{number}_{arrow.target}" [penwidth="{width}"{colour}, tooltip={tooltip}];'
    )


def _quoted(text: str) -> str:
    r"""A DOT string: only quotes and backslashes are special in it, and `\n` starts a line."""
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'
