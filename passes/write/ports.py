"""Ports taken out again, once it is decided where each value is kept."""

from __future__ import annotations

import torch.fx as fx

from ..graph import is_port
from .halves import Halves


def close_ports(halves: Halves) -> Halves:
    """Take the ports out again: from here on the value itself is read."""
    for module in (halves.forward, halves.backward):
        ports = [node for node in module.graph.nodes if node.op == "call_function" and is_port(node)]
        for port in ports:
            value = port.args[0]
            assert isinstance(value, fx.Node)
            port.replace_all_uses_with(value)
            module.graph.erase_node(port)
        if ports:
            module.recompile()
    return halves
