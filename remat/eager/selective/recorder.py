"""The forward of a selective region: the policy is asked about every op, and what it wants saved is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from remat.eager.recompute.frames import Frame
from remat.eager.selective.makers import Made, Makers
from remat.eager.selective.saved import (
    AnyEntry,
    Entry,
    LooseSink,
    OffloadedEntry,
    OnMutation,
    OpKey,
    Sink,
    Store,
    open_segment,
    tensors_of,
    without_handles,
)
from remat.eager.state.rng import OpRngState
from remat.eager.types.hooks import is_called_by_fsdp, may_be_sharded
from remat.eager.types.memory import storage_id
from remat.eager.types.mode import EngineMode, support_compiled_code
from remat.eager.types.ops import SAC_IGNORED_OPS, OpFacts, is_cached_cast, known_facts, op_facts, op_key
from remat.passes.shared.module_path import current_module_path
from remat.passes.shared.name_op import name_op
from remat.passes.shared.policy import (
    OFFLOADS,
    RECOMPUTES,
    CheckpointPolicy,
    PolicyError,
    PolicyFunction,
    SelectiveCheckpointContext,
    checked_answer,
    policy_name,
)
from remat.passes.shared.source import running_line
from remat.passes.torch_private import (
    fx_current_meta,
    is_tracing,
    is_tracing_proxies,
    traced_nodes_since,
    traced_nodes_so_far,
    tree_leaves,
    wait_for,
)

# As tuples: `in` then compares identities, where a set would call the enum's hash, which is Python code.
_RECOMPUTES, _OFFLOADS = tuple(RECOMPUTES), tuple(OFFLOADS)


_UNBOUND = LooseSink()  # nothing is kept there
_TAGS = ("ac_graph_id", "recompute")  # what the nodes of a trace are given


class Recorder(EngineMode):  # type: ignore[no-untyped-call]
    """Ask the policy about every op of a forward, and keep what it wants saved."""

    # What most forwards have nothing of is said once, for the class: setting it up for each takes time.
    ac_graph_id: Any = None  # set by torch when this mode runs under its compiler
    disk_folder: str | None = None  # where offloaded values go; None for host memory
    sink: Sink = _UNBOUND
    _makers: Makers | None = None
    _ran_a_random_op = _saved_a_random_op = False
    _state: dict[Any, Any] | None = None  # of the policy, for this call of the region
    _store: Store | None = None
    _tags_before: dict[str, Any] | None = None
    _views: dict[int, list[OpKey]] | None = None  # saved ones, by the memory that they show

    def __init__(self, policy: PolicyFunction, on_mutation: OnMutation) -> None:
        self.has_fsdp = may_be_sharded()
        support_compiled_code()
        self.policy = policy
        self.on_mutation = on_mutation
        # Ops that need no care of ours, under a policy that answers by name alone: whether they are saved.
        known: dict[int, bool] | None = getattr(policy, "known", None)
        self._known = {} if known is None else known  # what is learnt about one policy holds for no other
        self._answer_for: Callable[[Any], CheckpointPolicy] | None = getattr(policy, "answer_for", None)

    def bind(self, sink: Sink) -> Recorder:
        """Put what is kept into a sink from now on."""
        self.sink = sink
        if self._store is not None:  # a context that was entered before
            self._ran_a_random_op = self._saved_a_random_op = False
            self._state = self._views = None
        store = sink.store
        if store is None:
            store = sink.store = Store()
        self._store, self._counts = store, store.counts
        # Who made which value matters only to policies that speak of names, as any function may.
        self._makers = Makers() if getattr(self.policy, "reads_names", True) else None
        return self

    def recorder(self, frame: Frame) -> Recorder:
        """Return another one for a frame, with the same policy."""
        other = Recorder(self.policy, self.on_mutation)
        other.ac_graph_id = self.ac_graph_id
        return other.bind(frame)

    @property
    def is_bound(self) -> bool:
        """True from the start of a forward until its end."""
        return self.sink is not _UNBOUND

    def __enter__(self) -> Recorder:
        if self.sink is _UNBOUND:
            self.bind(LooseSink())
        if is_tracing_proxies():
            self._known = {}  # every op must be tagged, also those whose answer is known from runs without a trace
            self._tags_before = {name: fx_current_meta().get(name) for name in _TAGS}
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._tags_before is not None:
            _put_back_tags(self._tags_before)
            self._tags_before = None

    def release(self) -> None:
        """Let go of the frame, after its forward."""
        self.sink = _UNBOUND

    @property
    def storage(self) -> dict[Any, dict[int, Any]]:
        """What was kept so far, by op and number."""
        found: dict[Any, dict[int, Any]] = {}
        if self.sink.store is None:
            return found
        for (key, number), reference in self.sink.store.entries.items():
            entry = reference()
            if entry is not None and key in known_facts:
                found.setdefault(known_facts[key].op, {})[number] = entry
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op of the forward, and keep its output if the policy says so."""
        if self.has_fsdp and is_called_by_fsdp():
            return func(*args, **kwargs) if kwargs else func(*args)
        key = id(func)
        is_saved = self._known.get(key)
        if is_saved is not None and not self.num_suspensions:
            number = self._counts[key]
            self._counts[key] = number + 1
            out = func._op(*args, **kwargs) if kwargs else func._op(*args)
            if is_saved:
                self._add((key, number), Entry(out, self.on_mutation), out)
            if self._makers is not None:
                self._makers.note((key, number), op_facts(func), out)
            return out
        if self.num_suspensions or func in SAC_IGNORED_OPS or is_cached_cast(func, args):
            return func(*args, **kwargs) if kwargs else func(*args)
        if is_tracing_proxies():
            return self._dispatch_traced(func, args, kwargs or {})
        return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts = op_facts(func)
        if facts.mutates and self._store is not None and self._store.entries:
            self._before_mutation(facts, args)
        rng_state = self._before_random(args, kwargs or {}) if facts.is_random else None
        key = op_key(func, args)
        number = self._counts[key]
        self._counts[key] = number + 1  # also if it fails: so it does when it runs again
        out = func(*args, **kwargs) if kwargs else func(*args)
        answer = self._ask(func, out, args, kwargs)
        if facts.runs_once and answer is CheckpointPolicy.MUST_RECOMPUTE:
            raise self._must_run_once(facts, func)
        # What writes to several places is run again in any case: there is no other way to have them all.
        is_kept_whole = not facts.mutates or facts.updates_in_place
        is_recomputed = not facts.runs_once and (answer in _RECOMPUTES or not is_kept_whole)
        if rng_state is not None and (is_recomputed or self._makers is not None):  # a name may drop it later
            assert self.sink.store is not None
            self.sink.store.rng_states[(key, number)] = rng_state
            self.sink.store.kept.add(key)
        if not is_recomputed:
            self._keep((key, number), facts, answer, out, args)
        self._ran_a_random_op |= facts.is_random
        if self._makers is not None:
            self._makers.note((key, number), facts, out, answer is CheckpointPolicy.MUST_SAVE)
        if self._answer_for is not None and facts.is_plain and answer not in _OFFLOADS:
            self._known[key] = answer not in _RECOMPUTES
        return out

    def _ask(self, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        if self._answer_for is not None:
            return self._answer_for(func)
        return self._ask_policy(func, out, args, kwargs)

    def _ask_policy(self, func: Any, out: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        if self._state is None:
            self._state = {}
        context.state = self._state
        try:
            answer = self.policy(context, func, *args, **(kwargs or {}))
        except Exception as error:
            raise PolicyError(
                f"the policy {policy_name(self.policy)} raised {type(error).__name__} when asked about {func}: "
                f"{error}{self._place()}"
            ) from error
        if type(answer) is CheckpointPolicy:
            return answer
        return checked_answer(answer, self.policy, func, self._place)

    def _must_run_once(self, facts: OpFacts, what: Any) -> PolicyError:
        return PolicyError(
            f"the policy {policy_name(self.policy)} says MUST_RECOMPUTE for {what}, {facts.runs_once}, which runs "
            f"once. Return PREFER_RECOMPUTE for it, or take it out of the region.{self._place()}"
        )

    def _place(self) -> str:
        """Say for a message which region this is, which module of it is running, and on which line."""
        region = f"in {self.sink.label}, " if isinstance(self.sink, Frame) else ""
        path = current_module_path()
        return f" ({region}{f'module {path}, ' if path else ''}{running_line()})"

    def _keep(self, key: OpKey, facts: OpFacts, answer: CheckpointPolicy, out: Any, args: Any) -> None:
        if facts.mutates and not facts.updates_in_place:
            out = ([args[i] for i in facts.mutates if i < len(args)], out)
        if facts.is_pending:
            if "reduce_scatter" in facts.op._schema.name:
                _wait_for_handles(out)  # gloo writes the result in the wait, by ops that a recomputation does not run
            out = without_handles(out)
        if answer in _OFFLOADS and not facts.is_pending:
            self._add(key, OffloadedEntry(out, self.disk_folder), out)
        else:
            self._add(key, Entry(out, self.on_mutation, facts.updates_in_place, facts.is_pending), out)
        self._saved_a_random_op |= facts.is_random

    def _add(self, key: OpKey, entry: AnyEntry, out: Any) -> None:
        reference: weakref.ref[AnyEntry] = weakref.ref(entry)
        segment = self.sink.segment
        if segment is None or segment.is_taken:
            segment = open_segment(self.sink)
        segment.items.append(entry)
        store = segment.store
        store.entries[key] = reference
        store.kept.add(key[0])
        if type(entry) is OffloadedEntry:
            store.has_offloaded = True
        facts = known_facts.get(key[0])
        if facts is not None and facts.is_view:
            self._note_views(key, out)

    def _note_views(self, key: OpKey, out: Any) -> None:
        if self._views is None:
            self._views = {}
        for tensor in tensors_of(out):
            self._views.setdefault(storage_id(tensor), []).append(key)

    # ------------------------------------------------------------------------------------------------- names

    def note_name(self, value: torch.Tensor, name: str) -> None:
        """Ask the policy about a named value, and change what is kept of the op that made it."""
        if self._makers is None or self.num_suspensions or is_tracing():
            return
        self.num_suspensions += 1  # what the policy and we do with the value is no part of the region
        try:
            with torch.no_grad():
                answer = self._ask_policy(name_op(), value, (value, name), {})
                made = self._makers.find(value)
                if made is not None and answer is not CheckpointPolicy.PREFER_RECOMPUTE:
                    self._change(made, answer, value, name)
        finally:
            self.num_suspensions -= 1

    def _change(self, made: Made, answer: CheckpointPolicy, value: torch.Tensor, name: str) -> None:
        if answer is CheckpointPolicy.MUST_RECOMPUTE:
            if made.facts.runs_once:
                raise self._must_run_once(made.facts, f"{name!r}, the result of {made.facts.op}")
            if made.others is not None and made.must_be_saved:
                raise self._contradiction(made.facts.op, name)
            if made.is_shown_whole_by(value):
                self._drop(made.key)
            return
        kind = OffloadedEntry if answer in _OFFLOADS else Entry
        assert self.sink.store is not None
        reference = self.sink.store.entries.get(made.key)
        if reference is None or type(reference()) is not kind:
            self._keep_made(made, answer, value)

    def _contradiction(self, op: Any, name: str) -> PolicyError:
        return PolicyError(
            f"the policy {policy_name(self.policy)} says MUST_SAVE for {op} and MUST_RECOMPUTE for {name!r}, one of "
            f"its results, but an op with several is kept or run again whole. Return PREFER_SAVE for the op, or no "
            f"MUST_RECOMPUTE for the name.{self._place()}"
        )

    def _keep_made(self, made: Made, answer: CheckpointPolicy, value: torch.Tensor) -> None:
        out = made.output(value)
        if out is None:
            return
        self._drop(made.key)
        is_copied = bool(made.facts.mutates) and self.on_mutation is OnMutation.COPY
        if answer in _OFFLOADS:
            self._add(made.key, OffloadedEntry(out, self.disk_folder), out)
        else:
            self._add(made.key, Entry(out, self.on_mutation, is_copied), out)
        self._saved_a_random_op |= made.facts.is_random

    def _drop(self, key: OpKey) -> None:
        """Keep an op's result no longer."""
        assert self.sink.store is not None
        reference = self.sink.store.entries.pop(key, None)
        entry = reference() if reference is not None else None
        segment = self.sink.segment
        while entry is not None and segment is not None:
            if any(item is entry for item in segment.items):
                segment.items = [item for item in segment.items if item is not entry]
                return
            segment = segment.previous

    # ------------------------------------------------------------------------------------------ before an op runs

    def _before_mutation(self, facts: OpFacts, args: Any) -> None:
        storages = {storage_id(t) for i in facts.mutates if i < len(args) for t in tensors_of(args[i])}
        if self._views:
            for storage in storages & self._views.keys():
                for key in self._views.pop(storage):
                    self._drop(key)  # a copy would not show the change, nor pass on one that is made through it
        assert self._store is not None
        for reference in self._store.entries.values():
            entry = reference()
            if entry is not None:
                entry.before_mutation(storages)

    def _before_random(self, args: Any, kwargs: dict[str, Any]) -> OpRngState | None:
        """Note where a random op starts, if replaying the ops before it will not lead there."""
        generator = kwargs.get("generator")
        frame = self.sink
        if generator is not None and isinstance(frame, Frame) and frame.rng is not None:
            frame.rng.add_generator(generator)
        if not self._may_skip_draws or (isinstance(frame, Frame) and frame.rng is None):
            return None
        if generator is not None:
            return OpRngState.capture_generator(generator)
        return OpRngState.capture(_device_of(args, kwargs))

    @property
    def _may_skip_draws(self) -> bool:
        """True if the replay of what ran so far may draw fewer random numbers; a name may have an op kept later."""
        return self._saved_a_random_op or (self._ran_a_random_op and self._makers is not None)

    def note_rng_before_child(self, number: int) -> None:
        """Note where an inner region starts to draw, if replaying the ops before it will not lead there."""
        if self._may_skip_draws and self.sink.store is not None:
            self.sink.store.rng_before_children[number] = self._rng_now()

    def note_rng_after(self) -> None:
        """Note the random state at the end, if replaying this forward will not lead there."""
        if self._saved_a_random_op and self.sink.store is not None:
            self.sink.store.rng_after = self._rng_now()

    def _rng_now(self) -> list[OpRngState]:
        """Return the state of the generators that a replay of this region puts back; of none if it does not."""
        frame = self.sink
        if not isinstance(frame, Frame) or frame.rng is None:
            return []
        devices = [torch.device("cpu"), *(device for device, _ in frame.rng.devices)]
        generators = [OpRngState.capture_generator(g) for g, _ in frame.rng.generators]
        return [OpRngState.capture(device) for device in devices] + generators

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
        self._keep((key, number), op_facts(func), CheckpointPolicy.MUST_SAVE, out, args)
        return out


def _wait_for_handles(out: Any) -> None:
    for leaf in tree_leaves(out):
        if isinstance(leaf, torch.ScriptObject):
            wait_for(leaf)


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    tensors = tensors_of((args, kwargs))
    device = kwargs.get("device")
    return tensors[0].device if tensors else torch.device(device if device is not None else "cpu")


def _put_back_tags(tags: dict[str, Any]) -> None:
    """Let nodes that are traced from here on have the tags that they had: a tracer may use one dictionary for all."""
    meta = fx_current_meta()
    for name, value in tags.items():
        if value is None:
            meta.pop(name, None)
        else:
            meta[name] = value
