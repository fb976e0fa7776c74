"""Selective regions: a policy decides, op by op, what the forward keeps for the recomputation.

Two dispatch modes. The `Recorder` runs in forward, asks the policy about every op and keeps the outputs it wants
saved; the `Replayer` runs in recompute and answers those ops from what was kept. Ops are matched by their name and
how often they ran before. What is kept hangs on the holders that autograd owns, as a chain of segments: a holder
keeps alive what was saved before it, so every value dies as soon as no living part of the graph can ask for a
recomputation that passes it, and lives as long as one can, however many backwards there are.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from remat.eager.errors import CheckpointError
from remat.eager.frames import Frame
from remat.eager.offload import Offloaded, offload
from remat.eager.rng import OpRngState
from remat.eager.state import version_of
from remat.passes.policy import (
    OFFLOADS,
    RECOMPUTES,
    CheckpointPolicy,
    PolicyError,
    PolicyFunction,
    checked_answer,
    policy_name,
)
from remat.passes.torch_private import (
    DispatchKey,
    FunctionalTensor,
    HigherOrderOperator,
    SetExcludeDispatchKeyGuard,
    TorchDispatchMode,
    fx_current_meta,
    is_tracing_proxies,
    traced_nodes_since,
    traced_nodes_so_far,
    tree_leaves,
    tree_map,
)

# Ops that forward and recompute run in different numbers for reasons of the machinery's own: no policy sees
# them.
SAC_IGNORED_OPS: set[Any] = {
    torch.ops.aten.detach.default,
    torch.ops.prim.device.default,
    *FunctionalTensor.metadata_fns,
}

_CAST = torch.ops.aten._to_copy.default
_NOT_JUST_RUN = SAC_IGNORED_OPS | {_CAST}
# As tuples: `in` then compares identities, where a set would call the enum's hash, which is Python code.
_RECOMPUTES, _OFFLOADS = tuple(RECOMPUTES), tuple(OFFLOADS)
_VERSION_COUNTING = DispatchKey.ADInplaceOrView
_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})


class SelectiveCheckpointContext:
    """What a policy is told about the moment it is asked; `op_output` is the op's result."""

    def __init__(self, *, is_recompute: bool, op_output: Any = None) -> None:
        self.is_recompute = is_recompute
        self.op_output = op_output


class OnMutation(Enum):
    """What to do when a value that was saved is changed in place."""

    COPY = "keep a copy of the value from before"
    RAISE = "raise when the value is needed"
    ALLOW = "hand out the changed value"


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the engine must know about an op, looked up once."""

    op: Any
    is_random: bool
    is_collective: bool
    mutates: tuple[int, ...]
    """Positions of the arguments it changes in place."""
    updates_in_place: bool
    """True for `x.op_(...)`: changes its first argument only, and returns it."""
    is_plain: bool
    """True if running it is all there is to it."""


# Ops are keyed by identity throughout: hashing one runs Python code, twice per op and table. Facts keep the
# op alive.
_facts: dict[int, OpFacts] = {}


def op_facts(op: Any) -> OpFacts:
    """Look an op up."""
    facts = _facts.get(id(op))
    if facts is None:
        facts = _facts[id(op)] = _find_facts(op)
    return facts


def _find_facts(op: Any) -> OpFacts:
    if isinstance(op, HigherOrderOperator):
        return OpFacts(op, False, False, (), updates_in_place=False, is_plain=False)
    arguments = op._schema.arguments
    mutates = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    returns = op._schema.returns
    returns_first = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    is_collective = op.namespace in _COLLECTIVE_NAMESPACES
    return OpFacts(
        op=op,
        is_random=is_random,
        is_collective=is_collective,
        mutates=mutates,
        updates_in_place=mutates == (0,) and returns_first,
        is_plain=not (is_random or is_collective or mutates or op in _NOT_JUST_RUN),
    )


class Entry:
    """One op's saved output, as aliases without history: the real tensors would tie the graph into a knot."""

    __slots__ = ("__weakref__", "_is_copy", "_on_mutation", "_value", "_versions")

    def __init__(self, value: Any, on_mutation: OnMutation, is_written: bool = False) -> None:
        # What an in-place op wrote to may be anything, a buffer say, that others write to later.
        self._is_copy = is_written and on_mutation is OnMutation.COPY
        self._value = _map_tensors(torch.clone if self._is_copy else _alias, value)
        # An in-place op's own change is counted only after the mode has returned its output.
        if type(value) is torch.Tensor:
            self._versions = [value._version + is_written]
        else:
            self._versions = [version_of(t) + is_written for t in _tensors(self._value)]
        self._on_mutation = on_mutation

    @property
    def val(self) -> Any:
        """The value itself."""
        return self._value

    def before_mutation(self, storages: set[int]) -> None:
        """Take a copy if one of the storages is about to be changed."""
        if self._on_mutation is OnMutation.COPY and not self._is_copy:
            tensors = _tensors(self._value)
            if any(storage_id(t) in storages for t in tensors):
                self._value = _map_tensors(torch.clone, self._value)
                self._is_copy = True

    def take(self) -> Any:
        """Return the value as the op would have returned it: new tensors without history."""
        value = self._value
        if type(value) is torch.Tensor and not self._is_copy and value._version <= self._versions[0]:
            return value.detach()
        if self._is_copy:
            return _map_tensors(torch.clone, value)  # the op after it will change it again
        if self._on_mutation is not OnMutation.ALLOW:
            for tensor, version in zip(_tensors(self._value), self._versions, strict=True):
                if version_of(tensor) > version:
                    raise CheckpointError(
                        "Tensor cached during selective activation checkpoint has been mutated: its shape is "
                        f"{tuple(tensor.shape)}. Save the value before the in-place op changes it by other "
                        f"means, "
                        "let the policy recompute it, or use a region's own `policy=`, which keeps a copy."
                    )
        return _map_tensors(torch.Tensor.detach, self._value)


class OffloadedEntry:
    """One op's output, kept in host memory."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: Any) -> None:
        self._value = _map_tensors(offload, value)

    @property
    def val(self) -> Any:
        """The value, brought back."""
        return self.take()

    def before_mutation(self, storages: set[int]) -> None:
        """Do nothing: this is a copy anyway."""

    def take(self) -> Any:
        """Bring the value back to its device."""
        return tree_map(lambda x: x.load() if isinstance(x, Offloaded) else x, self._value)

    def prefetch(self) -> None:
        """Start bringing the value back, where that can overlap with other work."""
        for leaf in tree_leaves(self._value):
            if isinstance(leaf, Offloaded):
                leaf.prefetch()


AnyEntry = Entry | OffloadedEntry
OpKey = tuple[Any, int]


class Store:
    """What one forward of a region saved: counts for matching, values known weakly."""

    __slots__ = ("children", "counts", "entries", "rng_after", "rng_states")

    def __init__(self) -> None:
        self.counts: defaultdict[Any, int] = defaultdict(int)
        self.entries: dict[OpKey, weakref.ref[AnyEntry]] = {}
        self.rng_states: dict[OpKey, OpRngState] = {}
        self.rng_after: list[OpRngState] = []
        self.children: dict[int, weakref.ref[Segment]] = {}

    def restore_rng_after(self) -> None:
        """Leave the random state as the forward did, though saved random ops were not drawn again."""
        for state in self.rng_after:
            state.restore()


class Segment:
    """A part of what a forward saved, with all parts before it."""

    __slots__ = ("__weakref__", "is_taken", "items", "previous", "store")

    def __init__(self, previous: Segment | None, store: Store) -> None:
        self.previous = previous
        self.store = store
        self.items: list[Any] = []
        self.is_taken = False  # by a holder; what is saved from now on must not live as long as that


class Sink(Protocol):
    """Where a recorder puts what it keeps: a frame, or a stand-in when no frame of ours is there."""

    segment: Segment | None
    store: Store | None


class LooseSink:
    """A sink of its own, for contexts that are entered by somebody else's checkpoint."""

    __slots__ = ("segment", "store")

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.store: Store | None = None


def open_segment(sink: Sink) -> Segment:
    """Return the segment that new values go to."""
    if sink.store is None:
        sink.store = Store()
    segment = sink.segment
    if segment is None or segment.is_taken:
        segment = sink.segment = Segment(segment, sink.store)
    return segment


def adopt_child(sink: Sink, index: int, child: Segment) -> None:
    """Keep what an inner region saved as long as the outer one may be run again past it."""
    segment = open_segment(sink)
    segment.items.append(child)
    assert sink.store is not None
    sink.store.children[index] = weakref.ref(child)


class _SelectiveMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What recorder and replayer share: they step aside inside inner regions, which have their own policy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_suspensions = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper that keeps compilers out of a mode: a region has done that."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code inside a region be one op to the policy, instead of forbidding it."""
        return True


class Recorder(_SelectiveMode):  # type: ignore[no-untyped-call]
    """Ask the policy about every op of a forward, and keep what it wants saved."""

    def __init__(self, policy: PolicyFunction, on_mutation: OnMutation, sink: Sink | None = None) -> None:
        super().__init__()
        _support_compiled_code()
        self.policy = policy
        self.on_mutation = on_mutation
        self.sink: Sink = sink if sink is not None else LooseSink()
        self.ac_graph_id: Any = None  # set by torch when this mode runs under its compiler
        if self.sink.store is None:
            self.sink.store = Store()
        self._counts = self.sink.store.counts
        # Ops that need no care of ours, under a policy that answers by name alone: whether they are saved.
        self._known: dict[int, bool] = getattr(policy, "known", {})
        self._answer_for: Callable[[Any], CheckpointPolicy] | None = getattr(policy, "answer_for", None)
        self._entries: list[weakref.ref[AnyEntry]] = []
        self._saved_a_random_op = False

    def release(self) -> None:
        """Let go of the frame, after its forward."""
        self.sink = LooseSink()

    @property
    def storage(self) -> dict[Any, dict[int, Any]]:
        """What was kept so far, by op and number."""
        found: dict[Any, dict[int, Any]] = {}
        assert self.sink.store is not None
        for (key, number), reference in self.sink.store.entries.items():
            entry = reference()
            if entry is not None and key in _facts:
                found.setdefault(_facts[key].op, {})[number] = entry
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op of the forward, and keep its output if the policy says so."""
        key = id(func)
        is_saved = self._known.get(key)
        if is_saved is not None and not self.num_suspensions:
            number = self._counts[key]
            self._counts[key] = number + 1
            out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            if is_saved:
                self._add((key, number), Entry(out, self.on_mutation))
            return out
        if self.num_suspensions or func in SAC_IGNORED_OPS or _is_cached_cast(func, args):
            return func(*args, **kwargs) if kwargs else func(*args)
        if is_tracing_proxies():
            return self._dispatch_traced(func, args, kwargs or {})
        return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = op_facts(func)
        if facts.mutates and self._entries:
            self._before_mutation(facts, args)
        rng_state = self._before_random(args, kwargs or {}) if facts.is_random else None
        out = func(*args, **kwargs) if kwargs else func(*args)
        key = op_key(func, args)
        number = self._counts[key]
        self._counts[key] = number + 1
        answer = self._ask(func, out, args, kwargs)
        if answer in _RECOMPUTES and not facts.is_collective:
            if rng_state is not None:
                assert self.sink.store is not None
                self.sink.store.rng_states[(key, number)] = rng_state
        else:
            self._keep((key, number), func, facts, answer, out)
        if self._answer_for is not None and facts.is_plain and answer not in _OFFLOADS:
            self._known[key] = answer not in _RECOMPUTES
        return out

    def _ask(self, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        if self._answer_for is not None:
            return self._answer_for(func)
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        try:
            answer = self.policy(context, func, *args, **(kwargs or {}))
        except Exception as error:
            raise PolicyError(
                f"the policy {policy_name(self.policy)} raised {type(error).__name__} when asked about {func}: {error}"
            ) from error
        return answer if type(answer) is CheckpointPolicy else checked_answer(answer, self.policy, func)

    def _keep(self, key: OpKey, func: Any, facts: OpFacts, answer: CheckpointPolicy, out: Any) -> None:
        if facts.is_collective and answer is CheckpointPolicy.MUST_RECOMPUTE:
            raise PolicyError(
                f"the policy {policy_name(self.policy)} says MUST_RECOMPUTE for {func}, a collective, "
                f"which runs once. "
                "Return PREFER_RECOMPUTE for it, or take it out of the region."
            )
        if facts.mutates and not facts.updates_in_place:
            return  # writes to several places: running it again is the only way to have them all
        entry: AnyEntry = (
            OffloadedEntry(out) if answer in _OFFLOADS else Entry(out, self.on_mutation, bool(facts.mutates))
        )
        self._add(key, entry)
        self._saved_a_random_op |= facts.is_random

    def _add(self, key: OpKey, entry: AnyEntry) -> None:
        reference: weakref.ref[AnyEntry] = weakref.ref(entry)
        segment = open_segment(self.sink)
        segment.items.append(entry)
        segment.store.entries[key] = reference
        self._entries.append(reference)

    def _before_mutation(self, facts: OpFacts, args: Any) -> None:
        storages = {storage_id(t) for i in facts.mutates if i < len(args) for t in _tensors(args[i])}
        for reference in self._entries:
            entry = reference()
            if entry is not None:
                entry.before_mutation(storages)

    def _before_random(self, args: Any, kwargs: dict[str, Any]) -> OpRngState | None:
        """Note where a random op starts, if replaying the ops before it will not lead there."""
        generator = kwargs.get("generator")
        frame = self.sink
        if generator is not None:
            if isinstance(frame, Frame) and frame.rng is not None:
                frame.rng.add_generator(generator)
            return None
        if not self._saved_a_random_op or (isinstance(frame, Frame) and frame.rng is None):
            return None
        return OpRngState.capture(_device_of(args, kwargs))

    def note_rng_after(self) -> None:
        """Note the random state at the end, if replaying this forward will not lead there."""
        frame = self.sink
        if self._saved_a_random_op and isinstance(frame, Frame) and frame.rng is not None:
            assert frame.store is not None
            devices = [torch.device("cpu"), *(device for device, _ in frame.rng.devices)]
            frame.store.rng_after = [OpRngState.capture(device) for device in devices]

    def _dispatch_traced(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write the policy's answer into the graph that is being traced, for its partitioner."""
        meta = fx_current_meta()
        meta["ac_graph_id"] = self.ac_graph_id
        meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        mark = traced_nodes_so_far()
        out = func(*args, **kwargs)
        answer = self._ask(func, out, args, kwargs)
        for node in traced_nodes_since(mark):
            node.meta["recompute"] = answer
        # The partitioner decides from the tags; tracing the recomputation must add no ops of its own.
        key = op_key(func, args)
        number = self._counts[key]
        self._counts[key] = number + 1
        self._keep((key, number), func, op_facts(func), CheckpointPolicy.MUST_SAVE, out)
        return out


class Replayer(_SelectiveMode):  # type: ignore[no-untyped-call]
    """Answer the ops of a recomputation from what their forward kept, and run the others."""

    def __init__(self, store: Store | None, owner: Recorder | None = None) -> None:
        super().__init__()
        self._owner = owner  # keeps the values alive where no frame does
        self._use(store if store is not None else Store())

    def _use(self, store: Store) -> None:
        self._store = store
        self._counts: dict[Any, int] = defaultdict(int)
        # Ops of which nothing was kept need only be counted.
        kept = {id(_CAST), *(key for key, _ in store.entries), *(key for key, _ in store.rng_states)}
        self._limits = {key: count for key, count in store.counts.items() if key not in kept}

    def __enter__(self) -> Replayer:
        if self._owner is not None and self._owner.sink.store is not None:
            self._use(self._owner.sink.store)
        self._prefetch()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _prefetch(self) -> None:
        for reference in self._store.entries.values():
            entry = reference()
            if isinstance(entry, OffloadedEntry):
                entry.prefetch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op of the recomputation, or return what its forward returned."""
        if not self.num_suspensions:
            limit = self._limits.get(id(func))
            if limit:
                self._limits[id(func)] = limit - 1
                return func._op(*args, **kwargs) if kwargs else func._op(*args)
        if self.num_suspensions or func in SAC_IGNORED_OPS or _is_cached_cast(func, args):
            return func(*args, **kwargs) if kwargs else func(*args)
        store, key = self._store, op_key(func, args)
        number = self._counts[key]
        self._counts[key] = number + 1
        reference = store.entries.get((key, number))
        entry = reference() if reference is not None else None
        if entry is not None:
            value = entry.take()
            return args[0].copy_(value) if op_facts(func).mutates else value
        if key in self._limits or number >= store.counts.get(key, 0):
            self._raise_surplus(func, key)
        state = store.rng_states.get((key, number))
        if state is not None:
            state.restore()
        return func(*args, **kwargs) if kwargs else func(*args)

    def _raise_surplus(self, func: Any, key: Any) -> None:
        """Raise for an op that the forward did not run."""
        count = self._store.counts.get(key, 0)
        what = f"{func} invocation index {count}" if count else f"{func}"
        raise CheckpointError(
            f"{what} encountered during backward but not found in storage: the forward of this region ran it "
            f"{count} time(s), and the recomputation runs it once more, {_nearest_user_line()}. Likely "
            f"cause: a "
            "cache that grew, control flow on data, train and eval mode, or other state that changed in "
            "between."
        )


def _nearest_user_line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or "/remat/" in frame.f_code.co_filename):
        frame = frame.f_back
    return "on an unknown line" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True)
class Selective:
    """A region's policy, ready to run."""

    policy: PolicyFunction
    on_mutation: OnMutation = OnMutation.COPY
    ac_graph_id: Any = None

    def recorder(self, frame: Frame) -> Recorder:
        """Return the mode for the forward of a frame."""
        recorder = Recorder(self.policy, self.on_mutation, frame)
        recorder.ac_graph_id = self.ac_graph_id
        return recorder

    def replayer(self, store: Store | None) -> Replayer:
        """Return the mode for a recomputation."""
        return Replayer(store)


def _is_cached_cast(func: Any, args: Any) -> bool:
    """True for a cast of a weight, which autocast may have kept from before the region or not."""
    return func is _CAST and args[0].requires_grad and args[0].is_leaf


def op_key(func: Any, args: Any) -> Any:
    """Return what an op is matched by: its identity, and for a compiled block also which one."""
    if isinstance(func, HigherOrderOperator):
        from remat.passes.torch_private import compiled_code_key

        return compiled_code_key(func, args)
    return id(func)


_supports_compiled_code = False


def _support_compiled_code() -> None:
    """Tell torch's op for compiled blocks about our modes, once compiled code can exist at all."""
    global _supports_compiled_code
    if not _supports_compiled_code and "torch._higher_order_ops.wrap" in sys.modules:
        from remat.passes.torch_private import redirect_compiled_code_to

        redirect_compiled_code_to(Recorder)
        redirect_compiled_code_to(Replayer)
        _supports_compiled_code = True


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory with no history but the same version counter."""
    with SetExcludeDispatchKeyGuard(_VERSION_COUNTING, False):
        return tensor.detach()


def _map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    tensors = _tensors((args, kwargs))
    device = kwargs.get("device")
    return tensors[0].device if tensors else torch.device(device if device is not None else "cpu")


def storage_id(tensor: torch.Tensor) -> int:
    """Identify the memory behind a tensor."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):  # wrapper subclasses own no storage
        return id(tensor)
