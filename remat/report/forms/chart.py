"""A line chart as SVG text: axes, marks with hover titles, a legend, and colours for light and dark surroundings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 44, 56
NUM_TICKS = 6
DIGIT_WIDTH = 7.5
"""How wide a digit of a label is at most."""

# Told apart by colour and by mark, so that the chart reads without colours too.
COLOURS = ("#1f6fd0", "#c2410c", "#15803d", "#9333ea", "#0e7490", "#a16207", "#be185d", "#525252")
MARKS = ("circle", "square", "diamond", "triangle")

STYLE = """
  svg { color-scheme: light dark; font: 12px system-ui, sans-serif; }
  .paper { fill: #ffffff; } .ink { fill: #1f2328; } .quiet { fill: #59636e; }
  .axis { stroke: #59636e; } .grid { stroke: #d1d9e0; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; } .ink { fill: #f0f6fc; } .quiet { fill: #9198a1; }
    .axis { stroke: #9198a1; } .grid { stroke: #3d444d; }
    .series { filter: brightness(1.5); }
  }
  .mark { stroke-width: 1; } .mark:hover { stroke-width: 4; }
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """One figure: where it stands and what hovering over it says."""

    x: float
    y: float
    title: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Marks that belong together."""

    name: str
    marks: tuple[Mark, ...]
    is_line: bool = True
    """Join the marks, in their order."""


def chart(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """Draw series over common axes that start at zero."""
    marks = [mark for one in series for mark in one.marks]
    x_ticks = ticks(max((mark.x for mark in marks), default=0.0))
    y_ticks = ticks(max((mark.y for mark in marks), default=0.0))
    frame = _Frame(x_ticks[-1], y_ticks[-1])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="ink" x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        *_axes(frame, x_ticks, y_ticks, x_label, y_label),
    ]
    for number, one in enumerate(series):
        lines += _series(frame, one, number)
    lines += _legend(frame, series)
    return "\n".join([*lines, "</svg>", ""])


def ticks(highest: float) -> list[float]:
    """Round numbers from zero that reach to a value, a handful of them."""
    if not highest > 0:
        return [0.0, 1.0]
    rough = highest / (NUM_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Turns values into places on the page."""

    x_end: float
    y_end: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.x_end

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.y_end


def _axes(
    frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in x_ticks:
        x = frame.x(value)
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        label = f"{value:g}"
        x = min(x, WIDTH - 1 - DIGIT_WIDTH * len(label) / 2)  # the last one would run over the edge
        yield f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>'
    for value in y_ticks:
        y = frame.y(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    yield f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    middle = (LEFT + right) / 2
    yield f'<text class="ink" x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>'
    middle = (TOP + bottom) / 2
    yield (
        f'<text class="ink" x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">'
        f"{escape(y_label)}</text>"
    )


def _series(frame: _Frame, one: Series, number: int) -> Iterator[str]:
    colour = COLOURS[number % len(COLOURS)]
    places = [(frame.x(mark.x), frame.y(mark.y)) for mark in one.marks]
    yield f'<g class="series" stroke="{colour}" fill="{colour}">'
    if one.is_line and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline fill="none" stroke-width="1.5" points="{path}"/>'
    for mark, (x, y) in zip(one.marks, places, strict=True):
        title = f"<title>{escape(mark.title)}</title>" if mark.title else ""
        yield _shape(x, y, number).replace("/>", f">{title}</path>")
    yield "</g>"


def _shape(x: float, y: float, number: int) -> str:
    outlines = {
        "circle": "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        "square": "m-4 -4h8v8h-8z",
        "diamond": "m0 -5l5 5l-5 5l-5 -5z",
        "triangle": "m0 -5l5 9h-10z",
    }
    return f'<path class="mark" d="M{x:.1f} {y:.1f}{outlines[MARKS[number % len(MARKS)]]}"/>'


def _legend(frame: _Frame, series: Sequence[Series]) -> Iterator[str]:
    """Name the series in the upper corner where fewer marks are in the way."""
    upper = [frame.x(mark.x) for one in series for mark in one.marks if frame.y(mark.y) < HEIGHT / 2]
    is_left = 2 * sum(x < WIDTH / 2 for x in upper) < len(upper)
    edge, inwards, anchor = (LEFT, 1, "start") if is_left else (WIDTH - RIGHT, -1, "end")
    named = [(number, one.name) for number, one in enumerate(series) if one.name]
    for row, (number, name) in enumerate(named):
        y = TOP + 14 + 18 * row
        colour = COLOURS[number % len(COLOURS)]
        yield f'<g class="series" stroke="{colour}" fill="{colour}">{_shape(edge + 14 * inwards, y - 4, number)}</g>'
        yield f'<text class="ink" x="{edge + 26 * inwards}" y="{y}" text-anchor="{anchor}">{escape(name)}</text>'
