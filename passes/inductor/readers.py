"""Who reads a result inside a loop that a compiler makes, and who from memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from ..ops import FUSED_KINDS, INLINED_KINDS, facts_of


def readers_of(node: fx.Node, is_view: bool = False) -> Iterator[tuple[fx.Node, bool, bool]]:
    """Who reads a node's result, whether through a view, and whether inside a loop."""
    for user in node.users:
        if user.op == "call_function" and facts_of(user.target).is_view:
            yield from readers_of(user, True)
        else:
            yield user, is_view, is_loop(user)


def is_inlined(node: fx.Node) -> bool:
    """True for what readers compute in their own loops, if nobody insists on memory."""
    if not is_loop(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    facts = facts_of(node.target)
    return facts.kind in INLINED_KINDS and not facts.is_view


def is_loop(node: fx.Node) -> bool:
    """True for what a compiler runs as a part of a loop."""
    return node.op == "call_function" and facts_of(node.target).kind in FUSED_KINDS
