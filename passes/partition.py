"""The pipeline: joint graph in, plan and two graphs out. Each line is a module of this package."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from .choose import choose_plan
from .constraints import find_constraints
from .cost import CostModel, price
from .extract import extract
from .joint_graph import JointGraph
from .offload import offload_values
from .plan import Plan
from .ports import close_ports, open_ports
from .schedule import schedule_backward
from .verify import verify_extracted, verify_schedule


@dataclass(frozen=True, slots=True, eq=False)
class Partitioned:
    """A split joint graph and the plan behind it."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan


def partition(joint: fx.GraphModule, *, num_fwd_outputs: int, cost_model: CostModel, key: str = "") -> Partitioned:
    """Split a joint graph into forward and backward, recomputing where it pays."""
    open_ports(joint)
    graph = JointGraph.classify(joint, num_fwd_outputs)
    constraints = find_constraints(graph)
    costs = price(graph, cost_model)
    chosen = choose_plan(graph, constraints, costs, key)
    schedule = schedule_backward(graph, constraints, chosen.saved)
    verify_schedule(graph, constraints, schedule)
    extracted = extract(graph, constraints, schedule)
    verify_extracted(graph, extracted)
    offload_values(extracted.forward, extracted.backward, num_fwd_outputs)
    close_ports(extracted.forward, extracted.backward)
    return Partitioned(extracted.forward, extracted.backward, chosen.plan)
