"""The pipeline: joint graph in, plan and two graphs out. Each line is a module of this package."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from .graph.constraints import find_constraints
from .graph.joint_graph import JointGraph
from .inductor.fusion import keep_products_early, repeat_exponentials, write_once
from .inductor.kernels import Held, held_between
from .inductor.masks import keep_as_bytes
from .memory.legal import verify_schedule
from .memory.shares import Shares
from .memory.simulate import simulate
from .memory.storage import find_storages
from .plans.plan import Plan
from .plans.request import Prepared, Request
from .plans.stored import apply_plan
from .plans.write_plan import Chosen, choose_plan
from .prices.cost import price
from .ranges.ranges import byte_limits, choose_for_range
from .rewrites.dropout import take_dropout_apart
from .rewrites.gradients import lay_out_gradients
from .rewrites.losses import copy_losses_out
from .rewrites.ports import close_ports, open_ports
from .search.problem import FlowProblem
from .sizes.symbols import Sizes
from .sizes.unknown_sizes import require_known
from .write.extract import extract
from .write.offload import offload_values
from .write.verify import verify_extracted, verify_memory


@dataclass(frozen=True, slots=True, eq=False)
class Partitioned:
    """A split joint graph and the plan behind it."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    held: Held
    """What is in memory between the two, if a compiler's kernels are to be compared with a budget."""


def partition(joint: fx.GraphModule, request: Request, *, num_fwd_outputs: int) -> Partitioned:
    """Split a joint graph into forward and backward, recomputing where it pays."""
    prepared = prepare(joint, request, num_fwd_outputs=num_fwd_outputs)
    return split(prepared, choose(prepared, request))


def prepare(joint: fx.GraphModule, request: Request, *, num_fwd_outputs: int) -> Prepared:
    """Find out what a joint graph computes, what may be done with it, and what that costs."""
    if not request.fuses:
        take_dropout_apart(joint)
        copy_losses_out(joint)
    lay_out_gradients(joint, num_fwd_outputs)
    open_ports(joint)
    graph = JointGraph.classify(joint, num_fwd_outputs)
    constraints = find_constraints(graph, preferences_bind=request.budget is None and not request.stored)
    sizes = Sizes.find(graph.nodes, request.unbacked_hint)
    costs = price(graph, request.cost_model, sizes, fuses=request.fuses)
    storages = find_storages(graph, fuses=request.fuses, overwrites=request.overwrites, sizes=sizes)
    return Prepared(FlowProblem.build(graph, constraints, costs), storages, num_fwd_outputs, request.keeps_order)


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


def split(prepared: Prepared, chosen: Chosen) -> Partitioned:
    """Write the two graphs of a plan, and check them."""
    graph, constraints = prepared.problem.graph, prepared.problem.constraints
    verify_schedule(graph, constraints, chosen.schedule)
    simulation = simulate(graph, prepared.storages, chosen.schedule)
    is_told = has_order(prepared, chosen)
    realized = simulation.realized if is_told else ()
    extracted = extract(graph, constraints, chosen.schedule, simulation.overwritten, realized)
    verify_extracted(graph, extracted)
    offload_values(extracted.forward, extracted.backward, prepared.num_fwd_outputs)
    if prepared.storages.groups_loops:
        keep_as_bytes(extracted.forward, extracted.backward, prepared.num_fwd_outputs)
    close_ports(extracted.forward, extracted.backward)
    verify_memory(extracted.forward.graph)
    verify_memory(extracted.backward.graph)
    if not is_told:
        return Partitioned(extracted.forward, extracted.backward, chosen.plan, Held())
    write_once(extracted.forward.graph)
    write_once(extracted.backward.graph)
    keep_products_early(extracted.backward.graph)
    if prepared.storages.groups_loops:
        repeat_exponentials(extracted.backward.graph)
    names = [node.name for node in extracted.backward.graph.find_nodes(op="placeholder")]
    held = held_between(simulation, graph, prepared.storages, names)
    return Partitioned(extracted.forward, extracted.backward, chosen.plan, held)


def has_order(prepared: Prepared, chosen: Chosen) -> bool:
    """Does a compiler keep to the plan's order, or is it to be told to, since a budget counts on it?"""
    is_bounded = chosen.plan.budget_bytes is not None or bool(chosen.plan.shares)
    return any(prepared.storages.is_fused) and (prepared.keeps_order or is_bounded)
