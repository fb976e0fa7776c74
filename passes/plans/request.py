"""What a plan is made for, and what planning knows of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..budgets import Budget
from ..memory import Storages
from ..prices import CostModel
from ..search import FlowProblem
from ..shared import NODE_BY_NODE, Executor
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Request:
    """What a plan is to be made for."""

    cost_model: CostModel
    budget: Budget | None = None
    executor: Executor = NODE_BY_NODE
    unbacked_hint: int | None = None
    """What a size stands for that only the data tells, where nothing bounds it."""
    take_minimum: bool = False
    """Where a region's budget cannot be met, warn and take the lowest plan instead of raising an error."""
    stored: Sequence[Plan] = ()
    """Plans made earlier, one of which is to be applied; empty to plan afresh."""
    key: str = ""
    """Everything that the plan depends on beside its graph."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A joint graph with all that planning needs to know of it."""

    problem: FlowProblem
    storages: Storages
    num_fwd_outputs: int
