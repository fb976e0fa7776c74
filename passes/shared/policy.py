"""The policy vocabulary of both engines: what a user may hand over, and the one form it is used in.

A policy is a list of ops (those are saved) or a callable `fn(ctx, op, *args, **kwargs)` that answers with a
`CheckpointPolicy` or a bool. `normalise_policy` turns either into a callable, `checked_answer` turns what that
callable says into a `CheckpointPolicy`, or into an error that names policy and op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from remat.passes.shared.errors import RematError
from remat.passes.shared.module_path import current_module_path
from remat.passes.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket

PolicyFunction = Callable[..., "CheckpointPolicy | bool"]
Policy = PolicyFunction | Sequence[Any]

OFFLOADS = frozenset({CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD})
PREFERENCES = frozenset(
    {CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_CPU_OFFLOAD}
)
RECOMPUTES = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})


class PolicyError(RematError, ValueError):
    """A policy raised, answered with something that is no policy, or asked for the impossible."""


class SelectiveCheckpointContext:
    """What a policy is told about the moment it is asked.

    `op_output` is the op's result and `is_recompute` says whether a forward is being replayed. `module` is the path of
    the module that the op was called in, like `layers.3.attn`. `state` is a dictionary, empty when a call of a region
    starts and shared by all its ops: the place for what a policy counts.
    """

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output
        self.state: dict[Any, Any] = {}
        self._module: str | None = None

    @property
    def module(self) -> str:
        """The path of the module; looked up when it is first read, unless an engine has set it."""
        if self._module is None:
            self._module = current_module_path()
        return self._module

    @module.setter
    def module(self, path: str) -> None:
        self._module = path


KnownAnswers = dict[int, bool]
"""What an engine has learnt about policies that answer by the op alone, and all alike.

By identity of an op that needs no care of the engine's: whether it is saved.
"""


@dataclass(frozen=True, slots=True, repr=False)
class SaveOps:
    """Save the outputs of some ops and recompute all others."""

    ops: frozenset[Any]
    known: KnownAnswers = field(default_factory=dict, compare=False, repr=False)

    @property
    def reads_names(self) -> bool:
        """False: what a value is called makes no difference."""
        return False

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG002
        """Answer for one op; everything but the op itself is ignored."""
        return self.answer_for(op)

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:  # noqa: ARG002
        """Answer for the listed ops only."""
        return CheckpointPolicy.MUST_SAVE if self.answer_for(op) is CheckpointPolicy.MUST_SAVE else None

    def __repr__(self) -> str:
        return f"save_ops([{', '.join(sorted(str(op) for op in self.ops))}])"

    def __reduce__(self) -> tuple[Any, ...]:
        return _save_ops_by_name, tuple(sorted(op_name(op) for op in self.ops))

    def answer_for(self, op: Any) -> CheckpointPolicy:
        """Answer from the op alone, which lets an engine skip building the policy's context."""
        if op in self.ops or getattr(op, "overloadpacket", None) in self.ops:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _save_ops_by_name(*names: str) -> SaveOps:
    return SaveOps(frozenset(find_op(name) for name in names))


def op_name(op: Any) -> str:
    """Return an op's name, from which `find_op` finds it in any process."""
    if isinstance(op, HigherOrderOperator):
        return f"higher_order.{op.__name__}"
    return str(op)


def find_op(name: str) -> Any:
    """Return the op of a name like `aten.mm.default`, or the packet `aten.mm`."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def normalise_policy(policy: Policy, *, allow_packets: bool = True) -> PolicyFunction:
    """Return a policy as a callable; a list of ops becomes `SaveOps`."""
    if isinstance(policy, (list, tuple, set, frozenset)):
        return _save_ops(tuple(policy), allow_packets)
    if callable(policy):
        return policy
    raise TypeError(
        f"policy_fn_or_list must be either a function or a list of ops. Got {policy!r} of type {type(policy).__name__}."
    )


# By the ids of the ops, which hash quicker than they do; the policy found there keeps them alive.
_known_lists: dict[tuple[tuple[int, ...], bool], SaveOps] = {}


def _save_ops(ops: tuple[Any, ...], allow_packets: bool) -> SaveOps:
    """Return one object per list of ops, so that what an engine learns about it is learnt once."""
    key = tuple(map(id, ops)), allow_packets
    known = _known_lists.get(key)
    if known is None:
        known = _known_lists[key] = SaveOps(frozenset(_checked_ops(ops, allow_packets)))
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


def checked_answer(
    answer: Any, policy: PolicyFunction, op: Any, place: Callable[[], str] | None = None
) -> CheckpointPolicy:
    """Return what a policy said as a `CheckpointPolicy`; True means save, False means recompute."""
    if isinstance(answer, CheckpointPolicy):
        return answer
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    raise PolicyError(
        f"the policy {policy_name(policy)} answered {answer!r} for {op}, which is neither a CheckpointPolicy "
        "nor a bool. Return one of CheckpointPolicy's members, True (save) or False (recompute); "
        "None, for no opinion, only inside remat.policies.first_of and by_module."
        f"{place() if place is not None else ''}"
    )


def policy_name(policy: Any) -> str:
    """Name a policy for a message: its qualified name and, where known, the line it is defined on."""
    code = getattr(policy, "__code__", None)
    name = getattr(policy, "__qualname__", None) or repr(policy)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
