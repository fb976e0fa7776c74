"""Take only those ops of a selective region through Python that its engine must see.

A dispatch mode is called for every op, and each call costs microseconds, also for the many ops of which nothing is
kept. Where a policy answers by the op alone, the engine's mode is therefore not entered for a whole forward or
recomputation. Ops are watched by a dispatch key instead, for which only those have a kernel that some policy saves or
that need care of ours: random, mutating and effectful ones. The kernel enters the mode while such an op runs. The mode
so sees what it would see if it were there all the time: ops below autograd, and of ops that call each other the
outermost. All other ops take no notice of the key.

Which ops a mode is entered for depends on op and policy, and on nothing that is learnt on the way: a forward and its
recomputation must agree on it, since they match ops by how often each was seen. So an op that passes does so as if it
had no kernel, and a kernel that was added after a forward began passes for that forward's recomputation, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import is_inference_mode_enabled

from remat.eager.selective.ops import SAC_IGNORED_OPS, op_facts
from remat.eager.types.execution import local
from remat.passes.shared.policy import OFFLOADS, RECOMPUTES, CheckpointPolicy, KnownAnswers, find_op
from remat.passes.torch_private import (
    accepts_numbers_for_tensors,
    all_op_names,
    is_autograd_off,
    is_below_autograd,
    is_composite,
    is_composite_name,
    is_faking,
    is_leaf_somewhere,
    is_unwatched,
    is_watching_ops,
    may_change_or_draw,
    num_higher_order_ops,
    num_op_definitions,
    peek_functorch_stack,
    pop_mode,
    push_mode,
    redispatch_watched_higher_order_op,
    redispatch_watched_op,
    set_unwatched,
    set_watching_ops,
    top_saved_tensors_hooks,
    watch_higher_order_ops,
    watch_op,
)

if TYPE_CHECKING:
    from remat.eager.selective.mode import SelectiveMode

_OWN_NAMESPACES = ("aten", "prims", "quantized")  # of torch: no op in there is effectful
_RESERVED = "prim"  # a namespace in which torch lets nobody register anything
# Torch makes tensors by these that it gives to Python as another class. What comes from Python it cannot give away.
_NEVER_WATCHED = {"aten::detach", "aten::alias"}
# Ops of which autograd saves no result. A result that it does save must be kept before that, so that it lives as long.
_SAVED_BY_NOBODY_ELSE = frozenset(
    f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "convolution")
)
# Torch's composite functions call these or others in their place, depending on whether there is a dispatch mode. There
# may be one around a forward and none around its recomputation, or the other way round: only a mode that is always
# there sees the same ops in both.
_CALLED_DEPENDING_ON_MODES = {
    "aten::view", "aten::_reshape_alias", "aten::squeeze", "aten::unsqueeze", "aten::max_pool2d_with_indices",
    "aten::_ctc_loss", "aten::linalg_eig", "aten::_linalg_eigvals", "aten::sum", "aten::all", "aten::equal", "aten::le",
    "aten::ge", "aten::new_ones", "aten::logical_and_", "aten::fill_", "aten::zero_",
}  # fmt: skip


class Handling(Enum):
    """What is done about an op where ops are watched."""

    NONE = "it passes"
    KEEP = "its result is kept, and nothing else is to be done about it"
    SAVE = "its result is kept by the mode of its region, under which it runs"
    UNDER_MODE = "it runs under the mode whether its result is kept or not"
    ANYWHERE = "so it does where autograd is switched off: torch's functions that make tensors are called like that"


# Looked up once: every op asks for them.
_NONE, _KEEP, _UNDER_MODE, _ANYWHERE = Handling.NONE, Handling.KEEP, Handling.UNDER_MODE, Handling.ANYWHERE


class Handled:
    """The ops that the engine must see under one policy."""

    __slots__ = ("__weakref__", "_answer_for", "_known", "_saved_names")

    def __init__(self, answer_for: Callable[[Any], CheckpointPolicy], saved_names: frozenset[str]) -> None:
        self._answer_for = answer_for
        self._saved_names = saved_names - _NEVER_WATCHED
        self._known: dict[int, Handling] = {}

    def how(self, op: Any) -> Handling:
        """Say what is done about an op; the same at any time."""
        known = self._known.get(id(op))
        if known is None:
            known = self._known[id(op)] = self._how(op)
        return known

    def __contains__(self, op: Any) -> bool:
        return self.how(op) is not _NONE

    def _how(self, op: Any) -> Handling:
        facts = op_facts(op)  # these keep the op alive, and so its number its own
        if op in SAC_IGNORED_OPS:
            return Handling.NONE
        if facts.is_random and not facts.mutates:
            return Handling.ANYWHERE
        if facts.runs_once or facts.mutates:
            return Handling.UNDER_MODE
        answer = self._answer_for(op)
        if answer in RECOMPUTES:
            return Handling.NONE
        is_just_kept = (
            facts.is_plain and answer not in OFFLOADS and op.name().partition(".")[0] in _SAVED_BY_NOBODY_ELSE
        )
        return Handling.KEEP if is_just_kept else Handling.SAVE

    def may_save(self, name: str) -> bool:
        """True unless the op of a name is none that the policy saves."""
        return name in self._saved_names or name.partition(".")[0] in self._saved_names


class _Watch:
    """What all threads share: the ops that have a kernel, the policies these are for, and who relies on it.

    Torch's tables of kernels are changed only while no other thread looks for a kernel of ours.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0  # that watch ops
        self._policies: weakref.WeakSet[Handled] = weakref.WeakSet()
        self._with_kernel: set[str] = set()
        self._without_kernel: set[str] = set()
        self._num_definitions = self._num_higher_order_ops = 0  # when ops were looked through last

    @property
    def num_kernels(self) -> int:
        """How many there are by now; they are numbered as they come."""
        return len(self._with_kernel) + self._num_higher_order_ops

    def start(self, is_again: bool) -> bool:
        """Have the ops of this thread watched; False if kernels are missing that cannot be added now.

        A recomputation has all kernels that its forward had, and takes no notice of others.
        """
        with self._lock:
            if not is_again and self._num_definitions != num_op_definitions() and not self._complete():
                return False
            self._num_threads += 1
        set_watching_ops(True)
        return True

    def stop(self) -> None:
        """Have them watched no longer."""
        set_watching_ops(False)
        with self._lock:
            self._num_threads -= 1

    def add(self, handled: Handled) -> bool:
        """Give kernels to the ops that a policy saves; False if that must wait."""
        with self._lock:
            missing = [name for name in self._without_kernel if handled.may_save(name) and not is_composite_name(name)]
            if missing and self._num_threads > is_watching_ops():
                return False
            for name in missing:
                self._add_kernel(name)
            self._without_kernel.difference_update(missing)
            self._policies.add(handled)
            return True

    def _complete(self) -> bool:
        """Look through the ops that somebody may have defined since the last time; False if that must wait."""
        if self._num_threads:
            return False
        self._num_definitions = num_op_definitions()
        for name in all_op_names():
            if name not in self._with_kernel and name not in self._without_kernel:
                self._add_kernel(name) if self._needs_kernel(name) else self._without_kernel.add(name)
        watch_higher_order_ops(self._num_higher_order_ops, partial(_on_higher_order_op, self.num_kernels))
        self._num_higher_order_ops = num_higher_order_ops()
        return True

    def _needs_kernel(self, name: str) -> bool:
        namespace = name.partition("::")[0]
        if namespace == _RESERVED:
            return False
        if namespace not in _OWN_NAMESPACES or may_change_or_draw(name):
            return True
        # Whether an op that is made of others has a kernel may not change between a forward and its recomputation:
        # those others would then be seen in one of the two only.
        if is_composite_name(name):
            return is_leaf_somewhere(name)
        return any(policy.may_save(name) for policy in self._policies)

    def _add_kernel(self, name: str) -> None:
        watch_op(name, _kernel(name, self.num_kernels))
        self._with_kernel.add(name)


_watch = _Watch()


def handled_by(policy: Any) -> Handled | None:
    """Return which ops the engine must see under a policy; None if that cannot be told from the op alone."""
    known = getattr(policy, "known", None)
    if type(known) is not KnownAnswers:
        return None
    found: Handled | None = known.handled
    if found is None and not policy.reads_names and _can_be_watched(policy.saved_names):
        found = Handled(policy.answer_for, policy.saved_names)
        if not _watch.add(found):
            return None
        known.handled = found
    return found


def _can_be_watched(saved_names: frozenset[str] | None) -> bool:
    if saved_names is None:
        return False
    return _CALLED_DEPENDING_ON_MODES.isdisjoint(name.partition(".")[0] for name in saved_names)


def start(is_again: bool) -> bool | None:
    """Watch the ops of this thread; say whether they were watched before, or None if they cannot be.

    Ops of a trace, which stand for others, are not watched, nor is what happens inside of one that is.
    """
    if is_faking():
        return None
    if is_watching_ops():
        return None if is_unwatched() else True
    return False if _watch.start(is_again) else None


def stop(was_watching: bool) -> None:
    """End what `start` began."""
    if not was_watching:
        _watch.stop()


def num_kernels() -> int:
    """How many kernels there are by now."""
    return _watch.num_kernels


def note_own_hooks(pack: CodeType) -> None:
    """Say that a saved-tensor hook is the engine's own, which runs no ops that anybody should see."""
    _own_hooks.add(id(pack))


_own_hooks: set[int] = set()  # by identity: the hash of a code object is computed from all of it


def _has_hooks_of_others() -> bool:
    """True if autograd hands what it saves to a hook inside the region, which may run ops that are the region's."""
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and id(getattr(hooks[0], "__code__", None)) not in _own_hooks


def _kernel(name: str, number: int) -> Callable[..., Any]:
    """Return what is run instead of an op, where ops are watched."""
    op: Any = None  # looked up when it first runs: there are thousands
    is_torchs_own = name.partition("::")[0] in _OWN_NAMESPACES

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal op
        if op is None or not is_torchs_own:  # others may be defined anew
            op = find_op(_dotted(name))
        mode = _mode()
        if mode is not None and number >= mode.num_kernels:
            return _pass(keyset, op, args, kwargs, is_hiding=False)
        how = _NONE if mode is None else mode.watched.how(op)  # type: ignore[union-attr]
        if how is _NONE or peek_functorch_stack() is not None or is_faking():
            return _pass(keyset, op, args, kwargs, is_hiding=not is_torchs_own)
        if is_autograd_off() and how is not _ANYWHERE and not _is_seen(how):
            return _pass(keyset, op, args, kwargs, is_hiding=not is_torchs_own)
        if how is _KEEP and mode.is_asked_above and not _has_hooks_of_others():  # type: ignore[union-attr]
            return mode.run_kept(op, args, kwargs)  # type: ignore[union-attr]
        return _run_under(mode, op, args, kwargs)

    return run


def _is_seen(how: Handling) -> bool:
    """True for an op that the program calls, and not another one's kernel, while autograd is off.

    In inference mode nobody can tell. Nothing is saved there: it is of no use to a backward.
    """
    return how is _UNDER_MODE and is_inference_mode_enabled()


def _pass(keyset: Any, op: Any, args: Any, kwargs: Any, is_hiding: bool) -> Any:
    """Run an op about which nothing is to be done; what it calls is watched, as it is for ops without kernel.

    Of an op of somebody else's, that is hidden: its kernel may run above autograd, and no mode would see inside of it.
    torch.func's transforms call ops anew for what they make of one; those are then watched where no transform is left.
    Torch hands numbers that stand for tensors over as numbers, and does not take them back so.
    """
    is_hiding = is_below_autograd() or (is_hiding and not is_composite(op))
    if (is_hiding and peek_functorch_stack() is None) or is_faking() or _has_number_for_tensor(op, args):
        return _run_under(None, op, args, kwargs)
    return redispatch_watched_op(keyset, op, args, kwargs)


def _has_number_for_tensor(op: Any, args: Any) -> bool:
    arguments = op._schema.arguments
    return any(isinstance(a, (int, float, complex)) and str(p.type) == "Tensor" for a, p in zip(args, arguments))  # noqa: B905


def _dotted(name: str) -> str:
    namespace, _, rest = name.partition("::")
    return f"{namespace}.{rest}" if "." in rest else f"{namespace}.{rest}.default"


def _on_higher_order_op(number: int, op: Any, *args: Any, **kwargs: Any) -> Any:
    mode = _mode()
    if mode is not None and number >= mode.num_kernels and not is_faking():
        return redispatch_watched_higher_order_op(op, args, kwargs)
    is_handled = mode is not None and op in mode.watched and not is_faking()  # type: ignore[operator]
    return _run_under(mode if is_handled else None, op, args, kwargs)


def _mode() -> SelectiveMode | None:
    """Return the mode of the running region, if ops are watched for it."""
    execution = local.execution
    mode: SelectiveMode | None = None if execution is None else execution.mode
    return None if mode is None or mode.watched is None or mode.num_suspensions else mode


def run_unwatched(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that has been watched, and all that it calls, seen by nobody."""
    set_unwatched(True)
    try:
        return _call(op, args, kwargs)
    finally:
        set_unwatched(False)


def _call(op: Any, args: Any, kwargs: Any) -> Any:
    """Call an op; by its other overloads where a number stands for a tensor and that is not accepted from Python."""
    try:
        return op(*args, **kwargs)
    except RuntimeError:
        if accepts_numbers_for_tensors(op) or not _has_number_for_tensor(op, args):
            raise
    return op.overloadpacket(*args, **kwargs)


def _run_under(mode: SelectiveMode | None, op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that has been watched, and all that it calls, seen by a mode or by nobody."""
    flags = None if mode is None else push_mode(mode)
    set_unwatched(True)
    try:
        return _call(op, args, kwargs)
    finally:
        set_unwatched(False)
        if flags is not None:
            pop_mode(flags)
