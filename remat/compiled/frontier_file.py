"""A frontier's file is no plan: whoever takes it for one is told how to get the plan of a point."""

from __future__ import annotations

import json
import os


def no_frontier(text: str, path: str | os.PathLike[str]) -> str:
    """The text of a file; an error that says how to take a plan out of it if that is a frontier."""
    if _is_frontier(text):
        raise ValueError(
            "this is a frontier that `pareto` wrote, not a plan: each of its points has a plan. Take one by "
            f'remat.Pareto.load({os.fspath(path)!r}).points[0].plan.save("plan.json"); points begin with the '
            "fastest"
        )
    return text


def _is_frontier(text: str) -> bool:
    if '"graph_break"' not in text:
        return False
    try:
        data = json.loads(text)
    except ValueError:
        return False  # whoever reads it says what is wrong with it
    return isinstance(data, dict) and "graph_break" in data
