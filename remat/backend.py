"""The torch.compile backend: `torch.compile(model, backend="remat", options={...})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.fx as fx

from .capture import split_only
from .carrier import inside_broken_regions
from .options import Inner, Options
from .partition_fn import Partitioner, source_digest
from .passes.budget import LOWEST_PLAN_OPTION, mib
from .passes.errors import InfeasibleBudget
from .passes.fusion import may_fuse, planned_order
from .passes.kernels import Excess
from .passes.out_of_memory import advising
from .passes.torch_private import aot_compile, boxed, inductor_compile, kernel_order_pass, run_graph_as_is

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
    margin = 0.0
    for _ in range(MOST_PLANS):
        partitioner = Partitioner(options, keeps_order=True, margin=margin)
        try:
            return _compiled(gm, example_inputs, partitioner)
        except Exception:
            if partitioner.excess is None:
                raise
            margin = max(margin + LEAST_STEP, partitioner.excess.margin)
    if options.take_minimum:
        return _compiled(gm, example_inputs, Partitioner(options, keeps_order=True, margin=ALL_OF_IT))
    raise _never_fits(options, partitioner.excess)


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


def _never_fits(options: Options, excess: Excess | None) -> InfeasibleBudget:
    assert options.budget is not None
    assert excess is not None
    return InfeasibleBudget(
        f"memory_budget={options.budget.text}: of {MOST_PLANS} plans within it, inductor's kernels take more than it. "
        f"Those of the last take {mib(excess.num_bytes)} ({excess.num_bytes} bytes) instead of the planned "
        f"{mib(excess.planned_bytes)}. Give at least {excess.num_bytes} bytes, or set {LOWEST_PLAN_OPTION}."
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
