"""What will run the two graphs of a plan, as far as planning has to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Executor:
    """What will run the graphs."""

    fuses: bool = False
    """It makes loops of several ops, whose results in between are never in memory."""
    overwrites: bool = False
    """It runs ops that write to an input's memory as they stand."""
    keeps_order: bool = False
    """It keeps to the plan's order also where no budget counts on that."""

    @property
    def name(self) -> str:
        """What reports and stored plans call it."""
        return "inductor" if self.fuses else "node by node"


NODE_BY_NODE = Executor()
"""Runs ops one by one, each into memory of its own."""
