"""Write down a planned graph: every node with its constraints and prices, and what is alive when."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ...passes.graph import Constraint, JointGraph, describe_value, region_fields
from ...passes.memory import Simulation, simulate
from ...passes.pipeline import Observer
from ...passes.plans import Chosen, Prepared, Request
from ...passes.prices import TICKS_PER_SECOND
from ...passes.ranges import with_ranges
from ...passes.shared import path_of_node, source_line
from .model import Alive, GraphReport, NodeRow, Timeline


class Reporter(Observer):
    """Writes down each graph that is planned, with the sizes for which its plan holds."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.graphs: list[GraphReport] = []

    def see(self, prepared: Prepared, chosen: Chosen) -> None:
        """Write down one graph."""
        self.graphs.append(report_graph(prepared, with_ranges(prepared, chosen, self.request)))


def report_graph(prepared: Prepared, chosen: Chosen) -> GraphReport:
    """Write down a planned graph; to be called before its halves are made, which may rewrite nodes."""
    graph = prepared.problem.graph
    simulation = simulate(graph, prepared.storages, chosen.schedule)
    return GraphReport(
        plan=chosen.plan,
        nodes=tuple(_row(prepared, i) for i in range(len(graph.nodes))),
        forward=tuple(graph.nodes[i].name for i in chosen.schedule.forward),
        forward_results=_results(graph, graph.forward_outputs),
        backward_results=_results(graph, graph.backward_outputs),
        timeline=_timeline(graph, simulation),
    )


def _results(graph: JointGraph, outputs: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(graph.nodes[graph.resolve(o)].name for o in outputs if isinstance(o, fx.Node)))


def _timeline(graph: JointGraph, simulation: Simulation) -> Timeline:
    memory = (Alive(graph.nodes[m.node].name, m.num_bytes, m.first, m.last) for m in simulation.memory)
    return Timeline(simulation.num_forward, simulation.live_bytes, tuple(memory))


def _row(prepared: Prepared, i: int) -> NodeRow:
    problem = prepared.problem
    graph, costs = problem.graph, problem.costs
    node = graph.nodes[i]
    constraint = problem.constraints.of[i] or Constraint()
    value = problem.value_of.get(i)
    fields, facts = region_fields(node), graph.facts[i]
    return NodeRow(
        name=node.name,
        op=_op(node),
        arguments=_arguments(node),
        inputs=tuple(graph.nodes[j].name for j in graph.inputs[i]),
        value=describe_value(node.meta.get("val")),
        role=graph.roles[i].name,
        base="" if value is None else graph.nodes[problem.bases[value]].name,
        same_as=graph.nodes[graph.same_as[i]].name,
        is_view=facts is not None and facts.is_view,
        num_bytes=costs.num_bytes[i],
        save_seconds=costs.save_ticks[i] / TICKS_PER_SECOND,
        recompute_seconds=costs.recompute_ticks[i] / TICKS_PER_SECOND,
        no_save=constraint.no_save.value if constraint.no_save else "",
        no_recompute=constraint.no_recompute.value if constraint.no_recompute else "",
        prefers=constraint.prefers.value if constraint.prefers else "",
        source=source_line(node.stack_trace or ""),
        module=path_of_node(node),
        region=fields["region"],
        policy=fields["policy"],
        label=fields["name"],
    )


def _op(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return node.op
    return "getitem" if node.target is operator.getitem else str(node.target)


def _arguments(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return str(node.target) if node.op == "get_attr" else ""
    given = [_argument(a) for a in node.args]
    return ", ".join([*given, *(f"{name}={_argument(value)}" for name, value in node.kwargs.items())])


def _argument(value: Any) -> str:
    """One argument as text; what has no stable text is named by its type."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        items = ", ".join(_argument(v) for v in value)
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.layout, type(None))):
        return repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, (torch.SymInt, torch.memory_format)):
        return str(value)
    return f"<{type(value).__name__}>"
