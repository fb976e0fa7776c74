"""What the selective engine must know about an op, and how it tells one call of an op from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from remat.passes.torch_private import FunctionalTensor, HigherOrderOperator, is_registered_as_effectful

from ...passes.ops import facts_of

# Ops that forward and recompute run in different numbers for reasons of the machinery's own: no policy sees them.
SAC_IGNORED_OPS: set[Any] = {
    torch.ops.aten.detach.default,
    torch.ops.prim.device.default,
    *FunctionalTensor.metadata_fns,
}

RENORM = torch.ops.aten.embedding_renorm_.default  # its result, a whole weight, is not worth keeping: see `renorm`
CAST = torch.ops.aten._to_copy.default
_NOT_JUST_RUN = SAC_IGNORED_OPS | {CAST}


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the engine must know about an op, looked up once."""

    op: Any
    is_random: bool
    runs_once: str
    """Why it may not be run again: "a collective" or "an effectful op"; empty for all others."""
    is_pending: bool
    """True for a collective, whose result is not there yet when the op returns."""
    is_view: bool
    mutates: tuple[int, ...]
    """Positions of the arguments it changes in place."""
    updates_in_place: bool
    """True for `x.op_(...)`: changes the elements of its first argument only, and returns it."""
    is_plain: bool
    """True if running it is all there is to it."""


# Ops are keyed by identity throughout: hashing one runs Python code, twice per op and table. Facts keep the op alive.
known_facts: dict[int, OpFacts] = {}


def op_facts(op: Any) -> OpFacts:
    """Look an op up."""
    facts = known_facts.get(id(op))
    if facts is None:
        facts = known_facts[id(op)] = _find_facts(op)
    return facts


def _find_facts(op: Any) -> OpFacts:
    if isinstance(op, HigherOrderOperator):
        runs_once = "an effectful op" if facts_of(op).is_effectful else ""
        return OpFacts(op, False, runs_once, False, False, (), updates_in_place=False, is_plain=False)
    arguments = op._schema.arguments
    mutates = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    if op.namespace == "c10d" and op._schema.name.endswith("_"):
        mutates = (0,)  # their schemas do not say so
    returns = op._schema.returns
    returns_first = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    runs_once = _runs_once(op)
    return OpFacts(
        op=op,
        is_random=is_random,
        runs_once=runs_once,
        is_pending=facts_of(op).is_collective and not facts_of(op).is_wait,
        is_view=facts_of(op).is_view,
        mutates=mutates,
        updates_in_place=mutates == (0,) and returns_first and not (_changes_shape(op) or op is RENORM),
        is_plain=not (is_random or runs_once or mutates or op in _NOT_JUST_RUN),
    )


def _changes_shape(op: Any) -> bool:
    """True for what gives a tensor another shape or memory, in place: copying elements is not the same."""
    return torch.Tag.inplace_view in op.tags or op._schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_")


def _runs_once(op: Any) -> str:
    facts = facts_of(op)
    if facts.is_collective:
        return "a collective"
    return "an effectful op" if facts.is_effectful or is_registered_as_effectful(op) else ""


def is_cached_cast(func: Any, args: Any) -> bool:
    """True for a cast of a weight, which autocast may have kept from before the region or not."""
    return func is CAST and args[0].requires_grad and args[0].is_leaf


def op_key(func: Any, args: Any) -> Any:
    """Return what an op is matched by: its identity, and for a compiled block also which one."""
    if isinstance(func, HigherOrderOperator):
        from remat.passes.torch_private import compiled_code_key

        return compiled_code_key(func, args)
    return id(func)
