"""Selective regions: a policy decides, op by op, what the forward keeps for the recomputation.

Two dispatch modes. The `Recorder` runs in forward, asks the policy about every op and keeps the outputs it wants
saved; the `Replayer` runs in recompute and answers those ops from what was kept. Ops are matched by their name and
how often they ran before.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.eager.selective.keeping import RegionSink
from remat.eager.selective.recorder import Recorder
from remat.eager.selective.saved import OnMutation

from ...passes.shared import PolicyFunction


@dataclass(frozen=True, slots=True)
class Selective:
    """A region's policy, ready to run."""

    policy: PolicyFunction
    on_mutation: OnMutation = OnMutation.COPY
    disk_folder: str | None = None
    """Where values go that the policy offloads; None for host memory."""

    def recorder(self, frame: RegionSink) -> Recorder:
        """Return the mode for the forward of a frame."""
        return Recorder(self.policy, self.on_mutation, self.disk_folder).bind(frame)
