"""How the rooms are put together: compilation with the reports that are made of it, regions with their compiled engine.

Rooms import in one direction, so none of them knows what uses it. What one has to call in a room further down is
handed to it here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.fx as fx

from .regions import RegionOptions, Runner


def backend(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph: what `torch.compile(backend="remat")` calls."""
    from .compiled import Options, compile_graph
    from .report import Publisher

    return compile_graph(gm, example_inputs, Options.parse(options, mode), watch=Publisher)


def partitioner(*, inner: str = "inductor", **options: Any) -> Any:
    """Make a partition function for `aot_autograd(partition_fn=...)` or inductor's `custom_partitioner_fn`.

    Takes remat's own options; what compiles the graphs is the caller's business, so inductor's options are not
    accepted. `inner` says what that is, since costs and peaks depend on it: "inductor" fuses ops, "aot_eager" stands
    for everything that runs the graph node by node.
    """
    from .compiled import partitioner as compiled
    from .report import Publisher

    return compiled.partitioner(watch=Publisher, inner=inner, **options)


def run_planned(region: RegionOptions, unplanned: Runner) -> Runner:
    """What runs the calls of a region with a budget outside of torch.compile."""
    from .compiled import PlannedRegion
    from .report import Publisher

    return PlannedRegion(region, unplanned, Publisher)
