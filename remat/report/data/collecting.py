"""Who wants to know what is planned while something compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import GraphReport

_collectors: list[list[GraphReport]] = []


@contextmanager
def collected() -> Iterator[list[GraphReport]]:
    """Collect what is planned meanwhile."""
    graphs: list[GraphReport] = []
    _collectors.append(graphs)
    try:
        yield graphs
    finally:
        _collectors.remove(graphs)


def is_collecting() -> bool:
    """True while somebody wants to know what is planned."""
    return bool(_collectors)


def collect(graph: GraphReport) -> None:
    """Hand a planned graph to all who collect."""
    for graphs in _collectors:
        graphs.append(graph)
