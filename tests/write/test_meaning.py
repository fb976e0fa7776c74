"""Finished graphs against the joint graph: what every change of them leaves as it is, and faults in each are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from support.joints import Joint, capture

import remat
from remat.passes import pipeline
from remat.passes.graph.overwrite import overwritten_by
from remat.passes.memory.moments import COPY_TAG
from remat.passes.ops.copy_op import copy_alike_op
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Callback
from remat.passes.shared.errors import VerificationError
from remat.passes.shared.executor import Executor
from remat.passes.write.halves import Halves

aten = torch.ops.aten

FREE = Callback(function=lambda call: 0.0)
RUINOUS = Callback(function=lambda call: 1.0)
Fault = Callable[[Halves], None]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def halves_of(joint: Joint, prices: Callback = FREE, **executor: Any) -> Halves:
    parts = pipeline.run(
        joint.module, Request(prices, executor=Executor(**executor)), num_fwd_outputs=joint.num_fwd_outputs
    )
    return Halves(parts.forward, parts.backward, joint.num_fwd_outputs)


def find(graph: fx.Graph, op: Any, which: int = 0) -> fx.Node:
    return [node for node in graph.nodes if node.target is op][which]


# --- programs, each of which needs one of the rewrites -----------------------------------------------------------


@remat.checkpoint_region(policy=remat.policies.offload_names("kept"))
def offloading(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return remat.name((x @ w).sin(), "kept").exp() @ w


def through_regions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return offloading(offloading(x, w), w).sum()


def masked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (torch.where(x @ w > 0, x, 0.5 * x) @ w).sum()


def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout((x @ w).sin(), 0.3).exp().sum()


def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Backward reads the sigmoid before a product and after it."""
    gate = torch.sigmoid(x @ w)
    return (gate * torch.tanh((gate * x) @ w)).sum()


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.silu(x @ w)
    return x.exp().sum()


# --- what is handed over passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [through_regions, masked, dropped, twice])
@pytest.mark.parametrize("request_of", [{}, {"overwrites": True}, {"fuses": True, "keeps_order": True}])
def test_graphs_of_every_executor_mean_what_the_joint_graph_means(
    program: Callable[..., torch.Tensor], request_of: dict[str, Any]
) -> None:
    halves = halves_of(capture(program, tensor(8, 8), tensor(8, 8)), **request_of)
    assert halves.backward.graph.find_nodes(op="placeholder")


# --- and a fault in any change of them is refused ----------------------------------------------------------------


def seeded(monkeypatch: pytest.MonkeyPatch, change: str, fault: Fault) -> None:
    """Put a fault behind one of the changes that the pipeline makes to finished graphs."""
    original = getattr(pipeline, change)

    def faulty(*args: Any, **kwargs: Any) -> Halves:
        halves: Halves = original(*args, **kwargs)
        fault(halves)
        return halves

    monkeypatch.setattr(pipeline, change, faulty)


def swaps_what_is_handed_over(halves: Halves) -> None:
    output = halves.forward.graph.output_node()
    *rest, a, b = output.args[0]
    output.args = ((*rest, b, a),)


def swaps_gradients(halves: Halves) -> None:
    output = halves.backward.graph.output_node()
    a, b = output.args[0]
    output.args = ((b, a),)


def recomputes_from_another_value(halves: Halves) -> None:
    copy = next(node for node in halves.backward.graph.nodes if COPY_TAG in node.meta and len(node.args) == 1)
    other = next(n for n in halves.backward.graph.nodes if n.op == "placeholder" and n is not copy.args[0])
    copy.args = (other,)


def recomputes_by_another_op(halves: Halves) -> None:
    copy = next(node for node in halves.backward.graph.nodes if COPY_TAG in node.meta and len(node.args) == 1)
    copy.target = aten.cos.default


def reads_the_copy_as_it_waits(halves: Halves) -> None:
    """Halves the value on its way back from host memory."""
    received = find(halves.backward.graph, aten.clone.default)
    with halves.backward.graph.inserting_after(received):
        half = halves.backward.graph.call_function(aten.mul.Tensor, (received, 0.5))
    received.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)


def copies_another_value(halves: Halves) -> None:
    copy = find(halves.forward.graph, copy_alike_op())
    copy.args = copy.args[0].args[:1]


def turns_masks_around(halves: Halves) -> None:
    find(halves.backward.graph, aten.ne.Scalar).target = aten.eq.Scalar


def compares_masks_with_one(halves: Halves) -> None:
    node = find(halves.backward.graph, aten.ne.Scalar)
    node.args = (node.args[0], 1)


def doubles_a_product(halves: Halves) -> None:
    product = find(halves.backward.graph, aten.mm.default)
    reader = next(iter(product.users))
    with halves.backward.graph.inserting_before(reader):
        twice_it = halves.backward.graph.call_function(aten.mul.Tensor, (product, 2))
    reader.replace_input_with(product, twice_it)


def repeats_another_loop(halves: Halves) -> None:
    loop = find(halves.backward.graph, aten.sigmoid.default)
    loop.target = aten.tanh.default


def draws_from_another_state(halves: Halves) -> None:
    """Replays a random op from the state that another one drew from."""
    graph = halves.backward.graph
    replays = [node for node in graph.nodes if "run_with_rng_state" in str(node.target)]
    first, second = (node.args[0] for node in replays)
    replays[0].args, replays[1].args = (second, *replays[0].args[1:]), (first, *replays[1].args[1:])


def two_drops(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(torch.sigmoid(torch.bernoulli(torch.sigmoid(x @ w)) * (x @ w)) * x).mul(x).sum()


RUN_IN_ORDER = {"fuses": True, "keeps_order": True}


@pytest.mark.parametrize(
    ("program", "request_of", "change", "fault"),
    [
        (twice, {}, "extract", swaps_gradients),
        (twice, {}, "extract", recomputes_from_another_value),
        (twice, {}, "extract", recomputes_by_another_op),
        (through_regions, {}, "extract", swaps_what_is_handed_over),
        (through_regions, {}, "offload_values", reads_the_copy_as_it_waits),
        (through_regions, {}, "offload_values", swaps_what_is_handed_over),
        (through_regions, {}, "close_ports", swaps_what_is_handed_over),
        (through_regions, {}, "keep_layouts", copies_another_value),
        (masked, {**RUN_IN_ORDER, "prices": RUINOUS}, "keep_as_bytes", turns_masks_around),
        (masked, {**RUN_IN_ORDER, "prices": RUINOUS}, "keep_as_bytes", compares_masks_with_one),
        (twice, RUN_IN_ORDER, "write_once", swaps_gradients),
        (twice, RUN_IN_ORDER, "keep_products_early", doubles_a_product),
        (gated, RUN_IN_ORDER, "repeat_exponentials", repeats_another_loop),
    ],
)
def test_a_fault_in_any_change_of_finished_graphs_is_refused(
    program: Callable[..., torch.Tensor],
    request_of: dict[str, Any],
    change: str,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = capture(program, tensor(8, 8), tensor(8, 8))
    seeded(monkeypatch, change, fault)
    with pytest.raises(VerificationError):
        halves_of(joint, **request_of)


def test_every_change_of_finished_graphs_has_a_fault_above() -> None:
    """A change that is added to the pipeline is to get a fault of its own."""
    source = pipeline._rewrites_for.__code__.co_names
    changes = {name for name in source if callable(getattr(pipeline, name, None))}
    marks: Any = test_a_fault_in_any_change_of_finished_graphs_is_refused
    seeded_changes = {case[2] for case in marks.pytestmark[0].args[1]}
    assert changes <= seeded_changes


def test_random_op_replayed_from_another_ones_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = capture(two_drops, tensor(4, 4), tensor(4, 4))
    halves = halves_of(joint)
    if sum("run_with_rng_state" in str(node.target) for node in halves.backward.graph.nodes) < 2:
        pytest.fail("the program is to replay two random ops")
    joint = capture(two_drops, tensor(4, 4), tensor(4, 4))
    seeded(monkeypatch, "extract", draws_from_another_state)
    with pytest.raises(VerificationError):
        halves_of(joint)


def test_result_written_over_an_input_means_what_it_means_in_memory_of_its_own() -> None:
    halves = halves_of(capture(twice, tensor(8, 8), tensor(8, 8)), overwrites=True)
    assert any(overwritten_by(node) is not None for node in halves.backward.graph.nodes)


def test_reading_an_input_after_forward_has_written_to_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward gets a copy of the old contents; handing over the input itself would be silently wrong."""
    buffer = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * buffer.exp()
        buffer.add_(1)
        return y.sum()

    def hands_over_the_input(halves: Halves) -> None:
        output = halves.forward.graph.output_node()
        values = [v.args[0] if v.name.endswith("_before") else v for v in output.args[0]]
        assert values != list(output.args[0])
        output.args = (tuple(values),)

    halves_of(capture(step, tensor(4)))
    joint = capture(step, tensor(4))
    seeded(monkeypatch, "extract", hands_over_the_input)
    with pytest.raises(VerificationError):
        halves_of(joint)
