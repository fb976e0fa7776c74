"""The pipeline: a joint graph in, a plan and two graphs out. It is the only one, and runs from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from .graph import JointGraph, find_constraints
from .inductor import Held, held_between, keep_as_bytes, keep_products_early, repeat_exponentials, write_once
from .memory import Shares, find_storages, simulate, verify_schedule
from .plans import Chosen, Plan, Prepared, Request, apply_plan, choose_plan
from .prices import price
from .ranges import byte_limits, choose_for_range
from .rewrites import copy_losses_out, lay_out_gradients, open_ports, take_dropout_apart
from .search import FlowProblem
from .sizes import Sizes, require_known
from .write import Rewrite, close_ports, extract, keep_layouts, offload_values, verify


class Observer:
    """Who is shown a graph while it is planned. This one looks on; others make reports, or agree with other ranks."""

    def agree(self, prepared: Prepared, chosen: Chosen) -> Chosen:  # noqa: ARG002
        """Return the plan that is to be taken: this one, or the one that another rank has made for the same graph."""
        return chosen

    def see(self, prepared: Prepared, chosen: Chosen) -> None:
        """Look at the plan that is taken, before its graphs are written."""


@dataclass(frozen=True, slots=True, eq=False)
class Partitioned:
    """A split joint graph and the plan behind it."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    chosen: Chosen
    prepared: Prepared
    held: Held
    """What is in memory between the two, if a compiler's kernels are to be compared with a budget."""

    @property
    def plan(self) -> Plan:
        """What is done with each value, and why."""
        return self.chosen.plan


def run(
    joint: fx.GraphModule, request: Request, observer: Observer | None = None, *, num_fwd_outputs: int
) -> Partitioned:
    """Split a joint graph into forward and backward, recomputing where it pays."""
    observer = observer or Observer()
    prepared = prepare(joint, request, num_fwd_outputs=num_fwd_outputs)
    chosen = observer.agree(prepared, choose(prepared, request))
    observer.see(prepared, chosen)
    return write(prepared, chosen)


def prepare(joint: fx.GraphModule, request: Request, *, num_fwd_outputs: int) -> Prepared:
    """Find out what a joint graph computes, what may be done with it, what that costs, and what memory it takes.

    Before that it is rewritten in ways that leave every bit as it is.
    """
    if not request.executor.fuses:
        take_dropout_apart(joint)
        copy_losses_out(joint)
    lay_out_gradients(joint, num_fwd_outputs)
    open_ports(joint)
    graph = JointGraph.classify(joint, num_fwd_outputs)
    constraints = find_constraints(graph, preferences_bind=request.budget is None and not request.stored)
    sizes = Sizes.find(graph.nodes, request.unbacked_hint)
    costs = price(graph, request.cost_model, sizes, fuses=request.executor.fuses)
    storages = find_storages(graph, request.executor, sizes)
    return Prepared(FlowProblem.build(graph, constraints, costs), storages, num_fwd_outputs)


def choose(prepared: Prepared, request: Request) -> Chosen:
    """Plan afresh, or find the stored plan that was made for this graph."""
    if request.stored:
        return apply_plan(prepared.problem, request.stored, prepared.storages, request.key)
    problem, storages = prepared.problem, prepared.storages
    shares = Shares.find(problem.graph)
    if request.budget is not None or shares.budgets:
        text = request.budget.text if request.budget is not None else shares.budgets[0].text
        require_known(problem.graph, storages.sizes, text)
    limits = byte_limits(shares, request.budget)
    if limits and storages.sizes.backed:
        return choose_for_range(prepared, request, limits)
    return choose_plan(problem, storages, request.budget, request.key, take_minimum=request.take_minimum)


def write(prepared: Prepared, chosen: Chosen) -> Partitioned:
    """Write the two graphs of a plan, rewrite them for what will run them, and check what is handed over."""
    graph, constraints, storages = prepared.problem.graph, prepared.problem.constraints, prepared.storages
    verify_schedule(graph, constraints, chosen.schedule)
    simulation = simulate(graph, storages, chosen.schedule)
    is_told = has_order(prepared, chosen)
    realized = simulation.realized if is_told else ()
    halves = extract(graph, constraints, chosen.schedule, simulation.overwritten, realized)
    for change in _rewrites_for(prepared, is_told=is_told):
        halves = change(halves)
    verify(graph, halves)
    names = [node.name for node in halves.backward.graph.find_nodes(op="placeholder")]
    held = held_between(simulation, graph, storages, names) if is_told else Held()
    return Partitioned(halves.forward, halves.backward, chosen, prepared, held)


def _rewrites_for(prepared: Prepared, *, is_told: bool) -> Iterator[Rewrite]:
    """What is changed in the two graphs for what runs them, in order; nothing changes them after that."""
    runs_on_cpu = prepared.storages.groups_loops
    yield offload_values
    if runs_on_cpu:
        yield keep_as_bytes
    yield close_ports
    if not prepared.storages.executor.fuses:
        yield keep_layouts
    if is_told:
        yield write_once
        yield keep_products_early
    if is_told and runs_on_cpu:
        yield repeat_exponentials


def has_order(prepared: Prepared, chosen: Chosen) -> bool:
    """Does a compiler keep to the plan's order, or is it to be told to, since a budget counts on it?"""
    is_bounded = chosen.plan.budget_bytes is not None or bool(chosen.plan.shares)
    executor = prepared.storages.executor
    return executor.fuses and (executor.keeps_order or is_bounded)
