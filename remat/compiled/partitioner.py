"""remat as a partition function: what AOTAutograd and inductor call with a joint graph."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.fx as fx

from ..passes.budgets import FUSION_MARGIN
from ..passes.pipeline import Observer, run
from ..passes.plans import Chosen, Prepared, Request
from ..passes.ranges import take_for_granted
from ..passes.shared import Executor, OptionError
from ..passes.torch_private import CustomPartitionerFn, without_modes
from .kernel_check import KernelCheck
from .options import INNERS, Options
from .plan_key import asked_of, cost_model_of, job_of, plan_key_of
from .ranks import agree, job_name
from .watching import MakeWatcher, Nobody


class Partitioner(CustomPartitionerFn, Observer):
    """Splits joint graphs by remat's plan; picklable, with a key that says all it depends on."""

    def __init__(
        self,
        options: Options,
        *,
        watch: MakeWatcher = Nobody,
        is_seen_by_caches: bool = True,
        overwrites: bool | None = None,
        keeps_order: bool = False,
        margin: float = 0.0,
    ) -> None:
        """Read the options; `margin` is the part of a budget that is left for what a compiler adds to a plan.

        With `keeps_order` the compiler is made to keep to the order of a plan, whether a budget needs that or not.
        """
        self.job = job_of(options)
        if options.fuses and options.budget is not None:
            # Ranks that are to agree on a plan cannot each plan again when they have seen their kernels.
            margin = margin if self.job is None else max(margin, FUSION_MARGIN)
            options = replace(options, budget=replace(options.budget, margin=margin))
        self.options, self.watcher = options, watch(options)
        overwrites = options.overwrites if overwrites is None else overwrites
        executor = Executor(options.fuses, overwrites, keeps_order)
        cost_model = cost_model_of(options, self.job)
        self.plan_key = plan_key_of(options, cost_model, executor)
        self.request = Request(
            cost_model=cost_model,
            budget=options.budget,
            take_minimum=options.take_minimum,
            executor=executor,
            unbacked_hint=options.unbacked_hint,
            stored=options.plans,
            key=self.plan_key,
        )
        self.num_planned = 0
        """Joint graphs that came by; none if all of a compilation was found in a cache."""
        is_compared = options.fuses and self.job is None
        self.kernels = KernelCheck(options.budget if is_compared else None)
        """Compares a compiler's kernels with the budget before they are run."""
        self._peak_bytes: int | None = None
        self._cache_key = self._key_for_caches(is_seen_by_caches)

    def _key_for_caches(self, is_seen_by_caches: bool) -> str:
        is_reported = self.options.dump is not None or bool(self.options.logs)
        is_measured = self.options.cost_model == "profile"
        if is_reported and (not is_seen_by_caches or is_measured):
            # Planning again would not say what a cache holds: nobody sees that it was hit, or prices vary.
            return f"{self.plan_key}-{uuid.uuid4().hex}"
        if self.job is not None and is_measured:
            # Prices that were measured in an earlier job may have led to another plan than those of this one.
            return f"{self.plan_key}-{job_name(self.job)}"
        return self.plan_key

    def __call__(  # type: ignore[override] # the base class has only **kwargs
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],  # noqa: ARG002 (part of the protocol; shapes are on the graph)
        *,
        num_fwd_outputs: int,
        **_: object,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph into forward and backward."""
        self.num_planned += 1
        with paused_collector():
            parts = run(gm, self.request, self, num_fwd_outputs=num_fwd_outputs)
        take_for_granted(parts.chosen, parts.prepared.storages)
        self._peak_bytes = parts.plan.peak.num_bytes
        self.kernels.expect(parts)
        return parts.forward, parts.backward

    def agree(self, prepared: Prepared, chosen: Chosen) -> Chosen:
        """The plan that holds on all ranks."""
        if self.job is None or chosen.guards:  # such a plan holds for this rank's sizes, and those of others may differ
            return chosen
        # Plans that a user gives are not given up for those of another rank.
        is_strict = self.options.ranks == "check" or bool(self.options.plans)
        with without_modes():  # a store may run ops
            return agree(self.job, prepared, chosen, asked=asked_of(self.options), is_strict=is_strict)

    def see(self, prepared: Prepared, chosen: Chosen) -> None:
        """Show the plan to who watches; one that is compared with kernels may not be the one that runs."""
        if self.watcher.is_watching:
            self.watcher.see(prepared, chosen, self.request)
            if not self.is_checked:
                self.watcher.publish()

    @property
    def is_checked(self) -> bool:
        """A compiler's kernels are compared with the budget before they are run."""
        return self.kernels.budget is not None

    def peak_bytes(self) -> int | None:
        """The predicted activation peak of the graph that was split last; None if it came from a cache."""
        return self._peak_bytes

    def uuid(self) -> str:
        """What compile caches use beside the graph: the same text means the same plan."""
        return self._cache_key

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        # Compile caches pickle the object into their key; only the key's text may count.
        return (str, (self._cache_key,))


@contextmanager
def paused_collector() -> Iterator[None]:
    """Hold garbage collection: planning makes many objects that live on, and looking for cycles among them is slow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def partitioner(*, watch: MakeWatcher = Nobody, inner: str = "inductor", **options: Any) -> Partitioner:
    """Make a partition function for `aot_autograd(partition_fn=...)` or inductor's `custom_partitioner_fn`.

    Takes remat's own options; what compiles the graphs is the caller's business, so inductor's options are not
    accepted. `inner` says what that is, since costs and peaks depend on it: "inductor" fuses ops, "aot_eager" stands
    for everything that runs the graph node by node.
    """
    if inner not in INNERS:
        raise OptionError(f"inner={inner!r}: expected 'inductor' or 'aot_eager'")
    # Nobody would notice here that a cache was hit, so what asks for a report must never hit one; and the caller's
    # compiler may want graphs in which no op writes to its inputs, as AOTAutograd makes them. Its kernels are compared
    # with no budget either.
    parsed = replace(Options.parse_own(options), inner=inner)
    return Partitioner(parsed, watch=watch, is_seen_by_caches=False, overwrites=False, margin=FUSION_MARGIN)
