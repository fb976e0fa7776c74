"""Trace and plan a function, and write down all that was found. Nothing is lowered, and nothing is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.fx as fx

from ..compiled import Captured, Options, Partitioner, Split, capture, check_call, paused_collector
from ..passes.pipeline import run
from ..passes.shared import RematError
from .data import Reporter
from .frontier import Progress
from .report import Report, versions


def explain(
    function: Callable[..., Any],
    *args: Any,
    memory_budget: Any = None,
    on_infeasible: str = "error",
    inner: str = "inductor",
    cost_model: Any = "roofline",
    unbacked_hint: int | None = None,
    dynamic: bool | None = False,
    progress: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Say what `torch.compile(function, backend="remat")` would keep and recompute for these inputs, and why.

    `function` is a module or a function that is called with `args` and `kwargs`. It is traced with fake tensors, so a
    model on the `meta` device may be larger than the machine. Nothing is run, unless a graph break makes it several
    graphs: then it runs forward once, uncompiled. The options are those of `torch.compile(backend="remat")`. Sizes are
    those of the inputs, except for what `torch._dynamo.mark_dynamic` has marked; with `dynamic=True` they are symbols.
    Progress goes to stderr if that is a terminal, or as `progress` says.
    """
    check_call(explain, function, kwargs)
    asked = {"inner": inner, "cost_model": cost_model, "memory_budget": memory_budget, "on_infeasible": on_infeasible}
    options = Options.parse({**asked, "unbacked_hint": unbacked_hint})
    request = Partitioner(options).request
    reporter = Reporter(request)
    with Progress(sys.stderr.isatty() if progress is None else progress, "explain") as say:

        def visit(joint: fx.GraphModule, num_fwd_outputs: int) -> Split:
            say(f"planning graph {len(reporter.graphs)}, {len(joint.graph.nodes)} nodes")
            with paused_collector():
                halves = run(joint, request, reporter, num_fwd_outputs=num_fwd_outputs)
            return halves.forward, halves.backward

        say("tracing")
        captured = capture(function, args, kwargs, visit, fuses=options.fuses, dynamic=dynamic)
    if not reporter.graphs:
        raise RematError(_nothing_to_plan(function, captured))
    return Report(
        graphs=tuple(reporter.graphs),
        function=_name_of(function),
        graph_breaks=captured.graph_breaks,
        versions=versions(),
    )


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _nothing_to_plan(function: Callable[..., Any], captured: Captured) -> str:
    name = _name_of(function)
    if not captured.num_graphs:
        return f"explain({name}): this function calls no tensor operation that can be traced; there is nothing to plan."
    return (
        f"explain({name}): no result of this function needs a gradient, so there is no backward pass to plan for. "
        "Give it parameters or inputs with requires_grad=True, and call explain outside of torch.no_grad()."
    )
