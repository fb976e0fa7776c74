"""The graphs as a picture: forward runs down on the left, backward up on the right, and what is kept crosses over.

Each box has a row of its own, in the order of execution, so a picture of any graph is as tall as it has boxes and no
layout has to be searched for. Regions are frames around the rows they cover.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ..data import Arrow, Box, GraphReport, ReportData, arrows_of, boxes_of, printable, size
from .dot import line_width

ROW, BOX_WIDTH, BOX_HEIGHT = 28, 330, 22
LEFT, GAP, TOP = 120, 240, 64
"""Room for arrows that skip rows, between the columns, and above them."""
INDENT = 7
MAX_TITLE = 40
MIN_SHARE = 6
STATES = ("saved", "offloaded", "recomputed")
WIDTH = 2 * LEFT + 2 * BOX_WIDTH + GAP

STYLE = """
  .g-paper { fill: #ffffff; } .g-ink { fill: #1f2328; } .g-quiet { fill: #59636e; }
  .g-text { font: 12px system-ui, sans-serif; } .g-title { font: 600 15px system-ui, sans-serif; }
  .g-small { font: 10px system-ui, sans-serif; }
  .g-box { stroke: #8c959f; fill: #f6f8fa; } .g-region { fill: none; stroke: #afb8c1; stroke-dasharray: 4 3; }
  .g-saved { fill: #cfe2ff; } .g-recomputed { fill: #ffe5c2; } .g-offloaded { fill: #e6d9ff; }
  .g-arrow { fill: none; stroke: #8c959f; stroke-opacity: .55; } .g-kept { stroke: #1f6fd0; stroke-opacity: .45; }
  .g-arrow:hover { stroke-opacity: 1; }
  @media (prefers-color-scheme: dark) {
    .g-paper { fill: #0d1117; } .g-ink { fill: #f0f6fc; } .g-quiet { fill: #9198a1; }
    .g-box { stroke: #656c76; fill: #212830; } .g-region { stroke: #656c76; }
    .g-saved { fill: #123a6b; } .g-recomputed { fill: #663c00; } .g-offloaded { fill: #432a7a; }
    .g-kept { stroke: #58a6ff; }
  }
"""


def svg(report: ReportData) -> str:
    """All graphs, one below the other."""
    parts, top = [], 0
    for number, graph in enumerate(report.graphs):
        boxes = boxes_of(graph)
        parts += list(_graph(graph, boxes, number, top))
        top += _height(boxes)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {max(top, 1)}" width="{WIDTH}" '
            f'height="{max(top, 1)}" role="img" aria-label="forward and backward graphs, coloured by decision">',
            f"<style>{STYLE}</style>",
            f'<rect class="g-paper" width="{WIDTH}" height="{max(top, 1)}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _num_rows(boxes: Sequence[Box]) -> int:
    num_forward = sum(box.in_forward for box in boxes)
    return max(num_forward, len(boxes) - num_forward)


def _height(boxes: Sequence[Box]) -> int:
    return TOP + ROW * _num_rows(boxes) + 24


def _graph(graph: GraphReport, boxes: Sequence[Box], number: int, top: int) -> Iterator[str]:
    places = _places(boxes, top + TOP)
    title = f"graph {number}: saved {size(graph.plan.saved_bytes)}, peak {size(graph.plan.peak.num_bytes)}"
    yield f'<text class="g-ink g-title" x="{LEFT}" y="{top + 22}">{escape(title)}</text>'
    yield f'<text class="g-quiet g-text" x="{LEFT}" y="{top + 48}">forward ↓</text>'
    yield f'<text class="g-quiet g-text" x="{LEFT + BOX_WIDTH + GAP}" y="{top + 48}">backward ↑</text>'
    yield from _legend(top)
    yield from _frames(boxes, places)
    for arrow in arrows_of(graph, boxes):
        yield _arrow(arrow, places, boxes)
    for box, place in zip(boxes, places, strict=True):
        yield from _box(box, *place)


def _legend(top: int) -> Iterator[str]:
    for k, state in enumerate(STATES):
        x = WIDTH - LEFT - 290 + 100 * k
        yield f'<rect class="g-box g-{state}" x="{x}" y="{top + 12}" width="12" height="12" rx="2"/>'
        yield f'<text class="g-ink g-text" x="{x + 17}" y="{top + 22}">{state}</text>'


def _places(boxes: Sequence[Box], top: int) -> list[tuple[int, int]]:
    """The upper left corner of each box."""
    bottom = top + ROW * (_num_rows(boxes) - 1)
    places, num_forward = [], 0
    for k, box in enumerate(boxes):
        if box.in_forward:
            places.append((LEFT, top + ROW * k))
            num_forward += 1
        else:
            places.append((LEFT + BOX_WIDTH + GAP, bottom - ROW * (k - num_forward)))
    return places


def _box(box: Box, x: int, y: int) -> Iterator[str]:
    title = printable(box.title)
    shown = title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…"
    totals = ", ".join(f"{state} {size(n)}" for state, n in sorted(box.bytes_by_state.items()))
    hover = f"{title}\n{totals}\n{', '.join(box.nodes[:12])}{' …' if len(box.nodes) > 12 else ''}"
    yield f"<g><title>{escape(_xml(hover))}</title>"
    yield f'<rect class="g-box" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"/>'
    yield from _shares(box, x, y)
    yield f'<text class="g-ink g-text" x="{x + 8}" y="{y + 15}">{escape(_xml(shown))}</text>'
    if box.state:
        total = size(sum(box.bytes_by_state.values()))
        yield f'<text class="g-quiet g-small" text-anchor="end" x="{x + BOX_WIDTH - 6}" y="{y + 15}">{total}</text>'
    yield "</g>"


def _shares(box: Box, x: int, y: int) -> Iterator[str]:
    """Fill a box with the colours of its decisions, by bytes; what is kept comes first and is never too thin to see."""
    found = [(state, box.bytes_by_state[state]) for state in STATES if state in box.bytes_by_state]
    total, room = max(sum(n for _, n in found), 1), BOX_WIDTH - 2 - MIN_SHARE * len(found)
    at = float(x + 1)
    for state, num_bytes in found:
        share = MIN_SHARE + room * num_bytes / total if sum(n for _, n in found) else (BOX_WIDTH - 2) / len(found)
        yield f'<rect class="g-{state}" x="{at:.1f}" y="{y + 1}" width="{share:.1f}" height="{BOX_HEIGHT - 2}" rx="3"/>'
        at += share


def _arrow(arrow: Arrow, places: Sequence[tuple[int, int]], boxes: Sequence[Box]) -> str:
    (x1, y1), (x2, y2) = places[arrow.source], places[arrow.target]
    y1, y2 = y1 + BOX_HEIGHT // 2, y2 + BOX_HEIGHT // 2
    if arrow.crosses:
        x1, middle = x1 + BOX_WIDTH, LEFT + BOX_WIDTH + GAP // 2
        path = f"M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"
    else:
        out = -1 if boxes[arrow.source].in_forward else 1
        edge = x1 if out < 0 else x1 + BOX_WIDTH
        bow = edge + out * min(LEFT - 12, 10 + abs(y2 - y1) // 8)
        path = f"M{edge} {y1}C{bow} {y1} {bow} {y2} {edge} {y2}"
    kept = " g-kept" if arrow.crosses else ""
    names = ", ".join(arrow.values[:5]) + (" …" if len(arrow.values) > 5 else "")
    title = escape(_xml(printable(f"{names}: {size(arrow.num_bytes)}")))
    # What stays within a half is drawn thin: a table that every layer reads would hide all else.
    width = line_width(arrow.num_bytes) if arrow.crosses else 1.0
    return f'<path class="g-arrow{kept}" stroke-width="{width}" d="{path}"><title>{title}</title></path>'


def _frames(boxes: Sequence[Box], places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """A frame around every stretch of rows that belongs to one region, inner ones closer to the boxes."""
    paths = [(box.in_forward, *box.region.split("/")) if box.region else (box.in_forward,) for box in boxes]
    deepest = max((len(path) for path in paths), default=1)
    for depth in range(2, deepest + 1):
        start = 0
        for k in range(1, len(boxes) + 1):
            if k < len(boxes) and paths[k][:depth] == paths[start][:depth]:
                continue
            if len(paths[start]) >= depth:
                yield _frame(str(paths[start][depth - 1]), places[start:k], INDENT * (deepest - depth + 1))
            start = k


def _frame(name: str, places: Sequence[tuple[int, int]], margin: int) -> str:
    ys = [y for _, y in places]
    x, y, height = places[0][0] - margin, min(ys) - 2, max(ys) - min(ys) + BOX_HEIGHT + 4
    title = escape(_xml(printable(name)))
    return (
        f'<rect class="g-region" x="{x}" y="{y}" width="{BOX_WIDTH + 2 * margin}" height="{height}" rx="6">'
        f"<title>region {title}</title></rect>"
    )


def _xml(text: str) -> str:
    """Text without the characters that XML forbids even when escaped; printable text has none but surrogates."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\ud800" <= c <= "\udfff") else "�" for c in text)
