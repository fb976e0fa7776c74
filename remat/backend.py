"""The torch.compile backend: `torch.compile(model, backend="remat", options={...})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.fx as fx

from .capture import split_only
from .carrier import has_budgeted_region, inside_broken_regions
from .options import Inner, Options
from .partition_fn import Partitioner, source_digest
from .passes.fusion import kernel_order, may_fuse
from .passes.out_of_memory import advising
from .passes.torch_private import aot_compile, boxed, inductor_compile, kernel_order_pass, run_graph_as_is

KEEP_ORDER = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False}
"""What inductor must leave alone so that a planned peak holds: it keeps free buffers for later ones of the same size
where its own estimate of the peak, which counts finished gradients, allows it; a plan counts on them being free."""


def remat(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with remat's partitioner between tracing and the inner compiler."""
    parsed = Options.parse(options, mode)
    partitioner = Partitioner(parsed)
    gm = inside_broken_regions(gm)
    if parsed.inner == "inductor":
        has_order = parsed.budget is not None or bool(parsed.plans) or has_budgeted_region(gm)
        memory = _keep_order() if has_order else {}
        settings = {**memory, **parsed.inductor, "custom_partitioner_fn": partitioner}
        compiled = inductor_compile(
            gm,
            example_inputs,
            settings,
            may_fuse=may_fuse if has_order else None,
            around=lambda compiled: advising(compiled, "compiled code", partitioner.peak_bytes),
        )
        if partitioner.is_reported and not partitioner.num_planned:  # a cache had it, which keeps code and no reasons
            split_only(gm, example_inputs, settings)
        return compiled
    compiler = _graph_compiler(parsed.inner, partitioner)
    return aot_compile(gm, example_inputs, compiler=compiler, partition_fn=partitioner)


def _keep_order() -> dict[str, Any]:
    """Settings under which inductor runs what the plan says, when it says so."""
    return {**KEEP_ORDER, "_post_fusion_custom_pass": kernel_order_pass(kernel_order, f"remat-{source_digest()}")}


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
