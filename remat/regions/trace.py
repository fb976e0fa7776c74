"""Regions while a compiler traces them: ask the policy about every op, and write its answer on the nodes.

AOTAutograd runs a region's body twice: once to see what it does, once to record it. Policies are asked only while it
is recorded, so once per op of the user's program, in program order, with the tensors' real shapes, and before any
decomposition.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from ..eager import SAC_IGNORED_OPS, SelectiveCheckpointContext, is_cached_cast
from ..passes.graph import NAME_TAG, RegionBudget, RegionTag, policy_of, region_of, tag, views, whole_views
from ..passes.ops import facts_of, name_op
from ..passes.shared import CheckpointPolicy, PolicyError, PolicyFunction, checked_answer, policy_name, source_line
from ..passes.torch_private import (
    TorchDispatchMode,
    fx_current_meta,
    fx_preserving_meta,
    is_tracing_backward_too,
    next_region_number,
    traced_node_of,
    traced_nodes_since,
    traced_nodes_so_far,
    tracer,
)

if TYPE_CHECKING:
    from ..passes.budgets import Budget


@dataclass(slots=True, eq=False)
class _OpenRegion:
    """One call of a region that is being traced."""

    tag: RegionTag
    policy: PolicyFunction | None
    state: dict[Any, Any] = field(default_factory=dict)
    """What a policy keeps in `ctx.state` from op to op of this call."""

    def ask(self, op: Any, out: Any, args: Any, kwargs: dict[str, Any]) -> CheckpointPolicy:
        """Return the policy's answer for one op."""
        if self.policy is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        context: Any = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        context.state = self.state
        try:
            answer = self.policy(context, op, *args, **kwargs)
        except Exception as error:
            raise PolicyError(
                f"the policy {policy_name(self.policy)} raised {type(error).__name__} when asked about {op} "
                f"{self._where()}: {error}"
            ) from error
        try:
            return checked_answer(answer, self.policy, op)
        except PolicyError as error:
            raise PolicyError(f"{error}\nAsked {self._where()}.") from None

    def _where(self) -> str:
        source = source_line(fx_current_meta().get("stack_trace") or "")
        return f"in region {self.tag.path}" + (f" at {source}" if source else "")


class _Tagger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tag the nodes of every op that is traced inside a region; the innermost region's policy holds."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.open: list[_OpenRegion] = []
        self.repeats_random = is_tracing_backward_too()
        """Random ops may be told to run again. Torch refuses such an op in a graph that has no backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compilers run under this mode: tracing is what it is for."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op and tag what was recorded for it."""
        region, kwargs = self.open[-1], kwargs or {}
        mark = traced_nodes_so_far()
        out = func(*args, **kwargs)
        answer = CheckpointPolicy.PREFER_RECOMPUTE
        if func not in SAC_IGNORED_OPS and not is_cached_cast(func, args):
            answer = region.ask(func, out, args, kwargs)
        for node in traced_nodes_since(mark):
            is_kept = not self.repeats_random and facts_of(node.target).is_random
            tag(node, region.tag, CheckpointPolicy.MUST_SAVE if is_kept else answer)
        return out


_state = local()
_numbers: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""Per graph being traced: how often each region path was entered."""


def run_traced(
    body: Callable[..., Any],
    args: Any,
    *,
    name: str,
    policy: PolicyFunction | None,
    preserve_rng_state: bool,
    budget: Budget | None = None,
    disk_folder: str | None = None,
) -> Any:
    """Run the body of a region while a graph is being recorded, tagging its nodes."""
    with _tagger() as tagger, fx_preserving_meta():
        outer = tagger.open[-1].tag if tagger.open else None
        path = _numbered(name if outer is None else f"{outer.path}/{name}")
        region = RegionTag(
            path=path,
            number=next_region_number() if outer is None else outer.number,
            policy="" if policy is None else policy_name(policy),
            preserve_rng_state=preserve_rng_state,
            budgets=(*(() if outer is None else outer.budgets), *_bounds(path, budget)),
            disk_folder=disk_folder,
        )
        tagger.open.append(_OpenRegion(region, policy))
        try:
            return body(*args)
        finally:
            tagger.open.pop()


def _bounds(path: str, budget: Budget | None) -> tuple[RegionBudget, ...]:
    if budget is None:
        return ()
    return (RegionBudget(path, budget.text, fraction=budget.fraction, num_bytes=budget.num_bytes),)


def run_body(body: fx.GraphModule, *args: Any) -> Any:
    """Interpret a body node by node, so that what is traced keeps the metadata of what it was traced from."""
    return fx.Interpreter(body).run(*args)


@contextmanager
def _tagger() -> Iterator[_Tagger]:
    """The tagger of the outermost region of this thread; a new one where there is none."""
    current: _Tagger | None = getattr(_state, "tagger", None)
    if current is not None and _state.tracer is tracer():
        yield current
        return
    before = current, getattr(_state, "tracer", None)
    _state.tagger, _state.tracer = _Tagger(), tracer()
    try:
        with _state.tagger:
            yield _state.tagger
    finally:
        _state.tagger, _state.tracer = before


def _numbered(path: str) -> str:
    """A path that no other region of the graph has."""
    counts = _numbers.setdefault(tracer(), Counter())
    counts[path] += 1
    return path if counts[path] == 1 else f"{path}#{counts[path]}"


# -------------------------------------------------------------------------------------------------- names


def note_traced_name(tensor: torch.Tensor, name: str) -> None:
    """Write a value's name on the node that computes it; the policy's answer to the name governs the value."""
    node = traced_node_of(tensor)
    if node is None or node.op != "call_function":
        return  # a plain input: there all along, nothing to be decided
    for part in whole_views(node):
        part.meta[NAME_TAG] = name
    tagger: _Tagger | None = getattr(_state, "tagger", None)
    if tagger is None or not tagger.open or _state.tracer is not tracer():
        return
    region = tagger.open[-1]
    answer = region.ask(name_op(), tensor, (tensor, name), {})
    # A policy that does not know the name says PREFER_RECOMPUTE, which takes nothing back that was said of the op.
    if answer is CheckpointPolicy.PREFER_RECOMPUTE:
        return
    # What an inner region returned goes by that one's policy, and what comes from outside is there anyway. To keep a
    # part is to keep what it is a view of; to drop a part drops no more than that.
    parts = whole_views(node) if answer is CheckpointPolicy.MUST_RECOMPUTE else views(node)
    for part in [result for view in parts for result in _results_with(view, answer)]:
        inside = region_of(part)
        if inside is not None and inside.path == region.tag.path:
            tag(part, inside, answer)


def _results_with(node: fx.Node, answer: CheckpointPolicy) -> list[fx.Node]:
    """A value and all that came out of the same call: an op with several results is kept, or run again, whole."""
    if node.target is not operator.getitem:
        return [node]
    whole = node.all_input_nodes[0]
    if answer is CheckpointPolicy.MUST_RECOMPUTE and policy_of(whole) is CheckpointPolicy.MUST_SAVE:
        return [node]  # a contradiction, which is reported where constraints are
    return [whole, *(user for user in whole.users if user.target is operator.getitem)]
