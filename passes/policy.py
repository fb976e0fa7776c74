"""The policy vocabulary of both engines: what a user may hand over, and the one form it is used in.

A policy is a list of ops (those are saved) or a callable `fn(ctx, op, *args, **kwargs)` that answers with a
`CheckpointPolicy` or a bool. `normalise_policy` turns either into a callable, `checked_answer` turns what that
callable says into a `CheckpointPolicy`, or into an error that names policy and op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from remat.passes.errors import RematError
from remat.passes.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

PolicyFunction = Callable[..., "CheckpointPolicy | bool"]
Policy = PolicyFunction | Sequence[Any]

SAVES = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE})
OFFLOADS = frozenset({CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD})
RECOMPUTES = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})


class PolicyError(RematError, ValueError):
    """A policy raised, answered with something that is no policy, or asked for the impossible."""


@dataclass(frozen=True, slots=True)
class SaveOps:
    """Save the outputs of some ops and recompute all others."""

    ops: frozenset[Any]
    known: dict[int, bool] = field(default_factory=dict, compare=False, repr=False)
    """By identity of an op that needs no care of the engine's: whether it is saved. Filled by the engine."""

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG002
        """Answer for one op; everything but the op itself is ignored."""
        return self.answer_for(op)

    def answer_for(self, op: Any) -> CheckpointPolicy:
        """Answer from the op alone, which lets an engine skip building the policy's context."""
        if op in self.ops or getattr(op, "overloadpacket", None) in self.ops:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def normalise_policy(policy: Policy, *, allow_packets: bool = True) -> PolicyFunction:
    """Return a policy as a callable; a list of ops becomes `SaveOps`."""
    if isinstance(policy, (list, tuple, set, frozenset)):
        return _save_ops(tuple(policy), allow_packets)
    if callable(policy):
        return policy
    raise TypeError(
        f"policy_fn_or_list must be either a function or a list of ops. Got {policy!r} of type {type(policy).__name__}."
    )


_known_lists: dict[tuple[tuple[Any, ...], bool], SaveOps] = {}


def _save_ops(ops: tuple[Any, ...], allow_packets: bool) -> SaveOps:
    """Return one object per list of ops, so that what an engine learns about it is learnt once."""
    known = _known_lists.get((ops, allow_packets))
    if known is None:
        known = _known_lists[ops, allow_packets] = SaveOps(frozenset(_checked_ops(ops, allow_packets)))
    return known


def _checked_ops(ops: Iterable[Any], allow_packets: bool) -> Iterable[Any]:
    for op in ops:
        is_packet = isinstance(op, OpOverloadPacket)
        if isinstance(op, (OpOverload, HigherOrderOperator)) or (is_packet and allow_packets):
            yield op
            continue
        hint = (
            " Please update the OpOverloadPacket to a specific OpOverload: for `torch.ops.aten.mm`, "
            "write `torch.ops.aten.mm.default`."
            if is_packet
            else " Ops are named like `torch.ops.aten.mm.default`."
        )
        raise ValueError(
            f"Expected op in `op_list` to be an OpOverload but got: {op} of type {type(op).__name__}.{hint}"
        )


def checked_answer(answer: Any, policy: PolicyFunction, op: Any) -> CheckpointPolicy:
    """Return what a policy said as a `CheckpointPolicy`; True means save, False means recompute."""
    if isinstance(answer, CheckpointPolicy):
        return answer
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    raise PolicyError(
        f"the policy {policy_name(policy)} answered {answer!r} for {op}, which is neither a CheckpointPolicy "
        "nor a bool. Return one of CheckpointPolicy's members, True (save) or False (recompute)."
    )


def policy_name(policy: Any) -> str:
    """Name a policy for a message: its qualified name and, where known, the line it is defined on."""
    code = getattr(policy, "__code__", None)
    name = getattr(policy, "__qualname__", None) or repr(policy)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
