"""What compiling leaves behind: a text and a JSON file per graph, and its summary on stderr."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch.distributed

from ..compiled import Options
from ..passes.plans import Chosen, Prepared, Request
from ..passes.ranges import with_ranges
from .data import GraphReport, collect, is_collecting, report_graph
from .report import Report, versions

_numbers = itertools.count()


class Publisher:
    """Writes down what is planned while something compiles, for who asked for it by an option or by collecting."""

    def __init__(self, options: Options) -> None:
        self.folder, self.logs = options.dump, options.logs
        self.seen: list[GraphReport] = []

    @property
    def is_watching(self) -> bool:
        """Somebody wants to know what is planned."""
        return self.folder is not None or bool(self.logs) or is_collecting()

    def see(self, prepared: Prepared, chosen: Chosen, request: Request) -> None:
        """Write a graph down."""
        self.seen.append(report_graph(prepared, with_ranges(prepared, chosen, request)))

    def publish(self) -> None:
        """Hand out what was written down."""
        while self.seen:
            publish(self.seen.pop(0), folder=self.folder, logs=self.logs)


def publish(graph: GraphReport, *, folder: str | None, logs: tuple[str, ...]) -> None:
    """Write the report of one graph where it was asked for; graphs are counted within a process."""
    number = next(_numbers)
    collect(graph)
    report = Report(graphs=(graph,), versions=versions())
    if folder is not None:
        dump(report, Path(folder), number)
    if "plan" in logs:
        text = "\n".join(f"[remat rank {rank()} graph {number}] {line}" for line in str(report).splitlines())
        print(text, file=sys.stderr, flush=True)


def dump(report: Report, folder: Path, number: int) -> None:
    """Write a report as JSON and as text, under a name that no other rank, process or graph uses."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"rank{rank()}-graph{number:03}-{os.getpid()}"
    for suffix in (".json", ".txt"):
        report.save(stem.with_suffix(suffix))


def rank() -> int:
    """The number of this process among those that train together; 0 if it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    given = os.environ.get("RANK", "")
    return int(given) if given.isdecimal() else 0
