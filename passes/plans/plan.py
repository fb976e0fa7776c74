"""The plan: what happens to every forward value that backward needs, why, and what it costs.

Its data are those of `contents`; here is what one can do with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ..shared import parsed_file, replace_file, size
from .contents import PlanContents
from .json_form import digest_of, plan_to_json, read_plans
from .sizes import plan_at, size_lines, sizes_text


@dataclass(frozen=True, slots=True)
class Plan(PlanContents):
    """All decisions of one joint graph, in graph order, and the order of backward."""

    def to_json(self) -> str:
        """The plan as JSON text, one decision a line, fit for diffs."""
        return plan_to_json(self)

    @property
    def digest(self) -> str:
        """A short text that is another one for every other plan."""
        return digest_of(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote, or the plan of a report that has one graph."""
        return _only_plan(text, "")

    def at(self, sizes: Mapping[str, int]) -> Plan:
        """The plan with bytes, peak and times as they are at other sizes, by the names of its symbols."""
        return plan_at(self, sizes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a file that is there already is replaced as a whole."""
        replace_file(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote."""
        return parsed_file(path, partial(_only_plan, file=os.fspath(path)))

    def summary(self, top: int = 10) -> str:
        """A dozen lines for a terminal: totals, the peak, then the largest saved values."""
        largest = sorted(self.saved, key=lambda d: -d.num_bytes)[:top]
        where = f"{'forward' if self.peak.in_forward else 'backward'}, {self.peak.node}  {self.peak.source}".rstrip()
        where = where if self.peak.node else f"at {sizes_text(self)}"  # at other sizes another op may set it
        lines = [
            f"joint graph of {self.num_nodes} nodes: backward needs {len(self.decisions)} forward values",
            f"  saved       {len(self.saved):6}  {size(self.saved_bytes):>13}",
            f"  recomputed  {len(self.recomputed):6}  {size(self.recomputed_bytes):>13}"
            f"  for {1e3 * self.recompute_seconds:.2f} ms (estimated)",
            f"  peak                {size(self.peak.num_bytes):>13}  predicted for {self.peak.executor}; {where}",
        ]
        if self.budget_bytes is not None:
            lines.append(f"  budget              {size(self.budget_bytes):>13}  {self.budget_text()}")
        lines += [f"  {title:18}  {text}" for title, text in (*self.share_lines(), *size_lines(self))]
        if self.offloaded:
            num_bytes = sum(d.num_bytes for d in self.offloaded)
            lines.append(f"  offloaded   {len(self.offloaded):6}  {size(num_bytes):>13}")
        if largest:
            lines.append("largest saved values:")
            width = max(len(d.value) for d in largest)
            lines += [
                f"  {d.value:{width}}  {size(d.num_bytes):>13}  {d.reason.value}  {d.source}".rstrip() for d in largest
            ]
        return "\n".join(lines)

    def budget_text(self) -> str:
        """Whether the budget is met, by which planner, and at what price; empty if there is none."""
        if self.budget_bytes is None:
            return ""
        excess = self.peak.num_bytes - self.budget_bytes
        how = "this is the lowest plan found" if self.peak.node else "it is for other sizes"
        over = f"exceeded by {size(excess)}: {how}; " if excess > 0 else ""
        return f"{over}planner: {self.planner}{self.bound_text()}"

    def share_lines(self) -> Iterator[tuple[str, str]]:
        """What regions with a budget of their own take of it, as titles and texts."""
        for share in self.shares:
            excess = share.predicted_bytes - share.budget_bytes
            over = f", exceeded by {size(excess)}: no plan found keeps within it" if excess > 0 else ""
            of = f"{size(share.predicted_bytes)} of {size(share.budget_bytes)}"
            yield "region", f"{share.path}: {of}{over}"

    def bound_text(self) -> str:
        """What the plan adds to the step, beside what any plan within its budget does; empty if that is not known."""
        if self.extra_seconds is None or self.least_extra_seconds is None:
            return ""
        added, least = 1e3 * self.extra_seconds, 1e3 * self.least_extra_seconds
        return f"; adds {added:.2f} ms (estimated), no plan within it less than {least:.2f}"

    def __str__(self) -> str:
        return self.summary()


def _only_plan(text: str, file: str) -> Plan:
    plans = plans_from_json(text, file)
    if len(plans) != 1:
        raise ValueError(f"this is a report of {len(plans)} graphs; a plan is for one")
    return plans[0]


def plans_from_json(text: str, file: str = "") -> tuple[Plan, ...]:
    """Read a plan, or all plans of a report; `file` is where the text comes from."""
    return read_plans(Plan, text, file)
