"""The torch.compile backend: `torch.compile(model, backend="remat", options={...})`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from ..passes.budgets import LOWEST_PLAN_OPTION
from ..passes.inductor import Excess, PeakExceeded, may_fuse, planned_order
from ..passes.rewrites import telling_intermediates
from ..passes.shared import InfeasibleBudget, advising, causes_of, exact_size
from ..passes.torch_private import (
    aot_compile,
    boxed,
    inductor_compile,
    inductor_error,
    kernel_order_pass,
    run_graph_as_is,
)
from ..regions import inside_broken_regions
from .capture import split_only
from .options import Inner, Options
from .partitioner import Partitioner
from .plan_key import source_digest
from .watching import MakeWatcher, Nobody

KEEP_ORDER = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False}
"""What inductor must leave alone so that a planned peak holds: it keeps free buffers for later ones of the same size
where its own estimate of the peak, which counts finished gradients, allows it; a plan counts on them being free."""


MOST_PLANS = 4
"""How often one plans until a compiler's kernels keep within the budget, too."""

LEAST_STEP = 0.01
"""How much more of the budget is left free each time, at least."""

ALL_OF_IT = 0.999
"""A margin that leaves a budget so small that no plan keeps within it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of compiling once: code, or why there is none for this plan."""

    compiled: Callable[..., Any] | None = None
    excess: Excess | None = None
    """The kernels take more than the budget."""
    infeasible: InfeasibleBudget | None = None
    """No plan keeps within the budget."""


def compile_graph(
    gm: fx.GraphModule, example_inputs: list[Any], options: Options, *, watch: MakeWatcher = Nobody
) -> Callable[..., Any]:
    """Compile a Dynamo graph with remat's partitioner between tracing and the inner compiler."""
    gm = inside_broken_regions(gm)
    if options.inner == "inductor":
        return _with_inductor(gm, example_inputs, options, watch)
    return _split_only(gm, example_inputs, Partitioner(options, watch=watch))


def op_by_op(
    gm: fx.GraphModule, example_inputs: list[Any], *, memory_budget: Any, overwrites: bool, watch: MakeWatcher
) -> Callable[..., Any]:
    """Compile a Dynamo graph into two graphs that eager's kernels run; `overwrites` if nobody else holds results."""
    options = Options.parse({"inner": "aot_eager", "memory_budget": memory_budget})
    return _split_only(
        inside_broken_regions(gm), example_inputs, Partitioner(options, watch=watch, overwrites=overwrites)
    )


def _split_only(gm: fx.GraphModule, example_inputs: list[Any], partitioner: Partitioner) -> Callable[..., Any]:
    compiler = _graph_compiler(partitioner.options.inner, partitioner)
    return aot_compile(
        gm, example_inputs, compiler=compiler, partition_fn=telling_intermediates(partitioner, example_inputs)
    )


def _with_inductor(
    gm: fx.GraphModule, example_inputs: list[Any], options: Options, watch: MakeWatcher
) -> Callable[..., Any]:
    """Compile with inductor; where its kernels take more than the budget, plan again with less of it."""

    def attempt(options: Options, margin: float = 0.0) -> Outcome:
        return _attempt(gm, example_inputs, Partitioner(options, watch=watch, keeps_order=True, margin=margin))

    margin, outcome = 0.0, Outcome()
    for _ in range(MOST_PLANS):
        outcome = attempt(options, margin)
        if outcome.compiled is not None:
            return outcome.compiled
        if outcome.excess is None:
            break
        margin = max(margin + LEAST_STEP, outcome.excess.margin)
    assert options.budget is not None, "without a budget there is nothing to exceed"
    # No plan that leaves room for what the compiler adds: the lowest one may keep within the budget all the same.
    infeasible = outcome.infeasible if margin == 0.0 else None
    lowest = attempt(replace(options, budget=replace(options.budget, is_for_lowest=True)))
    if lowest.compiled is not None:
        return lowest.compiled
    excess = lowest.excess
    if excess is None:
        raise infeasible or lowest.infeasible or AssertionError("neither code nor a reason")
    if options.take_minimum:
        lowest = attempt(options, ALL_OF_IT)
        assert lowest.compiled is not None, "a plan that was asked for whatever it takes exceeds nothing"
        return lowest.compiled
    raise _never_fits(options, excess, infeasible)


def _attempt(gm: fx.GraphModule, example_inputs: list[Any], partitioner: Partitioner) -> Outcome:
    """Compile with inductor by one plan."""
    outcome = None
    try:
        outcome = _compiled(gm, example_inputs, partitioner)
    finally:
        if outcome is None or outcome.excess is None:  # it runs, or it fails for another reason
            partitioner.watcher.publish()
    return outcome


def _compiled(gm: fx.GraphModule, example_inputs: list[Any], partitioner: Partitioner) -> Outcome:
    options = partitioner.options
    settings = {**_keep_order(partitioner), **options.inductor, "custom_partitioner_fn": partitioner}
    try:
        compiled = inductor_compile(
            gm,
            example_inputs,
            settings,
            may_fuse=may_fuse,
            around=lambda compiled: advising(compiled, "compiled code", partitioner.peak_bytes),
            with_backward=partitioner.is_checked,
        )
    except (PeakExceeded, InfeasibleBudget, inductor_error()) as error:  # inductor puts its own around some
        return _why_not(error, partitioner)
    if partitioner.watcher.is_watching and not partitioner.num_planned:  # a cache has code, and no reasons
        split_only(gm, example_inputs, settings)
    return Outcome(compiled)


def _why_not(error: Exception, partitioner: Partitioner) -> Outcome:
    """Tell a plan that does not do from a compilation that failed, which is raised again."""
    for cause in causes_of(error):
        if isinstance(cause, PeakExceeded):
            return Outcome(excess=cause.excess)
        if isinstance(cause, InfeasibleBudget) and partitioner.is_checked:
            return Outcome(infeasible=cause)
    raise error


def _never_fits(options: Options, excess: Excess, infeasible: InfeasibleBudget | None) -> InfeasibleBudget:
    assert options.budget is not None
    finding = (
        f"memory_budget={options.budget.text}: inductor's kernels take more than it for each plan that was tried."
        if infeasible is None
        else infeasible.finding
    )
    return InfeasibleBudget(
        f"{finding}\nInductor's kernels for the lowest plan take {exact_size(excess.num_bytes)}, where "
        f"{exact_size(excess.planned_bytes)} were planned.",
        f"Give at least {excess.num_bytes} bytes, or set {LOWEST_PLAN_OPTION} to take the lowest plan; smaller batches "
        "lower it, too.",
    )


def _keep_order(partitioner: Partitioner) -> dict[str, Any]:
    """Settings under which inductor runs what the plan says, when it says so."""
    in_order = kernel_order_pass(planned_order, f"remat-{source_digest()}", partitioner.kernels.check)
    return {**KEEP_ORDER, "_post_fusion_custom_pass": in_order}


def _graph_compiler(
    inner: Inner, partitioner: Partitioner
) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """The inner compiler, with what it returns made to take its inputs as a list, so that they can be freed early."""
    compile_graph = inner if callable(inner) else run_graph_as_is

    def compile_boxed(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        compiled = compile_graph(gm, example_inputs)
        compiled = compiled if getattr(compiled, "_boxed_call", False) else boxed(compiled)
        return advising(compiled, "compiled code", partitioner.peak_bytes)

    return compile_boxed
