"""Who is shown what is planned while something compiles. Reports are made so; what compiles knows nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..passes.plans import Chosen, Prepared, Request
from .options import Options


class Watcher(Protocol):
    """Is shown each graph of a compilation, and told when those it has seen are going to run."""

    @property
    def is_watching(self) -> bool:
        """Does anybody want to know what is planned now?"""

    def see(self, prepared: Prepared, chosen: Chosen, request: Request) -> None:
        """Look at a plan before its graphs are written."""

    def publish(self) -> None:
        """Say what was seen so far: it is going to run."""


MakeWatcher = Callable[[Options], Watcher]


class Nobody:
    """Watches nothing."""

    is_watching = False

    def __init__(self, options: Options) -> None:
        """Take options as other watchers do."""

    def see(self, prepared: Prepared, chosen: Chosen, request: Request) -> None:
        """Do nothing."""

    def publish(self) -> None:
        """Do nothing."""
