"""What the user said about one region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remat.eager import RegionSpec, Selective

from ..eager import find_determinism_check
from ..passes.budgets import Budget, parse_budget
from ..passes.shared import normalise_policy


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """What the user said about one region."""

    name: str
    policy: Any = None
    memory_budget: Any = None
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True
    debug: bool = False
    offload: str = "cpu"
    offload_folder: str | None = None

    def __post_init__(self) -> None:
        _ = self.budget  # what is wrong with it is said where the region is marked

    @property
    def disk_folder(self) -> str | None:
        """Where values go that the policy offloads; None for host memory."""
        return self.offload_folder

    @property
    def budget(self) -> Budget | None:
        """The bound on the region's share of the activation peak."""
        if self.memory_budget is None:
            return None
        return parse_budget(self.memory_budget)

    def eager_spec(self) -> RegionSpec:
        """Return the same for the eager engine's recomputation, which has no use for a budget."""
        selective = None
        if self.policy is not None:
            selective = Selective(normalise_policy(self.policy), disk_folder=self.disk_folder)
        return RegionSpec(
            name=self.name,
            preserve_rng_state=self.preserve_rng_state,
            selective=selective,
            check=find_determinism_check(self.determinism_check),
            debug=self.debug,
            early_stop=self.early_stop,
            is_refilled=True,
        )
