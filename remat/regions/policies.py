"""Ready-made policies: what a region keeps, said in one line.

    @remat.checkpoint_region(policy=remat.policies.save_matmuls())
    @remat.checkpoint_region(policy=first_of(offload_names("block_in"), save_matmuls()))
    @remat.checkpoint_region(policy=by_module({"*.attn": save_all(), "mlp": every_nth([aten.mm], 2)}))

Each is a callable `fn(ctx, op, *args, **kwargs)` that answers with a `CheckpointPolicy`, as torch's selective
checkpointing wants it, and works there too. They are values: equal if made from equal parts, hashable, picklable, and
printed as the call that makes them.

A policy may have no opinion on an op. Inside `first_of` the next one is then asked: a function says so by returning
None, a ready-made one about every op that its name does not speak of. If nobody has an opinion the op is recomputed.

A value named by `remat.name(x, "attn_out")` is asked about as the op `remat::named` with the arguments `x` and
"attn_out". Save, offload and MUST_RECOMPUTE then hold for the value, whatever was said about the op that made it;
PREFER_RECOMPUTE leaves that as it is.

What a policy is told is in `ctx`: `op_output`, `is_recompute`, `module` (the path of the module that the op is called
in) and `state` (a dictionary of this call of the region). Policies that count do so in `ctx.state`, not in themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.flop_counter import flop_registry

from remat.passes.torch_private import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    tree_leaves,
)

from ..passes.ops import facts_of, is_matmul, name_op
from ..passes.shared import (
    CheckpointPolicy,
    KnownAnswers,
    OptionError,
    Policy,
    PolicyFunction,
    SaveOps,
    checked_answer,
    current_module_path,
    ends_match,
    normalise_policy,
    policy_name,
)

__all__ = [
    "by_module",
    "bytes_above",
    "bytes_below",
    "every_nth",
    "first_of",
    "flops_above",
    "offload_all",
    "offload_names",
    "recompute_all",
    "save_all",
    "save_all_but_names",
    "save_matmuls",
    "save_names",
    "save_ops",
]

_MUST_SAVE, _PREFER_RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
# Costly by the arithmetic in them, but no products of matrices.
_NOT_MATMULS = frozenset({"aten::_cdist_forward", "aten::grid_sampler_2d"})
_known_by_op: dict[str, KnownAnswers] = {}


def _known_answers(kind: str) -> KnownAnswers:
    """Return one table for all policies that say the same."""
    found = _known_by_op.get(kind)
    if found is None:
        found = _known_by_op[kind] = {}
    return found


class _ReadyMade:
    """A policy that may have no opinion; alone it then recomputes."""

    __slots__ = ()

    @property
    def reads_names(self) -> bool:
        """Whether what a value is called makes a difference."""
        return False

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:
        """Answer for one op, or None."""
        raise NotImplementedError

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Answer for one op."""
        answer = self.opinion(ctx, op, *args, **kwargs)
        return _PREFER_RECOMPUTE if answer is None else answer


class _ByOp(_ReadyMade):
    """A policy that looks at nothing but the op, which lets an engine remember its answers."""

    __slots__ = ()

    @property
    def known(self) -> KnownAnswers:
        """Filled by the engine."""
        return _known_answers(type(self).__name__)

    def answer_for(self, op: Any) -> CheckpointPolicy:
        """Answer from the op alone."""
        return self(None, op)


# ------------------------------------------------------------------------------------------------------ by op


@dataclass(frozen=True, slots=True)
class _SaveAll(_ByOp):
    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:  # noqa: ARG002
        return _MUST_SAVE

    def __repr__(self) -> str:
        return "save_all()"


@dataclass(frozen=True, slots=True)
class _RecomputeAll(_ByOp):
    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:  # noqa: ARG002
        return _PREFER_RECOMPUTE

    def __repr__(self) -> str:
        return "recompute_all()"


@dataclass(frozen=True, slots=True)
class _SaveMatmuls(_ByOp):
    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:  # noqa: ARG002
        return _MUST_SAVE if is_matmul(op) and op._schema.name not in _NOT_MATMULS else None

    def __repr__(self) -> str:
        return "save_matmuls()"


@dataclass(frozen=True, slots=True)
class _OffloadAll(_ByOp):
    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:  # noqa: ARG002
        is_no_value = op is name_op() or (not isinstance(op, HigherOrderOperator) and facts_of(op).is_view)
        return None if is_no_value else CheckpointPolicy.MUST_CPU_OFFLOAD

    def __repr__(self) -> str:
        return "offload_all()"


def save_all() -> PolicyFunction:
    """Keep everything; what a region inside a region uses to stay a block that is not run again."""
    return _SaveAll()


def offload_all() -> PolicyFunction:
    """Move everything out of device memory; views are made again from what they are views of."""
    return _OffloadAll()


def recompute_all() -> PolicyFunction:
    """Keep nothing but what may run only once."""
    return _RecomputeAll()


def save_matmuls() -> PolicyFunction:
    """Keep products of matrices, convolutions and attention: few bytes for most of the arithmetic."""
    return _SaveMatmuls()


def save_ops(ops: Iterable[Any]) -> PolicyFunction:
    """Keep the results of some ops: `torch.ops.aten.mm.default`, or `torch.ops.aten.mm` for every overload."""
    policy = normalise_policy(_checked_ops("save_ops", ops))
    assert isinstance(policy, SaveOps)
    return policy


def _checked_ops(caller: str, ops: Any) -> tuple[Any, ...]:
    if isinstance(ops, (str, OpOverload, OpOverloadPacket, HigherOrderOperator)) or not isinstance(ops, Iterable):
        raise OptionError(f"{caller}({ops!r}): expected a list of ops, like {caller}([torch.ops.aten.mm.default])")
    found = tuple(ops)
    for op in found:
        if not isinstance(op, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
            raise OptionError(f"{caller}: {op!r} is no op but {_article(type(op).__name__)}.{_suggestion(op)}")
    if not found:
        raise OptionError(f"{caller}([]): an empty list saves nothing; say recompute_all() if that is what you mean")
    return found


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _suggestion(given: Any) -> str:
    """Name the op that was perhaps meant by a function or a name."""
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    name = name.removeprefix("torch.").removeprefix("ops.").removeprefix("aten.").split(".")[0]
    if name.isidentifier() and hasattr(torch.ops.aten, name):
        return f" Did you mean torch.ops.aten.{name}?"
    return " Ops are named like torch.ops.aten.mm.default."


# ---------------------------------------------------------------------------------------------------- by name


@dataclass(frozen=True, slots=True, repr=False)
class _ByName(_ReadyMade):
    maker: str
    names: tuple[str, ...]
    answer: CheckpointPolicy
    otherwise: CheckpointPolicy | None = None

    @property
    def reads_names(self) -> bool:
        """True."""
        return True

    @property
    def known(self) -> KnownAnswers:
        """Filled by the engine, for values without a name."""
        return _known_answers(f"unnamed: {self.otherwise}")

    def answer_for(self, op: Any) -> CheckpointPolicy:  # noqa: ARG002
        """Answer for an op that names nothing."""
        return _PREFER_RECOMPUTE if self.otherwise is None else self.otherwise

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:  # noqa: ARG002
        """Answer for the named values, and for the others if there is something to say about them."""
        if op is name_op():
            return self.answer if args[1] in self.names else None
        return self.otherwise

    def __repr__(self) -> str:
        return f"{self.maker}({', '.join(repr(name) for name in self.names)})"


def save_names(*names: str) -> PolicyFunction:
    """Keep the values that `remat.name` gave one of these names."""
    return _ByName("save_names", _checked_names("save_names", names), _MUST_SAVE)


def save_all_but_names(*names: str) -> PolicyFunction:
    """Keep everything but the values with one of these names, which are recomputed."""
    checked = _checked_names("save_all_but_names", names)
    return _ByName("save_all_but_names", checked, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_SAVE)


def offload_names(*names: str) -> PolicyFunction:
    """Keep the values with one of these names in host memory."""
    return _ByName("offload_names", _checked_names("offload_names", names), CheckpointPolicy.MUST_CPU_OFFLOAD)


def _checked_names(caller: str, names: tuple[Any, ...]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or not name:
            raise OptionError(
                f'{caller}({name!r}): expected names as they are given by remat.name(x, "..."), one by one: '
                f'{caller}("attn_out", "mlp_in")'
            )
    if not names:
        raise OptionError(f'{caller}() names nothing. Say which values are meant: {caller}("attn_out")')
    return tuple(sorted(set(names)))


# ---------------------------------------------------------------------------------------------------- by cost


@dataclass(frozen=True, slots=True, repr=False)
class _FlopsAbove(_ReadyMade):
    num_flops: int

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:
        """Answer for the ops that torch has a formula for."""
        formula = flop_registry.get(getattr(op, "overloadpacket", None))
        if formula is None:
            return None
        return _MUST_SAVE if formula(*args, **kwargs, out_val=ctx.op_output) > self.num_flops else None

    def __repr__(self) -> str:
        return f"flops_above({self.num_flops})"


def flops_above(num_flops: int) -> PolicyFunction:
    """Keep the results of ops with more floating-point operations than this, by torch's formulas."""
    return _FlopsAbove(_checked_count("flops_above", num_flops, smallest=0))


@dataclass(frozen=True, slots=True, repr=False)
class _BytesBetween(_ReadyMade):
    maker: str
    num_bytes: int

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:  # noqa: ARG002
        """Answer for ops that allocate what they return; a view has no bytes of its own."""
        if facts_of(op).is_view:
            return None
        tensors = [leaf for leaf in tree_leaves(ctx.op_output) if isinstance(leaf, torch.Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        is_meant = num_bytes < self.num_bytes if self.maker == "bytes_below" else num_bytes > self.num_bytes
        return _MUST_SAVE if is_meant else None

    def __repr__(self) -> str:
        return f"{self.maker}({self.num_bytes})"


def bytes_below(num_bytes: int) -> PolicyFunction:
    """Keep the results of ops that return fewer bytes than this."""
    return _BytesBetween("bytes_below", _checked_count("bytes_below", num_bytes, smallest=1))


def bytes_above(num_bytes: int) -> PolicyFunction:
    """Keep the results of ops that return more bytes than this."""
    return _BytesBetween("bytes_above", _checked_count("bytes_above", num_bytes, smallest=0))


def _checked_count(caller: str, count: Any, smallest: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < smallest:
        raise OptionError(f"{caller}({count!r}): expected a whole number, {smallest} or more")
    return count


@dataclass(frozen=True, slots=True, repr=False)
class _EveryNth(_ReadyMade):
    policy: PolicyFunction
    n: int

    @property
    def reads_names(self) -> bool:
        """True if the counted policy does."""
        return reads_names(self.policy)

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:
        """Count what the policy would save, and save each n-th of it."""
        answer = _opinion(self.policy, ctx, op, args, kwargs)
        if answer is None or answer is _PREFER_RECOMPUTE:
            return answer
        state = _state_of(ctx)
        count = state[id(self)] = state.get(id(self), 0) + 1
        return answer if count % self.n == 0 else _PREFER_RECOMPUTE

    def __repr__(self) -> str:
        return f"every_nth({_shown(self.policy)}, {self.n})"


def every_nth(ops: Iterable[Any] | PolicyFunction, n: int) -> PolicyFunction:
    """Keep the result of every n-th call of some ops, counted anew in each call of a region.

    Instead of ops a policy may be given: then every n-th result that it would save is saved.
    """
    policy: PolicyFunction = ops if callable(ops) and not _is_op(ops) else save_ops(_checked_ops("every_nth", ops))
    return _EveryNth(policy, _checked_count("every_nth", n, smallest=1))


def _is_op(value: Any) -> bool:
    return isinstance(value, (OpOverload, OpOverloadPacket, HigherOrderOperator))


_states_by_mode: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _state_of(ctx: Any) -> dict[Any, Any]:
    """Return the dictionary of this call of a region; torch's contexts have none, but a dispatch mode per call."""
    state: dict[Any, Any] | None = getattr(ctx, "state", None)
    if state is not None:
        return state
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, TorchDispatchMode):
            return _states_by_mode.setdefault(caller, {})
        frame = frame.f_back
    raise OptionError(
        "a policy that counts needs to know which call of a region it is asked for. "
        "Give it a context with a dictionary `state`, as remat.compat.SelectiveCheckpointContext has one."
    )


# ------------------------------------------------------------------------------------------------ compositions


@dataclass(frozen=True, slots=True, repr=False)
class _FirstOf(_ReadyMade):
    policies: tuple[PolicyFunction, ...]

    @property
    def reads_names(self) -> bool:
        """True if one of them does."""
        return any(reads_names(policy) for policy in self.policies)

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:
        """Ask one after the other."""
        for policy in self.policies:
            answer = _opinion(policy, ctx, op, args, kwargs)
            if answer is not None:
                return answer
        return None

    def __repr__(self) -> str:
        return f"first_of({', '.join(_shown(policy) for policy in self.policies)})"


def first_of(*policies: Policy) -> PolicyFunction:
    """Ask policies in turn and take the first opinion; without any the op is recomputed."""
    if not policies:
        raise OptionError("first_of() asks nobody: give it policies, like first_of(save_names('q'), save_matmuls())")
    return _FirstOf(tuple(_checked_policy("first_of", policy) for policy in policies))


@dataclass(frozen=True, slots=True, repr=False)
class _ByModule(_ReadyMade):
    branches: tuple[tuple[str, PolicyFunction], ...]

    @property
    def reads_names(self) -> bool:
        """True if one of them does."""
        return any(reads_names(policy) for _, policy in self.branches)

    def opinion(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | None:
        """Ask the policy of the first pattern that matches."""
        path = getattr(ctx, "module", None)  # torch's contexts do not say it
        path = current_module_path() if path is None else path
        for pattern, policy in self.branches:
            if ends_match(pattern, path):
                return _opinion(policy, ctx, op, args, kwargs)
        return None

    def __repr__(self) -> str:
        shown = ", ".join(f"{pattern!r}: {_shown(policy)}" for pattern, policy in self.branches)
        return f"by_module({{{shown}}})"


def by_module(policies: Mapping[str, Policy]) -> PolicyFunction:
    """Ask the policy whose pattern matches the module that an op is called in; the first in the dictionary wins.

    A pattern stands for the end of a module's path: `attn` and `*.attn` match `layers.3.attn` and everything inside
    it. `*` is one name or a part of one, `**` any number of names; `*` alone matches every op, also outside of modules.
    """
    if not isinstance(policies, Mapping) or not policies:
        raise OptionError(
            f"by_module({policies!r}): expected a dictionary from patterns to policies, like "
            'by_module({"*.attn": save_all(), "*": save_matmuls()})'
        )
    for pattern in policies:
        if not isinstance(pattern, str) or not all(pattern.split(".")):
            raise OptionError(f"by_module: {pattern!r} is no pattern of a module's path, like '*.attn' or 'layers.0'")
    branches = tuple((pattern, _checked_policy("by_module", policy)) for pattern, policy in policies.items())
    return _ByModule(branches)


def reads_names(policy: Any) -> bool:
    """True if what a value is called may make a difference to a policy, as it may to any function."""
    return bool(getattr(policy, "reads_names", True))


def _checked_policy(caller: str, policy: Any) -> PolicyFunction:
    if isinstance(policy, (list, tuple, set, frozenset)):
        return save_ops(_checked_ops(caller, policy))
    if not callable(policy) or _is_op(policy):
        raise OptionError(
            f"{caller}: {policy!r} is no policy. Give a ready-made one, a list of ops, "
            "or a function (ctx, op, *args, **kwargs) that returns a CheckpointPolicy, a bool or None."
        )
    if isinstance(policy, type) or policy in _MAKERS:
        raise OptionError(f"{caller}: {policy.__name__} makes a policy when it is called: {policy.__name__}(...)")
    made: PolicyFunction = policy
    return made


_MAKERS: tuple[Any, ...] = (
    save_all,
    offload_all,
    recompute_all,
    save_matmuls,
    save_ops,
    save_names,
    save_all_but_names,
)
_MAKERS += (offload_names, flops_above, bytes_below, bytes_above, every_nth, first_of, by_module)


def _opinion(policy: PolicyFunction, ctx: Any, op: Any, args: Any, kwargs: Any) -> CheckpointPolicy | None:
    answer = getattr(policy, "opinion", policy)(ctx, op, *args, **kwargs)
    return None if answer is None else checked_answer(answer, policy, op)


def _shown(policy: Any) -> str:
    """Print a policy: a ready-made one as the call that makes it, a function as its name."""
    return repr(policy) if hasattr(policy, "opinion") else policy_name(policy)
