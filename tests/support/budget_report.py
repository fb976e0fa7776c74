"""What benchmarks/budget.py measured: the data, the criteria it is judged by, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from remat.report.forms.chart import Mark, Series, chart
from support.measure import geometric_mean

MIB = 2**20

MAX_OVER_BUDGET = 1.02
MAX_RISE = 1.02
"""What a smaller budget may add to the measured peak: nothing, but for the tolerance of the budget itself."""
PREDICTED_RANGE = {"aot_eager": (0.95, 1.05), "inductor": (0.85, 1.15)}
MAX_OF_CHECKPOINT, MAX_OF_TORCH = 0.8, 0.5
MAX_TIME_GEOMEAN, MAX_TIME_EACH, MAX_TIME_OF_CHECKPOINT = 0.95, 1.03, 0.9
MAX_PLANNING_SECONDS, MAX_PLANNING_RATIO = 3.0, 0.5
MIN_ACTIVATIONS_OVER_GRADIENTS = 8.0

NO_BUDGET, MINIMUM, EAGER, CHECKPOINT = "no budget", "minimum", "eager", "checkpoint"


@dataclass(frozen=True)
class Cell:
    """One way to run a model's step."""

    side: str
    """"remat", "torch" (torch.compile with its own budget, or of checkpointed layers) or "eager"."""
    label: str
    budget_bytes: int | None = None
    """The bound that was asked for; None if there was none, or if it could not be met on purpose."""
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    planner: str = ""
    compile_seconds: float = 0.0
    difference: float = math.nan
    """Of all gradients from the reference's, relative; 0.0 if they are equal bit for bit."""
    agrees: bool = True
    error: str = ""
    """Why there is nothing to measure."""
    time_ratio: float | None = None
    """Step time over that of remat without a budget."""
    rival: str = ""
    """Name of the peer whose measured peak is this cell's budget."""
    rival_ratio: float | None = None
    """Step time over that peer's."""

    @property
    def name(self) -> str:
        """Side and label."""
        return f"{self.side} {self.label}"

    @property
    def over_budget(self) -> float | None:
        """Measured over budget."""
        if self.budget_bytes is None or self.measured_bytes is None:
            return None
        return self.measured_bytes / self.budget_bytes

    @property
    def predicted_over_measured(self) -> float | None:
        """How far the simulator was off."""
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes


@dataclass(frozen=True)
class Sheet:
    """Everything about one model with one inner compiler."""

    model: str
    inner: str
    size: str
    gradient_bytes: int
    whole_bytes: int
    """Measured peak without recomputation, in eager."""
    cells: tuple[Cell, ...]

    @staticmethod
    def from_dict(data: dict) -> Sheet:
        """Read what `dataclasses.asdict` made, after a way through JSON."""
        return Sheet(**{**data, "cells": tuple(Cell(**cell) for cell in data["cells"])})

    def of(self, side: str) -> tuple[Cell, ...]:
        """The cells of one side."""
        return tuple(cell for cell in self.cells if cell.side == side)

    def find(self, side: str, label: str) -> Cell | None:
        """One cell, if it was measured."""
        found = (c for c in self.of(side) if c.label == label and c.measured_bytes is not None)
        return next(found, None)

    @property
    def ladder(self) -> tuple[Cell, ...]:
        """The cells of remat from the largest budget to the minimum, without those that raised or have a rival."""
        cells = [c for c in self.of("remat") if not c.rival and c.measured_bytes is not None]
        return tuple(sorted(cells, key=_by_budget))


def _by_budget(cell: Cell) -> float:
    if cell.label == NO_BUDGET:
        return -math.inf
    return math.inf if cell.budget_bytes is None else -cell.budget_bytes


# --- criteria -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One criterion: its figure, and whether it is met; None where nothing was measured."""

    criterion: str
    text: str
    met: bool | None

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        return f"{self.criterion:<8} {word:<12} {self.text}"


@dataclass(frozen=True)
class Planning:
    """Planning one deep model with a budget, in seconds."""

    num_layers: int
    num_nodes: int
    remat_seconds: float
    torch_seconds: float


def judge(sheets: Sequence[Sheet], planning: Planning | None) -> list[Verdict]:
    """Hold all sheets against the criteria."""
    return [*_honest(sheets), *_lower(sheets), *_faster(sheets), *_quick(planning), _same_results(sheets)]


def _at_most(criterion: str, what: str, figures: Iterable[tuple[float, str]], limit: float) -> Verdict:
    """Judge the worst of some figures, each with where it was found."""
    worst, where = max(figures, default=(math.nan, ""))
    if math.isnan(worst):
        return Verdict(criterion, f"{what} <= {limit:g}", None)
    return Verdict(criterion, f"{what}: worst {worst:.3f} at {where} (target <= {limit:g})", worst <= limit)


def _where(sheet: Sheet, cell: Cell) -> str:
    return f"{sheet.model} {sheet.inner} {cell.label}"


def _honest(sheets: Sequence[Sheet]) -> Iterator[Verdict]:
    cells = [(sheet, cell) for sheet in sheets for cell in sheet.of("remat")]
    over = [(cell.over_budget, _where(sheet, cell)) for sheet, cell in cells if cell.over_budget is not None]
    yield _at_most("Honest", "measured over budget", over, MAX_OVER_BUDGET)
    rises = [
        (later.measured_bytes / earlier.measured_bytes, _where(sheet, later))
        for sheet in sheets
        for earlier, later in zip(sheet.ladder, sheet.ladder[1:], strict=False)
    ]
    yield _at_most("Honest", "measured over that of the next larger budget", rises, MAX_RISE)
    for inner, (low, high) in PREDICTED_RANGE.items():
        ratios = [c.predicted_over_measured for s, c in cells if s.inner == inner and c.predicted_over_measured]
        text = f"predicted over measured, {inner}, within {low}..{high}"
        if not ratios:
            yield Verdict("Honest", text, None)
            continue
        found = f"{text}: {min(ratios):.3f}..{max(ratios):.3f}"
        yield Verdict("Honest", found, low <= min(ratios) and max(ratios) <= high)


def _lower(sheets: Sequence[Sheet]) -> Iterator[Verdict]:
    of_checkpoint, of_torch, num_budgets = [], [], []
    for sheet in sheets:
        minimum, checkpoint = sheet.find("remat", MINIMUM), sheet.find("eager", CHECKPOINT)
        theirs = [c.measured_bytes for c in sheet.of("torch") if c.measured_bytes and c.label != CHECKPOINT]
        if minimum and checkpoint and sheet.inner == "aot_eager":
            of_checkpoint.append((minimum.measured_bytes / checkpoint.measured_bytes, _where(sheet, minimum)))
        if minimum and theirs:
            of_torch.append((minimum.measured_bytes / min(theirs), _where(sheet, minimum)))
            num_budgets.append(len(theirs))
    yield _at_most("Lower", "minimum over eager per-layer checkpointing", of_checkpoint, MAX_OF_CHECKPOINT)
    # Fewer budgets of torch's make it look worse than it is: say how many it had.
    swept = f" at {min(num_budgets)} budgets" if num_budgets else ""
    yield _at_most("Lower", f"minimum over the lowest peak of torch.compile{swept}", of_torch, MAX_OF_TORCH)


def _faster(sheets: Sequence[Sheet]) -> Iterator[Verdict]:
    of_eager = _rival_ratios(sheets, lambda rival: rival == f"eager {CHECKPOINT}")
    of_checkpoint = _rival_ratios(sheets, lambda rival: rival == f"torch {CHECKPOINT}")
    of_torch = _rival_ratios(sheets, lambda rival: rival.startswith("torch") and rival != f"torch {CHECKPOINT}")
    text = "step time over torch.compile's at its own peaks"
    if of_torch:
        mean = geometric_mean(ratio for ratio, _ in of_torch)
        found = f"{text}: geometric mean {mean:.3f} of {len(of_torch)} (target <= {MAX_TIME_GEOMEAN:g})"
        yield Verdict("Faster", found, mean <= MAX_TIME_GEOMEAN)
    else:
        yield Verdict("Faster", f"{text}, geometric mean <= {MAX_TIME_GEOMEAN:g}", None)
    yield _at_most("Faster", text, of_torch, MAX_TIME_EACH)
    for whose, ratios in (("compiled", of_checkpoint), ("eager", of_eager)):
        yield _at_most("Faster", f"step time over {whose} checkpointing's at its peak", ratios, MAX_TIME_OF_CHECKPOINT)


def _rival_ratios(sheets: Sequence[Sheet], is_meant: Callable[[str], bool]) -> list[tuple[float, str]]:
    """Step times over some rivals' at their peaks; a plan that is not found is as bad as one that takes forever."""
    return [
        (cell.rival_ratio or math.inf, _where(sheet, cell))
        for sheet in sheets
        for cell in sheet.of("remat")
        if cell.rival and is_meant(cell.rival) and (cell.rival_ratio or cell.error)
    ]


def _quick(planning: Planning | None) -> Iterator[Verdict]:
    if planning is None:
        yield Verdict("Quick", f"planning takes <= {MAX_PLANNING_SECONDS:g} s, and its ratio to torch's", None)
        return
    graph = f"{planning.num_layers} layers, {planning.num_nodes} nodes"
    yield _at_most("Quick", "seconds to plan", [(planning.remat_seconds, graph)], MAX_PLANNING_SECONDS)
    ratio = planning.remat_seconds / planning.torch_seconds
    yield _at_most("Quick", "planning time over torch's", [(ratio, graph)], MAX_PLANNING_RATIO)


def _same_results(sheets: Sequence[Sheet]) -> Verdict:
    judged = [(s, c) for s in sheets for c in s.of("remat") if c.measured_bytes is not None]
    wrong = [_where(sheet, cell) for sheet, cell in judged if not cell.agrees]
    text = "gradients bit for bit (aot_eager) or up to rounding (inductor)"
    if not judged:
        return Verdict("Equal", text, None)
    return Verdict("Equal", f"{text}: {', '.join(wrong) or f'all {len(judged)} cells'}", not wrong)


def with_times(cell: Cell, time_ratio: float, rival_ratio: float | None) -> Cell:
    """A cell with its times filled in."""
    return replace(cell, time_ratio=time_ratio, rival_ratio=rival_ratio)


# --- text -----------------------------------------------------------------------------------------------------------


def table(sheet: Sheet) -> str:
    """A sheet as text."""
    ratio = sheet.whole_bytes / max(sheet.gradient_bytes, 1)
    small = "" if ratio >= MIN_ACTIVATIONS_OVER_GRADIENTS else f"  <- below {MIN_ACTIVATIONS_OVER_GRADIENTS:g} times"
    lines = [
        f"{sheet.model}, {sheet.inner}, size {sheet.size}: eager peak {sheet.whole_bytes / MIB:.1f} MiB, "
        f"{ratio:.1f} times the gradients' {sheet.gradient_bytes / MIB:.1f} MiB{small}",
        f"  {'':<25} | {'peak, MiB':^29} | {'ratio':^19} | {'step time over':^17} |",
        f"  {'':<25} | {'budget':>9} {'predicted':>9} {'measured':>9} | {'budget':>9} {'pred/meas':>9} | "
        f"{'no budget':>9} {'peer':>7} | planner, gradients",
    ]
    return "\n".join([*lines, *(_row(cell) for cell in sheet.cells), ""])


def _row(cell: Cell) -> str:
    name = f"{cell.side} {cell.label}"
    if cell.error:
        return f"  {name:<25} | {cell.error}"
    over = cell.over_budget
    flag = "  <- OVER" if over is not None and over > MAX_OVER_BUDGET else ""
    if not cell.agrees:
        flag += "  <- GRADIENTS DIFFER"
    exact = "equal" if cell.difference == 0.0 else "" if math.isnan(cell.difference) else f"{cell.difference:.1e}"
    return (
        f"  {name:<25} | {_mib(cell.budget_bytes)} {_mib(cell.predicted_bytes)} {_mib(cell.measured_bytes)} | "
        f"{_ratio(over, 9)} {_ratio(cell.predicted_over_measured, 9)} | "
        f"{_ratio(cell.time_ratio, 9)} {_ratio(cell.rival_ratio, 7)} | {cell.planner:<8} {exact}{flag}"
    )


def _mib(num_bytes: int | None) -> str:
    return f"{'':>9}" if num_bytes is None else f"{num_bytes / MIB:>9.2f}"


def _ratio(value: float | None, width: int) -> str:
    return f"{'':>{width}}" if value is None else f"{value:>{width}.3f}"


# --- plots ----------------------------------------------------------------------------------------------------------


def write_plots(sheet: Sheet, folder: Path) -> list[Path]:
    """Draw measured peak over budget and, if steps were timed, step time over measured peak."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"budget-{sheet.model}-{sheet.inner}"
    drawn = {f"{stem}-peak.svg": _peak_plot(sheet)}
    if any(cell.time_ratio for cell in sheet.cells):
        drawn[f"{stem}-time.svg"] = _time_plot(sheet)
    for name, text in drawn.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in drawn]


def _peak_plot(sheet: Sheet) -> str:
    cells = [cell for cell in sheet.ladder if cell.budget_bytes is not None]
    bounds = tuple(Mark(c.budget_bytes / MIB, c.budget_bytes / MIB) for c in cells)
    series = [
        Series("measured", tuple(Mark(c.budget_bytes / MIB, c.measured_bytes / MIB, _title(c)) for c in cells)),
        Series("predicted", tuple(Mark(c.budget_bytes / MIB, (c.predicted_bytes or 0) / MIB) for c in cells)),
        Series("the budget itself", bounds),
    ]
    title = f"{sheet.model}, {sheet.inner}: peak over budget"
    return chart(series, title=title, x_label="budget, MiB", y_label="activation peak, MiB")


def _time_plot(sheet: Sheet) -> str:
    named = (
        ("remat", "remat"),
        ("torch", "torch.compile, its own budget"),
        ("eager", "eager, and per-layer checkpoint"),
    )
    series = []
    for side, name in named:
        cells = [c for c in sheet.of(side) if c.measured_bytes is not None and c.time_ratio is not None]
        marks = [Mark(c.measured_bytes / MIB, c.time_ratio, _title(c)) for c in cells]
        if marks:
            # Torch's line follows its budgets, so that one sees it turn back.
            order = tuple(sorted(marks, key=lambda mark: -mark.x)) if side == "remat" else tuple(marks)
            series.append(Series(name, order, is_line=side != "eager"))
    title = f"{sheet.model}, {sheet.inner}: time for memory"
    return chart(series, title=title, x_label="measured activation peak, MiB", y_label="step time over no budget")


def _title(cell: Cell) -> str:
    time = "" if cell.time_ratio is None else f", {cell.time_ratio:.3f} of the time"
    return f"{cell.side} {cell.label}: {(cell.measured_bytes or 0) / MIB:.1f} MiB{time}"
