"""The split graphs: what is recomputed where, how they fit together, and what the verifier refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from support.joints import Joint, capture, named

from remat.passes.graph.constraints import find_constraints
from remat.passes.memory.legal import verify_schedule
from remat.passes.memory.moments import COPY_TAG
from remat.passes.memory.schedule import schedule_backward
from remat.passes.ops.copy_op import is_copy_alike
from remat.passes.pipeline import Partitioned, run
from remat.passes.plans.contents import Action
from remat.passes.plans.plan import Plan
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Callback
from remat.passes.shared.errors import VerificationError
from remat.passes.write.extract import _copied_into, extract
from remat.passes.write.verify import verify, verify_runs

FREE = Callback(function=lambda call: 0.0)
RUINOUS = Callback(function=lambda call: 1e6)


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x @ w)
    return x.sum()


def split(joint: Joint, cost_model: Callback) -> Partitioned:
    return run(joint.module, Request(cost_model), num_fwd_outputs=joint.num_fwd_outputs)


def count(module: fx.GraphModule, op: str) -> int:
    return sum(str(node.target).split(".")[1:2] == [op] for node in module.graph.nodes if node.op == "call_function")


def test_free_recomputation_saves_no_activation() -> None:
    parts = split(capture(layers, tensor(4, 8), tensor(8, 8)), FREE)
    assert parts.plan.saved == ()
    assert count(parts.backward, "tanh") == 3
    assert count(parts.forward, "tanh") == 3


def test_ruinous_recomputation_repeats_no_op() -> None:
    parts = split(capture(layers, tensor(4, 8), tensor(8, 8)), RUINOUS)
    assert count(parts.backward, "tanh") == 0
    assert len(parts.plan.saved) == 3


def test_plan_says_what_the_graphs_do() -> None:
    for model in (FREE, RUINOUS):
        parts = split(capture(layers, tensor(4, 8), tensor(8, 8)), model)
        output = parts.forward.graph.output_node().args[0]
        handed = {n.name for n in output[1:] if n.op != "placeholder"}
        assert handed == {d.value for d in parts.plan.decisions if d.action is Action.SAVE}
        copies = {n.meta[COPY_TAG] for n in parts.backward.graph.nodes if COPY_TAG in n.meta}
        assert {d.value for d in parts.plan.recomputed} <= copies


def test_copy_stands_just_before_its_reader() -> None:
    backward = split(capture(layers, tensor(4, 8), tensor(8, 8)), FREE).backward
    nodes = list(backward.graph.nodes)
    for node in nodes:
        if COPY_TAG in node.meta and node.users:
            between = nodes[nodes.index(node) + 1 : min(nodes.index(user) for user in node.users)]
            assert all(COPY_TAG in other.meta for other in between), f"{node} waits for its reader"


def test_forward_and_backward_agree_on_names() -> None:
    parts = split(capture(layers, tensor(4, 8), tensor(8, 8)), RUINOUS)
    handed = [n.name for n in parts.forward.graph.output_node().args[0][1:]]
    received = [n.name for n in parts.backward.graph.find_nodes(op="placeholder")]
    assert received == [*handed, "tangents_1"]


def test_recomputed_random_op_is_replayed_from_its_state() -> None:
    parts = split(capture(lambda x: F.dropout(x.exp(), 0.5).sin().sum(), tensor(16)), FREE)
    targets = [str(n.target) for n in parts.backward.graph.nodes if n.op == "call_function"]
    assert "run_with_rng_state" in targets
    assert count(parts.backward, "native_dropout") == count(parts.backward, "bernoulli_like") == 0
    assert "native_dropout_mask_rng_state" in [n.name for n in parts.backward.graph.find_nodes(op="placeholder")]


def test_old_contents_of_an_overwritten_input_are_copied() -> None:
    buffer = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x + buffer).sin()
        buffer.add_(1)
        return y.sum()

    parts = split(capture(step, tensor(3)), FREE)
    copies = [n for n in parts.forward.graph.nodes if is_copy_alike(n.target)]
    saved_directly = "add" in [n.name for n in parts.forward.graph.output_node().args[0] if n is not None]
    assert copies or saved_directly, "backward would read the new contents"


def test_number_is_handed_over_before_tensors_in_backward() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1) * x.shape[0]).sin().sum()

    parts = split(capture(step, tensor(4, 8), dynamic=True), RUINOUS)
    values = [n.meta["val"] for n in parts.backward.graph.find_nodes(op="placeholder")]
    numbers = [isinstance(v, torch.SymInt) for v in values]
    assert any(numbers)
    assert numbers == sorted(numbers, reverse=True)


def test_equal_graphs_have_equal_plans() -> None:
    plans = {split(capture(layers, tensor(4, 8), tensor(8, 8)), RUINOUS).plan.to_json() for _ in range(2)}
    assert len(plans) == 1


def test_plan_survives_json() -> None:
    plan = split(capture(layers, tensor(4, 8), tensor(8, 8)), RUINOUS).plan
    assert Plan.from_json(plan.to_json()) == plan


def test_plan_of_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has format 99; this version of remat reads format 1"):
        Plan.from_json('{"format": 99}')


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 1}', '{"format": 1, "decisions": [{}], "key": ""}'])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"this is no plan|this plan is damaged"):
        Plan.from_json(text)


def test_more_forward_outputs_than_outputs_are_refused() -> None:
    joint = capture(layers, tensor(4, 8), tensor(8, 8))
    with pytest.raises(ValueError, match=r"num_fwd_outputs=9, but the joint graph has 3 outputs"):
        run(joint.module, Request(FREE), num_fwd_outputs=9)


def test_decision_has_source_and_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    plan = split(capture(lambda x: model(x).sum(), tensor(2, 4)), RUINOUS).plan
    assert all(d.source.rsplit("/", 1)[-1].startswith("test_extract.py:") for d in plan.saved)
    assert {d.module for d in plan.saved if d.op.startswith("aten.tanh")} == {"1", "3"}


def test_copies_are_those_that_fx_makes() -> None:
    joint = capture(
        lambda x, w: F.dropout(torch.cat([x @ w, x], dim=1), 0.5).sum(dim=[0, 1]), tensor(4, 8), tensor(8, 8)
    )
    ours, expected = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in joint.module.graph.nodes:
        if node.op == "output":
            continue
        copies[node] = (
            _copied_into(ours, node, lambda n: copies[n][0]),
            expected.node_copy(node, lambda n: copies[n][1]),
        )
    assert str(ours) == str(expected)
    for copy, plain in copies.values():
        assert (copy.name, copy.op, copy.target, copy.type, copy.meta) == (
            plain.name, plain.op, plain.target, plain.type, plain.meta,
        )  # fmt: skip
        assert copy.meta is not plain.meta
        assert [n.name for n in copy.users] == [n.name for n in plain.users]
        assert ours.find_nodes(op=copy.op, target=copy.target) != []


# -------------------------------------------------------------------------------------------------- the verifier


@pytest.fixture
def planned():
    graph = capture(layers, tensor(4, 8), tensor(8, 8)).classify()
    constraints = find_constraints(graph)
    saved = [named(graph, "tanh", k) for k in range(3)]
    schedule = schedule_backward(graph, constraints, saved)
    return graph, constraints, schedule


def test_sound_schedule_passes(planned) -> None:
    graph, constraints, schedule = planned
    verify_schedule(graph, constraints, schedule)
    verify(graph, extract(graph, constraints, schedule))


def test_node_before_its_input_is_refused(planned) -> None:
    graph, constraints, schedule = planned
    broken = dataclasses.replace(schedule, events=schedule.events[::-1])
    with pytest.raises(VerificationError, match=r"runs in backward before .*, which it reads"):
        verify_schedule(graph, constraints, broken)


def test_missing_gradient_is_refused(planned) -> None:
    graph, constraints, schedule = planned
    with pytest.raises(VerificationError, match="backward never computes"):
        verify_schedule(graph, constraints, dataclasses.replace(schedule, events=schedule.events[:-1]))


def test_recomputing_what_runs_once_is_refused() -> None:
    buffer = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        buffer.add_(1)
        return y.sum()

    graph, constraints = capture(step, tensor(3)).constraints()
    schedule = schedule_backward(graph, constraints, [])
    update = named(graph, "copy_")
    broken = dataclasses.replace(
        schedule, events=(update, *schedule.events), received=(*schedule.received, *graph.inputs[update])
    )
    with pytest.raises(VerificationError, match="is recomputed although it may not be: writes to one of its arguments"):
        verify_schedule(graph, constraints, broken)


def test_plain_random_op_in_backward_is_refused(planned) -> None:
    graph, constraints, schedule = planned
    parts = extract(graph, constraints, schedule)
    node = next(n for n in parts.backward.graph.nodes if n.op == "call_function")
    node.meta[COPY_TAG] = "made_up"
    node.target = torch.ops.aten.rand_like.default
    with pytest.raises(VerificationError, match="which may run only once"):
        verify_runs(graph, parts)
