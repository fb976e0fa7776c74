"""The two graphs of a split joint graph: what extraction writes, rewrites change and verification reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx

NODE_TAG = "remat_node"
"""`node.meta` key of what was copied from a joint graph: the position of the node there."""


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """Forward and backward. Forward returns the user's outputs first, then what backward receives."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int


Rewrite = Callable[[Halves], Halves]
"""Changes how the two graphs compute what they compute; graphs are changed in place."""
