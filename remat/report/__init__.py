"""See every decision: what a training step keeps, recomputes and moves, why, and what the other choice would cost.

`explain` traces and plans; a `Report` is plain data that every form is written from, so that what was stored as JSON
can be looked at later without the program it was made for:

    model.py      the data: nodes, timeline, graphs
    planned.py    a function in, a report out
    record.py     a planned graph in, its data out
    report.py     the report and its forms by file suffix
    text.py       the graph line by line, each with its decision; the summary on top
    stored.py     JSON, checked against schema.json, and back
    why.py        the chain of reasons for one value
    groups.py     thousands of nodes as a hundred boxes
    dot.py svg.py html.py
    diff.py       two plans compared
    dumped.py     what compiling leaves behind
    counting.py   what a step really holds
    observation.py  one real step beside what was predicted
"""

from .observed.observation import Observation, observe
from .planned import explain
from .report import Report

__all__ = ["Observation", "Report", "explain", "observe"]
