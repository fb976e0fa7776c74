"""What is changed in the joint graph before it is planned; every bit that the step computes stays.

Decides nothing about values: it gives planning better ones to decide about. A mask apart from its dropout, a gradient
in the layout that autograd takes over, a stand-in for what leaves a region.

Imports: torch_private, shared, ops, graph, sizes
"""

from __future__ import annotations

from .dropout import take_dropout_apart
from .gradients import lay_out_gradients, left_over, telling_intermediates
from .losses import copy_losses_out, holds_elements
from .ports import open_ports

__all__ = [
    "copy_losses_out",
    "holds_elements",
    "lay_out_gradients",
    "left_over",
    "open_ports",
    "take_dropout_apart",
    "telling_intermediates",
]
