"""remat as a partition function: what AOTAutograd and inductor call with a joint graph."""

from __future__ import annotations

import gc
import hashlib
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from ..passes.budgets.budget import FUSION_MARGIN
from ..passes.inductor.describe import describe_kernels
from ..passes.inductor.kernels import Excess, Held, PeakExceeded, Promise
from ..passes.pipeline import choose, prepare, split
from ..passes.plans.request import Prepared, Request
from ..passes.plans.write_plan import Chosen
from ..passes.prices.cost import Callback, CostModel, Flops, Roofline
from ..passes.ranges.ranges import take_for_granted
from ..passes.ranges.validity import with_ranges
from ..passes.shared.errors import OptionError
from ..passes.torch_private import CompiledHalf, CustomPartitionerFn, without_modes
from ..version import __version__
from . import calibration
from .collecting import is_collecting
from .options import INNERS, Options
from .ranks import Job, agree, current_job, job_name, shared_machines

if TYPE_CHECKING:
    from ..report.data.model import GraphReport


class Partitioner(CustomPartitionerFn):
    """Splits joint graphs by remat's plan; picklable, with a key that says all it depends on."""

    def __init__(
        self,
        options: Options,
        *,
        is_seen_by_caches: bool = True,
        overwrites: bool | None = None,
        keeps_order: bool = False,
        margin: float = 0.0,
    ) -> None:
        """Read the options; `margin` is the part of a budget that is left for what a compiler adds to a plan.

        With `keeps_order` the compiler is made to keep to the order of a plan, whether a budget needs that or not.
        """
        job = job_of(options)
        if options.fuses and options.budget is not None:
            # Ranks that are to agree on a plan cannot each plan again when they have seen their kernels.
            margin = margin if job is None else max(margin, FUSION_MARGIN)
            options = replace(options, budget=replace(options.budget, margin=margin))
        self.options = options
        overwrites = options.overwrites if overwrites is None else overwrites
        self.num_planned = 0
        """Joint graphs that came by; none if all of a compilation was found in a cache."""
        cost_model = cost_model_of(options, job)
        self.plan_key = _plan_key(options, cost_model, overwrites, keeps_order)
        self.request = Request(
            cost_model=cost_model,
            budget=options.budget,
            take_minimum=options.take_minimum,
            fuses=options.fuses,
            overwrites=overwrites,
            keeps_order=keeps_order,
            unbacked_hint=options.unbacked_hint,
            stored=options.plans,
            key=self.plan_key,
        )
        self._peak_bytes: int | None = None
        self._promise: Promise | None = None
        self.excess: Excess | None = None
        """What a compiler's kernels take, if that is more than the budget."""
        self._planned: list[GraphReport] = []
        self._is_reported = options.dump is not None or bool(options.logs)
        self._cache_key = self.plan_key
        if self._is_reported and (not is_seen_by_caches or options.cost_model == "profile"):
            # Planning again would not say what a cache holds: nobody sees that it was hit, or prices vary.
            self._cache_key = f"{self.plan_key}-{uuid.uuid4().hex}"
        elif job is not None and options.cost_model == "profile":
            # Prices that were measured in an earlier job may have led to another plan than those of this one.
            self._cache_key = f"{self.plan_key}-{job_name(job)}"

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
            prepared = prepare(gm, self.request, num_fwd_outputs=num_fwd_outputs)
            chosen = self._agreed(prepared, choose(prepared, self.request))
            if self.is_reported:
                chosen = with_ranges(prepared, chosen, self.request)
                self._planned.append(self._report(prepared, chosen))
                if not self.is_checked:
                    self.publish()
            halves = split(prepared, chosen)
        take_for_granted(chosen, prepared.storages)
        self._peak_bytes = chosen.plan.peak.num_bytes
        self._promise = self._promised(prepared, chosen, halves.held)
        return halves.forward, halves.backward

    @property
    def is_checked(self) -> bool:
        """A compiler's kernels are compared with the budget before they are run."""
        options = self.options
        return options.fuses and options.budget is not None and job_of(options) is None

    def _promised(self, prepared: Prepared, chosen: Chosen, held: Held) -> Promise | None:
        """What the kernels of a graph may take; None if nothing was promised."""
        plan, budget = chosen.plan, self.options.budget
        if not self.is_checked or budget is None or plan.budget_bytes is None or plan.shares or budget.fraction == 1.0:
            return None
        if budget.is_for_lowest:
            return Promise(plan.peak.num_bytes, plan.budget_bytes, held)
        margin = budget.margin_in(prepared.storages)
        if plan.peak.num_bytes > (1 - margin) * plan.budget_bytes:
            return None  # the lowest plan, which was asked for whatever it takes
        # At other sizes kernels take more, in the proportion in which they do at these.
        num_bytes = int(plan.peak.num_bytes / (1 - margin)) if prepared.storages.sizes.symbols else plan.budget_bytes
        return Promise(plan.peak.num_bytes, num_bytes, held)

    def check(self, half: CompiledHalf) -> None:
        """Compare what a compiler has made of a plan with the budget; raise if it is too much."""
        if self._promise is None:
            return
        try:
            kernels = describe_kernels(half)
        except (AttributeError, KeyError, TypeError) as error:
            warnings.warn(
                f"memory_budget: it cannot be said what inductor's kernels take ({type(error).__name__}: {error}), so "
                "they are not compared with the budget, and may exceed it by a few per cent.",
                stacklevel=2,
            )
            return
        excess = self._promise.excess_of(kernels)
        if excess is not None and (self.excess is None or self.excess.num_bytes < excess.num_bytes):
            self.excess = excess
        # Of the lowest plan one wants to know what all of it takes.
        looks_on = self.options.budget is not None and self.options.budget.is_for_lowest and not kernels.is_backward
        if self.excess is not None and not looks_on:
            raise PeakExceeded

    def _report(self, prepared: Prepared, chosen: Chosen) -> GraphReport:
        """What is reported of a graph, before its halves are made."""
        from ..report.data.record import report_graph  # the report's own modules need this one

        return report_graph(prepared, chosen)

    def publish(self) -> None:
        """Report what was planned, and is going to be run."""
        from ..report.data.dumped import publish

        while self._planned:
            publish(self._planned.pop(0), folder=self.options.dump, logs=self.options.logs)

    @property
    def is_reported(self) -> bool:
        """Somebody wants to know what is planned."""
        return self._is_reported or is_collecting()

    def _agreed(self, prepared: Prepared, chosen: Chosen) -> Chosen:
        """The plan that holds on all ranks."""
        job, options = job_of(self.options), self.options
        if job is None or chosen.guards:  # such a plan holds for this rank's sizes, and those of others may differ
            return chosen
        # Plans that a user gives are not given up for those of another rank.
        is_strict = options.ranks == "check" or bool(options.plans)
        with without_modes():  # a store may run ops
            return agree(job, prepared, chosen, asked=_asked(options), is_strict=is_strict)

    def peak_bytes(self) -> int | None:
        """The predicted activation peak of the graph that was split last; None if it came from a cache."""
        return self._peak_bytes

    def uuid(self) -> str:
        """What compile caches use beside the graph: the same text means the same plan."""
        return self._cache_key

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        # Compile caches pickle the object into their key; only the key's text may count.
        return (str, (self._cache_key,))


def job_of(options: Options) -> Job | None:
    """The ranks that are to have the same plans."""
    return None if options.ranks == "alone" else current_job()


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


def partitioner(*, inner: str = "inductor", **options: Any) -> Partitioner:
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
    return Partitioner(parsed, is_seen_by_caches=False, overwrites=False, margin=FUSION_MARGIN)


def cost_model_of(options: Options, job: Job | None = None) -> CostModel:
    """Build the cost model that the options ask for."""
    machines = calibration.machines()
    if job is not None:
        machines = shared_machines(job, machines)
    if callable(options.cost_model):
        return Callback(machines, options.fuses, function=options.cost_model)
    models: Mapping[str, Callable[..., CostModel]] = {
        "roofline": Roofline,
        "flops": Flops,
        "profile": calibration.Profile,
    }
    return models[options.cost_model](machines, options.fuses)


def _plan_key(options: Options, cost_model: CostModel, *runs: bool) -> str:
    """Everything a plan depends on beside its graph; `runs` says how its graphs will be run."""
    stored = [hashlib.sha256(plan.to_json().encode()).hexdigest() for plan in options.plans]
    asked = f"{options.budget} {options.take_minimum} {options.fuses} {runs} {options.unbacked_hint} {stored}"
    text = f"remat {__version__} {source_digest()} torch {torch.__version__} {cost_model.cache_key()} {asked}"
    return f"remat-{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _asked(options: Options) -> str:
    """What a plan is made for, in words that do not differ between ranks that were given the same options."""
    budget = "none" if options.budget is None else options.budget.text
    model = getattr(options.cost_model, "__qualname__", options.cost_model)
    stored = "a stored plan" if options.plans else "no stored plan"
    infeasible = "minimum" if options.take_minimum else "error"
    inner = "inductor" if options.fuses else "node by node"
    return f"memory_budget {budget}, on_infeasible {infeasible}, cost_model {model}, {stored}, run by {inner}"


@cache
def source_digest() -> str:
    """A digest of remat's own code, so that a changed installation never hits an old entry."""
    from .. import passes

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent.parent, *(Path(p).resolve() for p in passes.__path__)):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
