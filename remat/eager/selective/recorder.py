"""The forward of a selective region: the policy is asked about every op, and what it wants saved is kept."""

from __future__ import annotations

from typing import Any

import torch

from remat.eager.selective.asking import Asker
from remat.eager.selective.keeping import Keeper, LooseSink, RegionSink
from remat.eager.selective.makers import Made, Makers
from remat.eager.selective.saved import Entry, OffloadedEntry, OnMutation
from remat.passes.torch_private import (
    fx_current_meta,
    is_tracing,
    is_tracing_proxies,
    traced_nodes_since,
    traced_nodes_so_far,
)

from ...passes.ops import name_op
from ...passes.shared import OFFLOADS, RECOMPUTES, CheckpointPolicy, PolicyFunction
from ..types import (
    SAC_IGNORED_OPS,
    EngineMode,
    Store,
    is_cached_cast,
    is_called_by_fsdp,
    known_facts,
    may_be_sharded,
    op_facts,
    op_key,
    support_compiled_code,
)

# As tuples: `in` then compares identities, where a set would call the enum's hash, which is Python code.
_RECOMPUTES, _OFFLOADS = tuple(RECOMPUTES), tuple(OFFLOADS)

_TAGS = ("ac_graph_id", "recompute")  # what the nodes of a trace are given


class Recorder(EngineMode):  # type: ignore[no-untyped-call]
    """Ask the policy about every op of a forward, and keep what it wants saved."""

    # What most forwards have nothing of is said once, for the class: setting it up for each takes time.
    ac_graph_id: Any = None  # set by torch when this mode runs under its compiler
    is_bound = False  # true from the start of a forward until its end
    _asker: Asker
    _keeper: Keeper
    _makers: Makers | None = None
    _tags_before: dict[str, Any] | None = None

    def __init__(self, policy: PolicyFunction, on_mutation: OnMutation, disk_folder: str | None = None) -> None:
        self.has_fsdp = may_be_sharded()
        support_compiled_code()
        self.policy = policy
        self._on_mutation, self._disk_folder = on_mutation, disk_folder
        # Ops that need no care of ours, under a policy that answers by name alone: whether they are saved.
        known: dict[int, bool] | None = getattr(policy, "known", None)
        self._known = {} if known is None else known  # what is learnt about one policy holds for no other
        self._learns = hasattr(policy, "answer_for")

    def bind(self, sink: RegionSink) -> Recorder:
        """Put what is kept into a sink from now on."""
        # Who made which value matters only to policies that speak of names, as any function may.
        self._makers = Makers() if getattr(self.policy, "reads_names", True) else None
        self._asker = Asker(self.policy, sink)
        self._keeper = Keeper(sink, self._on_mutation, self._disk_folder, may_drop=self._makers is not None)
        self._counts = self._keeper.store.counts
        self.is_bound = True
        return self

    def recorder(self, frame: RegionSink) -> Recorder:
        """Return another one for a frame, with the same policy."""
        other = Recorder(self.policy, self._on_mutation)
        other.ac_graph_id = self.ac_graph_id
        return other.bind(frame)

    def __enter__(self) -> Recorder:
        if not self.is_bound:
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
        self.is_bound = False
        del self._asker, self._keeper

    @property
    def store(self) -> Store:
        """What was kept so far; nothing where no forward has begun or its frame has been let go of."""
        return self._keeper.store if self.is_bound else Store()

    @property
    def storage(self) -> dict[Any, dict[int, Any]]:
        """The same, by op and number."""
        found: dict[Any, dict[int, Any]] = {}
        for (key, number), reference in self.store.entries.items():
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
                self._keeper.keep_plain((key, number), out)
            if self._makers is not None:
                self._makers.note((key, number), op_facts(func), out)
            return out
        if self.num_suspensions or func in SAC_IGNORED_OPS or is_cached_cast(func, args):
            return func(*args, **kwargs) if kwargs else func(*args)
        if is_tracing_proxies():
            return self._dispatch_traced(func, args, kwargs or {})
        return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        facts, keeper = op_facts(func), self._keeper
        if facts.mutates:
            keeper.before_mutation(facts, args)
        rng_state = keeper.before_random(args, kwargs or {}) if facts.is_random else None
        key = self._next_key(func, args)  # also if it fails: so it does when it runs again
        out = func(*args, **kwargs) if kwargs else func(*args)
        answer = self._asker.ask(func, out, args, kwargs)
        if facts.runs_once and answer is CheckpointPolicy.MUST_RECOMPUTE:
            raise self._asker.must_run_once(facts, func)
        # What writes to several places is run again in any case: there is no other way to have them all.
        is_kept_whole = not facts.mutates or facts.updates_in_place
        is_recomputed = not facts.runs_once and (answer in _RECOMPUTES or not is_kept_whole)
        keeper.keep_rng_state(key, rng_state, is_recomputed=is_recomputed)
        if not is_recomputed:
            keeper.keep(key, facts, out, args, is_offloaded=answer in _OFFLOADS)
        if self._makers is not None:
            self._makers.note(key, facts, out, answer is CheckpointPolicy.MUST_SAVE)
        if self._learns and facts.is_plain and answer not in _OFFLOADS:
            self._known[key[0]] = answer not in _RECOMPUTES
        return out

    def _next_key(self, func: Any, args: Any) -> tuple[Any, int]:
        """Tell this call of an op from all others."""
        key = op_key(func, args)
        number = self._counts[key]
        self._counts[key] = number + 1
        return key, number

    def _dispatch_traced(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Write the policy's answer into the graph that is being traced, for its partitioner."""
        meta = fx_current_meta()
        meta["ac_graph_id"] = self.ac_graph_id
        meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        mark = traced_nodes_so_far()
        out = func(*args, **kwargs)
        answer = self._asker.ask(func, out, args, kwargs)
        for node in traced_nodes_since(mark):
            node.meta["recompute"] = answer
        # The partitioner decides from the tags; tracing the recomputation must add no ops of its own.
        self._keeper.keep(self._next_key(func, args), op_facts(func), out, args, is_offloaded=False)
        return out

    def note_name(self, value: torch.Tensor, name: str) -> None:
        """Ask the policy about a named value, and change what is kept of the op that made it."""
        if self._makers is None or self.num_suspensions or is_tracing():
            return
        self.num_suspensions += 1  # what the policy and we do with the value is no part of the region
        try:
            with torch.no_grad():
                answer = self._asker.ask_about_value(name_op(), value, (value, name), {})
                made = self._makers.find(value)
                if made is not None and answer is not CheckpointPolicy.PREFER_RECOMPUTE:
                    self._change(made, answer, value, name)
        finally:
            self.num_suspensions -= 1

    def _change(self, made: Made, answer: CheckpointPolicy, value: torch.Tensor, name: str) -> None:
        if answer is CheckpointPolicy.MUST_RECOMPUTE:
            if made.facts.runs_once:
                raise self._asker.must_run_once(made.facts, f"{name!r}, the result of {made.facts.op}")
            if made.others is not None and made.must_be_saved:
                raise self._asker.contradiction(made.facts.op, name)
            if made.is_shown_whole_by(value):
                self._keeper.drop(made.key)
            return
        is_offloaded = answer in _OFFLOADS
        if type(self._keeper.store.entry(made.key)) is not (OffloadedEntry if is_offloaded else Entry):
            out = made.output(value)
            if out is not None:
                self._keeper.keep_instead(made.key, made.facts, out, is_offloaded=is_offloaded)

    def note_rng_before_child(self, number: int) -> None:
        """Be told that an inner region begins."""
        self._keeper.before_child(number)

    def note_rng_after(self) -> None:
        """Be told that the forward has ended."""
        self._keeper.after()


def _put_back_tags(tags: dict[str, Any]) -> None:
    """Let nodes that are traced from here on have the tags that they had: a tracer may use one dictionary for all."""
    meta = fx_current_meta()
    for name, value in tags.items():
        if value is None:
            meta.pop(name, None)
        else:
            meta[name] = value
