"""Masks wait for backward as bytes where loops on a CPU make and read them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from support.joints import capture
from torch import nn

from remat.passes.inductor import masks
from remat.passes.pipeline import Partitioned, run
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Roofline
from remat.passes.shared.executor import Executor
from remat.report.observed.counting import activation_peak


def split(function: Callable[..., Any], *args: torch.Tensor, fuses: bool = True) -> Partitioned:
    joint = capture(function, *args)
    return run(
        joint.module,
        Request(Roofline(fuses=fuses), executor=Executor(fuses=fuses)),
        num_fwd_outputs=joint.num_fwd_outputs,
    )


def saved_dtypes(halves: Partitioned, num_own: int = 1) -> list[torch.dtype]:
    returned: Any = halves.forward.graph.output_node().args[0]
    return [value.meta["val"].dtype for value in returned[num_own:] if isinstance(value, fx.Node)]


def received_dtypes(halves: Partitioned) -> list[torch.dtype]:
    return [node.meta["val"].dtype for node in halves.backward.graph.find_nodes(op="placeholder")]


def masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x.sin().mm(y) > 0, x.mm(y), 0.1 * y).mm(y).sum()


def inputs(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(n, n, requires_grad=True) for _ in range(2))  # type: ignore[return-value]


def test_mask_leaves_forward_as_bytes_and_is_a_mask_again_in_backward() -> None:
    halves = split(masked, *inputs())
    assert torch.uint8 in saved_dtypes(halves)
    assert torch.bool not in saved_dtypes(halves)
    assert torch.uint8 in received_dtypes(halves)
    restored = halves.backward.graph.find_nodes(op="call_function", target=torch.ops.aten.ne.Scalar)
    assert [node.meta["val"].dtype for node in restored] == [torch.bool]


def test_ops_that_run_one_by_one_get_the_mask_itself() -> None:
    halves = split(masked, *inputs(), fuses=False)
    assert torch.bool in saved_dtypes(halves)
    assert torch.uint8 not in saved_dtypes(halves)


def test_mask_that_the_user_gets_is_kept_as_it_is() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        mask = x.sin().mm(y) > 0
        return torch.where(mask, x.mm(y), 0.1 * y).mm(y).sum(), mask

    assert torch.uint8 not in saved_dtypes(split(both, *inputs()), num_own=2)


def test_mask_that_is_given_or_read_by_an_op_of_its_own_is_kept_as_it_is() -> None:
    def given(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x.mm(y), 0.1 * y).mm(y).sum()

    assert torch.uint8 not in saved_dtypes(split(given, *inputs(), torch.ones(32, 32, dtype=torch.bool)))

    def indexed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = x.sin().mm(y) > 0
        order = mask.argsort(stable=True)  # sorting is no loop
        return torch.where(mask, x.mm(y).gather(0, order), 0.1 * y).mm(y).sum()

    assert torch.uint8 not in saved_dtypes(split(indexed, *inputs()))


def test_mask_of_which_the_user_gets_a_view_is_kept_once_and_as_it_is() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        mask = x.sin().mm(y) > 0
        return torch.where(mask, x.mm(y), 0.1 * y).mm(y).sum(), mask.view(-1)

    assert torch.uint8 not in saved_dtypes(split(both, *inputs()), num_own=2)


def test_masks_that_are_memory_anyway_are_told_from_those_that_loops_compute() -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = x.mm(y) > 0
        joined = torch.cat([mask, mask.sin() > 0])
        written = joined.scatter(0, joined.argmax(0, keepdim=True), True)
        return torch.where(written, torch.cat([x, y]), 0.0).sum()

    module = capture(several, *inputs()).module
    found = {str(n.target): masks._is_memory_anyway(n) for n in module.graph.nodes if n.op == "call_function"}
    assert found["aten.cat.default"]
    assert found["aten.scatter.value"]
    assert not found["aten.gt.Scalar"]


class Dropped(nn.Module):
    """Masks of dropout, of a relu, and one that is read twice in backward, once through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            mask = h.sin() > 0.2
            h = torch.where(mask, h.sin(), h) + torch.where(mask.mT, h.exp(), h.mT).mT
            x = torch.dropout(h.relu(), 0.3, True) + x
        return x.square().sum()


@pytest.mark.parametrize("budget", [None, 0.6])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_are_those_of_the_same_kernels_with_booleans(
    budget: float | None, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)  # exponentials of some numbers are more than can be told apart
    model, x = Dropped(), torch.randn(40, 24, 24)

    def run() -> list[torch.Tensor]:
        torch._dynamo.reset()
        options = {} if budget is None else {"memory_budget": budget}
        compiled = torch.compile(model, backend="remat", dynamic=dynamic, options=options)
        found = []
        for batch in (x, x[:20]):
            model.zero_grad()
            torch.manual_seed(0)
            loss = compiled(batch)
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        return found

    packed = run()
    monkeypatch.setattr("remat.passes.pipeline.keep_as_bytes", lambda halves: halves)
    plain = run()
    assert all(loss.isfinite().all() for loss in plain)
    assert all(map(torch.equal, packed, plain))


def test_peak_is_that_with_booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Dropped(), torch.randn(400, 24, 24)
    parameters = list(model.parameters())

    def peak() -> int:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="remat", options={"memory_budget": 0.8})
        compiled(x).backward()
        return activation_peak(lambda: compiled(x), parameters, counter="allocator").activation_bytes

    packed = peak()
    monkeypatch.setattr("remat.passes.pipeline.keep_as_bytes", lambda halves: halves)
    assert packed <= peak()
