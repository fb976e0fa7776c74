"""How the budget benchmark judges what it measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.budget_report import CHECKPOINT, MINIMUM, NO_BUDGET, Cell, Planning, Sheet, judge, table, write_plots

MIB = 2**20


def remat_cell(label: str, budget: float | None, measured: float, **more: object) -> Cell:
    """A cell of remat's with figures in MiB, predicted as measured."""
    budget_bytes = None if budget is None else round(budget * MIB)
    num_bytes = round(measured * MIB)
    return Cell("remat", label, budget_bytes, num_bytes, num_bytes, difference=0.0, **more)


GOOD = Sheet(
    model="toy",
    inner="aot_eager",
    size="tiny",
    gradient_bytes=MIB,
    whole_bytes=10 * MIB,
    cells=(
        remat_cell(NO_BUDGET, None, 10, time_ratio=1.0),
        remat_cell("0.9", 9, 8.9, time_ratio=1.0),
        remat_cell("0.5", 5, 5, time_ratio=1.1),
        remat_cell(MINIMUM, None, 2, time_ratio=1.3),
        Cell("eager", CHECKPOINT, measured_bytes=3 * MIB, time_ratio=1.4),
        remat_cell("at eager checkpoint", 3, 3, time_ratio=1.2, rival=f"eager {CHECKPOINT}", rival_ratio=0.86),
        remat_cell("at torch checkpoint", 3, 3, time_ratio=1.2, rival=f"torch {CHECKPOINT}", rival_ratio=0.85),
    ),
)
TORCH = replace(
    GOOD,
    inner="inductor",
    cells=(
        *GOOD.cells[:4],
        Cell("torch", "1", measured_bytes=8 * MIB, time_ratio=1.0),
        Cell("torch", "0.2", measured_bytes=4 * MIB, time_ratio=1.5),
        remat_cell("at torch 1", 8, 8, rival="torch 1", rival_ratio=0.9),
        remat_cell("at torch 0.2", 4, 4, rival="torch 0.2", rival_ratio=1.0),
    ),
)
PLANNING = Planning(num_layers=32, num_nodes=7000, remat_seconds=2.0, torch_seconds=5.0)


def missed(*sheets: Sheet, planning: Planning | None = PLANNING) -> list[str]:
    """The criteria that are not met, with what was found."""
    return [f"{v.criterion}: {v.text}" for v in judge(sheets, planning) if v.met is False]


def changed(sheet: Sheet, label: str, **fields: object) -> Sheet:
    cells = tuple(replace(cell, **fields) if cell.label == label else cell for cell in sheet.cells)
    return replace(sheet, cells=cells)


def test_good_figures_meet_everything() -> None:
    verdicts = judge([GOOD, TORCH], PLANNING)
    assert [v.criterion for v in verdicts if v.met is not True] == []


@pytest.mark.parametrize(
    ("sheet", "expected"),
    [
        (changed(GOOD, "0.5", measured_bytes=round(5.2 * MIB)), "Honest: measured over budget: worst 1.040 at toy aot"),
        (changed(GOOD, "0.5", measured_bytes=round(9.1 * MIB)), "Honest: measured over that of the next larger budget"),
        (changed(GOOD, MINIMUM, predicted_bytes=MIB), "Honest: predicted over measured, aot_eager, within 0.95..1.05"),
        (changed(GOOD, MINIMUM, measured_bytes=round(2.5 * MIB)), "Lower: minimum over eager per-layer checkpointing"),
        (changed(TORCH, "0.2", measured_bytes=3 * MIB), "Lower: minimum over the lowest peak of torch.compile"),
        (changed(TORCH, "at torch 1", rival_ratio=1.0), "Faster: step time over torch.compile's at its own peaks: geo"),
        (changed(TORCH, "at torch 0.2", rival_ratio=1.04), "Faster: step time over torch.compile's at its own peaks: "),
        (changed(GOOD, "at eager checkpoint", rival_ratio=0.95), "Faster: step time over eager checkpointing's"),
        (changed(GOOD, "at torch checkpoint", rival_ratio=0.95), "Faster: step time over compiled checkpointing's"),
        (changed(GOOD, "0.5", agrees=False), "Equal: gradients bit for bit (aot_eager) or up to"),
    ],
)  # fmt: skip
def test_each_broken_promise_is_found(sheet: Sheet, expected: str) -> None:
    assert any(text.startswith(expected) for text in missed(sheet)), missed(sheet)


def test_budget_that_no_plan_meets_is_no_lie_but_loses_against_its_rival() -> None:
    raised = {"measured_bytes": None, "predicted_bytes": None, "budget_bytes": None, "error": "InfeasibleBudget: ..."}
    assert missed(changed(GOOD, "0.5", **raised)) == []
    (found,) = missed(changed(GOOD, "at eager checkpoint", rival_ratio=None, **raised))
    assert found.startswith("Faster: step time over eager checkpointing's at its peak: worst inf")


def test_slow_planning_is_found_by_seconds_and_by_ratio() -> None:
    slow = missed(GOOD, planning=replace(PLANNING, remat_seconds=4.0))
    assert [text.partition(":")[0] for text in slow] == ["Quick", "Quick"]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    untimed = replace(GOOD, cells=tuple(replace(c, time_ratio=None, rival_ratio=None) for c in GOOD.cells))
    verdicts = judge([untimed], None)
    assert [v.met for v in verdicts if v.criterion in ("Faster", "Quick")] == [None] * 5


def test_cell_over_its_budget_is_flagged_in_the_table() -> None:
    assert "OVER" not in table(GOOD)
    (line,) = [t for t in table(changed(GOOD, "0.5", measured_bytes=6 * MIB)).splitlines() if "remat 0.5" in t]
    assert line.endswith("<- OVER")


def test_sheet_survives_json() -> None:
    assert Sheet.from_dict(json.loads(json.dumps(asdict(GOOD)))).cells[:4] == GOOD.cells[:4]
    assert math.isnan(Sheet.from_dict(json.loads(json.dumps(asdict(GOOD)))).cells[4].difference)


def test_time_is_plotted_only_if_it_was_measured(tmp_path: Path) -> None:
    assert [path.name for path in write_plots(GOOD, tmp_path)] == [
        "budget-toy-aot_eager-peak.svg",
        "budget-toy-aot_eager-time.svg",
    ]
    untimed = replace(GOOD, cells=tuple(replace(c, time_ratio=None) for c in GOOD.cells))
    assert len(write_plots(untimed, tmp_path)) == 1
