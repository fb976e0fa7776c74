"""The torch.compile backend: `torch.compile(model, backend="remat", options={...})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.fx as fx

from ..passes.budgets.budget import LOWEST_PLAN_OPTION
from ..passes.inductor.fusion import may_fuse, planned_order
from ..passes.inductor.kernels import Excess
from ..passes.shared.errors import InfeasibleBudget, causes_of
from ..passes.shared.out_of_memory import advising
from ..passes.shared.readable import exact_size
from ..passes.torch_private import aot_compile, boxed, inductor_compile, kernel_order_pass, run_graph_as_is
from ..regions.carrier import inside_broken_regions
from .capture import split_only
from .options import Inner, Options
from .partitioner import Partitioner, source_digest

KEEP_ORDER = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False}
"""What inductor must leave alone so that a planned peak holds: it keeps free buffers for later ones of the same size
where its own estimate of the peak, which counts finished gradients, allows it; a plan counts on them being free."""


MOST_PLANS = 4
"""How often one plans until a compiler's kernels keep within the budget, too."""

LEAST_STEP = 0.01
"""How much more of the budget is left free each time, at least."""

ALL_OF_IT = 0.999
"""A margin that leaves a budget so small that no plan keeps within it."""


def remat(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with remat's partitioner between tracing and the inner compiler."""
    parsed = Options.parse(options, mode)
    gm = inside_broken_regions(gm)
    if parsed.inner == "inductor":
        return _with_inductor(gm, example_inputs, parsed)
    return _split_only(gm, example_inputs, Partitioner(parsed))


def op_by_op(
    gm: fx.GraphModule, example_inputs: list[Any], *, memory_budget: Any, overwrites: bool
) -> Callable[..., Any]:
    """Compile a Dynamo graph into two graphs that eager's kernels run; `overwrites` if nobody else holds results."""
    parsed = Options.parse({"inner": "aot_eager", "memory_budget": memory_budget})
    return _split_only(inside_broken_regions(gm), example_inputs, Partitioner(parsed, overwrites=overwrites))


def _split_only(gm: fx.GraphModule, example_inputs: list[Any], partitioner: Partitioner) -> Callable[..., Any]:
    compiler = _graph_compiler(partitioner.options.inner, partitioner)
    return aot_compile(gm, example_inputs, compiler=compiler, partition_fn=partitioner)


def _with_inductor(gm: fx.GraphModule, example_inputs: list[Any], options: Options) -> Callable[..., Any]:
    """Compile with inductor; where its kernels take more than the budget, plan again with less of it."""
    margin, infeasible = 0.0, None
    for _ in range(MOST_PLANS):
        partitioner = Partitioner(options, keeps_order=True, margin=margin)
        try:
            return _compiled(gm, example_inputs, partitioner)
        except Exception as error:
            if partitioner.excess is None:
                infeasible = next((e for e in causes_of(error) if isinstance(e, InfeasibleBudget)), None)
                if infeasible is None or not partitioner.is_checked:
                    raise
                break
            margin = max(margin + LEAST_STEP, partitioner.excess.margin)
    return _with_lowest_plan(gm, example_inputs, options, infeasible if margin == 0.0 else None)


def _with_lowest_plan(
    gm: fx.GraphModule, example_inputs: list[Any], options: Options, infeasible: InfeasibleBudget | None
) -> Callable[..., Any]:
    """Compile the lowest plan if its kernels keep within the budget, or if it is asked for; or say what they take."""
    assert options.budget is not None
    partitioner = Partitioner(replace(options, budget=replace(options.budget, is_for_lowest=True)), keeps_order=True)
    try:
        return _compiled(gm, example_inputs, partitioner)
    except Exception:
        if partitioner.excess is None:
            if infeasible is not None:
                raise infeasible from None
            raise
    if options.take_minimum:
        return _compiled(gm, example_inputs, Partitioner(options, keeps_order=True, margin=ALL_OF_IT))
    raise _never_fits(options, partitioner.excess, infeasible)


def _compiled(gm: fx.GraphModule, example_inputs: list[Any], partitioner: Partitioner) -> Callable[..., Any]:
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
        if partitioner.is_reported and not partitioner.num_planned:  # a cache had it, which keeps code and no reasons
            split_only(gm, example_inputs, settings)
    finally:
        if partitioner.excess is None:
            partitioner.publish()
    return compiled


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
    in_order = kernel_order_pass(planned_order, f"remat-{source_digest()}", partitioner.check)
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
