"""The report: everything that explaining a function found, and its forms by file suffix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.fx as fx

from ..passes.shared import form_of, parsed_file
from ..version import __version__
from .data import ReportData, from_json, to_json
from .forms import Why, dot, dump, notebook_cell, page, summary, svg, why
from .frontier import Pareto

FORMS = (".txt", ".json", ".dot", ".svg", ".html")
"""The suffixes of files that a report can be saved as."""


class Report(ReportData):
    """Every decision of every joint graph of a function."""

    def why(self, value: str | fx.Node) -> Why:
        """Say why one value is kept or recomputed, and what would have to change for the other decision.

        A value is named by its node, by the node's name in the dump, or by what `remat.name` called it.
        """
        return why(self.graphs, value.name if isinstance(value, fx.Node) else value)

    def __str__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return notebook_cell(self)

    def to_text(self) -> str:
        """The summary, then every graph line by line with its decisions."""
        return dump(self)

    def to_json(self) -> str:
        """Everything, in the form that the package's schema.json describes."""
        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Report:
        """Read what `to_json` wrote."""
        return Report(**from_json(text, Pareto.from_json))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """Read a report that `save` wrote as JSON."""
        return parsed_file(path, Report.from_json)

    def to_dot(self) -> str:
        """Forward and backward in Graphviz's language."""
        return dot(self)

    def to_svg(self) -> str:
        """Forward and backward as a picture."""
        return svg(self)

    def to_html(self) -> str:
        """One page with all of it, that needs nothing but a browser."""
        return page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report in the form that the file's suffix names: .txt, .json, .dot, .svg or .html."""
        writers: tuple[Callable[[], str], ...] = (self.to_text, self.to_json, self.to_dot, self.to_svg, self.to_html)
        write = dict(zip(FORMS, writers, strict=True))[form_of(path, FORMS)]
        Path(path).write_text(write(), encoding="utf-8")


def versions() -> dict[str, str]:
    """What made a report."""
    return {"remat": __version__, "torch": torch.__version__}
