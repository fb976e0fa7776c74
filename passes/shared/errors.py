"""Every error remat raises for something a user can change; our own broken invariants are plain asserts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class RematError(Exception):
    """Base class of remat's errors."""


class OptionError(RematError, ValueError):
    """An option has an unknown name, a wrong type or a value outside its range."""


class InfeasibleCut(RematError):
    """Backward needs a value that may be neither saved nor recomputed."""


class InfeasibleBudget(RematError):
    """No plan that was found keeps the activation peak within the budget."""

    def __init__(self, finding: str, advice: str = "") -> None:
        """Say what was found, and what to do; who finds out more may give other advice."""
        super().__init__(f"{finding}\n{advice}" if advice else finding)
        self.finding = finding


class PlanMismatch(RematError):
    """A stored plan was made for another graph, or does not do what it says."""


class RankMismatch(RematError):
    """Ranks that train together have different plans for one graph, or cannot agree on one."""


class VerificationError(RematError):
    """A plan or an extracted graph breaks the rules it was made under; it is refused instead of being run."""


class OffloadError(RematError, RuntimeError):
    """A value cannot be moved out of memory, or back: the disk is full, the folder cannot be written to."""


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was made from, as far as Python or Dynamo tell."""
    seen: list[BaseException] = []
    pending: list[Any] = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseException) and current not in seen:
            seen.append(current)
            yield current
            pending += [current.__cause__, current.__context__, getattr(current, "inner_exception", None)]
