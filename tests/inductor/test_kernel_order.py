"""A compiler's kernels run in the order of the plan: nothing is moved ahead because something late waits for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.fx as fx
from support import zoo
from torch import nn

import remat
from remat.compiled import backend
from remat.passes.inductor.order import kernel_order, planned_order
from remat.passes.memory.moments import MOMENT_TAG, Moment
from remat.report.observed.counting import activation_peak, clear_gradients


def ranks(*numbers: int) -> list[tuple[int, int]]:
    return [(0, number) for number in numbers]


def test_loop_runs_in_its_own_slot_though_it_was_made_for_a_late_reader() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("loop", "recomputed", "reader", "copied")]
    for node, slot in zip(nodes[:3], (1, 2, 3), strict=True):
        node.meta[MOMENT_TAG] = Moment(0, slot)
    # The compiler made the loop when it came to its reader; what it copies has no moment and stays where it is.
    made = [[nodes[1]], [nodes[0]], [nodes[3]], [nodes[2]]]
    assert planned_order([0, 1, 2, 3], made, [set(), set(), set(), {0, 1}]) == [1, 2, 0, 3]
    assert planned_order([0, 1, 2, 3], made, [set(), {0}, set(), {0, 1}]) == [2, 0, 1, 3]
    assert planned_order([2, 0, 1], [[nodes[3]]] * 3, [set(), set(), set()]) == [1, 2, 0]


def test_what_is_ready_runs_in_order_of_rank() -> None:
    assert kernel_order(ranks(0, 1, 2, 3), [set(), set(), set(), set()]) == [0, 1, 2, 3]
    assert kernel_order(ranks(2, 0, 1), [set(), set(), {1}]) == [1, 2, 0]


def test_late_kernel_does_not_pull_ahead_what_it_waits_for() -> None:
    # A line 0 -> 2 -> 4 with a gradient beside each step (1, 3, 5); 6 was made of an early loop and a late one.
    waits_for: list[set[int]] = [set(), {0}, {0}, {2}, {2}, {4}, {4}]
    assert kernel_order(ranks(*range(7)), waits_for) == [0, 1, 2, 3, 4, 5, 6]
    # What waits for such a kernel is put off, and nothing else is.
    waits_for[1] = {0, 6}
    assert kernel_order(ranks(*range(7)), waits_for) == [0, 2, 3, 4, 5, 6, 1]


@pytest.mark.parametrize("seed", range(20))
def test_order_respects_what_is_waited_for(seed: int) -> None:
    rng = random.Random(seed)
    waits_for = [{other for other in range(k) if rng.random() < 0.2} for k in range(30)]
    order = kernel_order(ranks(*(rng.randrange(30) for _ in range(30))), waits_for)
    place = {k: number for number, k in enumerate(order)}
    assert sorted(order) == list(range(30))
    assert all(place[other] < place[k] for k, others in enumerate(waits_for) for other in others)


@pytest.mark.parametrize("memory_budget", [None, 0.9])
def test_kernels_are_put_in_the_order_of_the_plan(memory_budget: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counted(places: list[int], nodes: list[list[fx.Node]], waits_for: list[set[int]]) -> list[int]:
        lengths.append(len(places))
        return planned_order(places, nodes, waits_for)

    monkeypatch.setattr(backend, "planned_order", counted)
    torch._dynamo.reset()
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())))
    options = {"memory_budget": memory_budget}
    compiled = torch.compile(lambda x: model(x).sum(), backend="remat", options=options, fullgraph=True)
    # Caches may have the code already, and ask nobody.
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compiled(torch.randn(16, 8)).backward()
    assert len(lengths) == 2
    assert min(lengths) > 5


@pytest.mark.slow
def test_gradients_beside_the_main_line_are_not_put_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A diffusion UNet: the gradient of its time embedding is a sum over all blocks, ready last, begun first."""
    built = zoo.get("unet").build("bench")
    batch, parameters = built.make_batch(0), list(built.model.parameters())

    def measured_over_predicted(folder: Path) -> float:
        torch._dynamo.reset()
        options = {"memory_budget": 0.5, "dump": str(folder)}
        step = lambda: built.loss_fn(built.model, batch)  # noqa: E731
        compiled = torch.compile(step, backend="remat", options=options, fullgraph=True)
        compiled().backward()
        clear_gradients(parameters)
        peak = activation_peak(compiled, parameters, counter="allocator").activation_bytes
        (file,) = folder.glob("*.json")
        return peak / remat.Plan.load(file).peak.num_bytes

    kept = measured_over_predicted(tmp_path / "kept")
    monkeypatch.setattr(backend, "_keep_order", lambda _: dict(backend.KEEP_ORDER))
    put_off = measured_over_predicted(tmp_path / "put_off")
    assert kept <= 1.05
    assert put_off > 1.15
