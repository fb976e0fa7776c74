"""The peak of a compiler's kernels: counted right, compared with the budget, and reason enough to plan again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from support import zoo
from support.joints import capture, rewritten
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.compiled import backend, kernel_check
from remat.compiled.kernel_check import KernelCheck
from remat.passes import pipeline as partition
from remat.passes.graph.constraints import find_constraints
from remat.passes.inductor.describe import describe_kernels
from remat.passes.inductor.kernels import Excess, Held, Kernel, Kernels, Promise, kernel_peak, live_bytes
from remat.passes.inductor.order import may_fuse
from remat.passes.inductor.rewrites import repeat_exponentials
from remat.passes.memory.moments import COPY_TAG, MOMENT_TAG, Moment
from remat.passes.memory.simulate import Simulation
from remat.passes.memory.storage import find_storages
from remat.passes.prices.cost import Machine, Roofline, price
from remat.passes.search import blocks
from remat.passes.search.bench import Bench
from remat.passes.search.planner import Planner
from remat.passes.search.problem import FlowProblem
from remat.passes.search.squeeze import Squeezer
from remat.passes.shared.executor import Executor
from remat.passes.torch_private import REALIZE_TAG, CompiledHalf
from remat.report.observed.counting import activation_peak, clear_gradients


def kernel(name: str, made: Mapping[str, int], *read: str, over: str = "", is_loop: bool = True) -> Kernel:
    overwritten = dict.fromkeys(made, over) if over else {}
    return Kernel(name, (), is_loop, made, frozenset({*made, *read}), overwritten)


def half(*kernels: Kernel, groups_loops: bool = False, is_backward: bool = False, **given: int) -> Kernels:
    return Kernels(kernels, given, frozenset({"out"}), is_backward, groups_loops)


CHAIN = (
    kernel("k0", {"a": 10}),
    kernel("k1", {"b": 10}, "a"),
    kernel("k2", {"c": 10}, "b"),
    kernel("k3", {"out": 1}, "c", is_loop=False),
)


def test_memory_is_free_after_the_last_use() -> None:
    assert live_bytes(half(*CHAIN), Held()) == [10, 20, 20, 11]


def test_loops_that_are_called_as_one_free_memory_after_the_last_of_them() -> None:
    assert live_bytes(half(*CHAIN, groups_loops=True), Held()) == [10, 20, 30, 11]


def test_what_takes_the_place_of_an_input_is_counted_once() -> None:
    over = (CHAIN[0], kernel("k1", {"b": 10}, "a", over="a"), kernel("k2", {"c": 10}, "b", over="b"), CHAIN[3])
    for groups_loops in (False, True):
        assert live_bytes(half(*over, groups_loops=groups_loops), Held()) == [10, 10, 10, 11]


def test_backward_frees_what_only_it_holds_and_does_not_count_gradients() -> None:
    kernels = (kernel("k0", {"a": 10}, "saved", "kept"), kernel("k1", {"out": 50}, "a"))
    back = half(*kernels, is_backward=True, saved=7, kept=5)
    assert live_bytes(back, Held(20, frozenset({"saved"}))) == [30, 23]
    assert kernel_peak(half(is_backward=True), Held(20)) == 20


def test_an_excess_says_how_much_of_a_budget_to_leave_free() -> None:
    assert Promise(20, 20, Held()).excess_of(half(*CHAIN)) is None
    excess = Promise(18, 19, Held()).excess_of(half(*CHAIN))
    assert excess == Excess(18, 20)
    assert math.isclose(excess.margin, 0.1)


# --- what is predicted of a compiler's memory -------------------------------------------------------------------------


def predicted(function: Callable[..., Any], *args: torch.Tensor) -> Simulation:
    graph = capture(function, *args).classify()
    costs = price(graph, Roofline({"cpu": Machine(2.0**36, 2.0**33)}))
    return Planner(
        Bench(FlowProblem.build(graph, find_constraints(graph), costs), find_storages(graph, Executor(fuses=True)))
    ).fastest.simulation


def forward_peak(function: Callable[..., Any], *args: torch.Tensor) -> int:
    simulation = predicted(function, *args)
    return max(simulation.live_bytes[: simulation.num_forward])


def test_only_what_is_read_in_place_is_written_over() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    one = x.numel() * x.element_size()

    def turned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second = (x @ w).chunk(2, -1)
        return (torch.cat([second, first], -1) @ x).sum()

    # The product of the second factor's gradient needs nothing but `x`, so that all of this is free again.
    assert forward_peak(lambda x, w: (((x @ w) * 2.0 + 1.0) @ x).sum(), x, w) <= 2.1 * one
    assert forward_peak(lambda x, w: ((x @ w).t().neg() @ x).sum(), x, w) <= 2.1 * one
    assert forward_peak(lambda x, w: ((x @ w).flip(0) @ x).sum(), x, w) >= 2 * one
    assert forward_peak(turned, x, w) >= 2 * one


class Residual(nn.Module):
    """Layers with ReLU and a loss over classes: the zero of all of their gradients is one constant."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers)])
        self.down = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = (x + down(up(x).relu())).relu()
        return nn.functional.cross_entropy(x, y)


@pytest.mark.filterwarnings("ignore:memory_budget=")
def test_constant_that_all_layers_read_does_not_make_them_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = Residual(12, 64), torch.randn(512, 64), torch.randint(64, (512,))

    monkeypatch.setattr(Squeezer, "squeeze_out", lambda _, lowest: lowest)  # it would get there in another way

    def lowest() -> int:
        report = remat.explain(model, x, y, inner="inductor", memory_budget=1024, on_infeasible="minimum")
        return report.graphs[0].plan.peak.num_bytes

    buffers = lowest() / (x.numel() * x.element_size())
    assert buffers < 7, "of 26 that backward reads"
    monkeypatch.setattr(blocks, "_made_of_nothing", lambda graph: set())
    assert lowest() / (x.numel() * x.element_size()) > 1.5 * buffers


def test_gradient_made_of_several_as_large_is_written_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    original = partition.extract

    def extract(*args: Any) -> Any:
        extracted = original(*args)
        told.extend(n.name for n in extracted.backward.graph.nodes if n.meta.get(REALIZE_TAG))
        return extracted

    monkeypatch.setattr(partition, "extract", extract)
    convolutions = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
    norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(4)])

    def loss(x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(convolutions, norms, strict=True):
            x = (x + norm(convolution(x))).relu()
        return x.sum()

    for inner, memory_budget in (("aot_eager", 0.9), ("inductor", None), ("inductor", 0.9)):
        torch._dynamo.reset()
        told.clear()
        options = {"inner": inner, "memory_budget": memory_budget}
        torch.compile(loss, backend="remat", options=options, fullgraph=True)(torch.randn(4, 8, 16, 16)).backward()
        assert bool(told) == (inner == "inductor"), told


# --- what fusion may do -----------------------------------------------------------------------------------------------


def tagged(function: Callable[..., Any], *args: torch.Tensor, slots: Mapping[str, int]) -> torch.fx.Graph:
    graph: torch.fx.Graph = make_fx(function)(*args).graph
    for node in graph.nodes:
        if node.name in slots:
            node.meta[MOMENT_TAG] = Moment(0, slots[node.name])
    return graph


def swiglu_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Any:
    silu = gate.sigmoid()
    return (silu * up).mm(grad), silu * grad


SLOTS = {"sigmoid": 0, "mul": 0, "mm": 1, "mul_1": 1}


def test_an_exponential_is_repeated_at_each_moment_that_reads_it() -> None:
    args = [torch.randn(4, 4) for _ in range(3)]
    graph = tagged(swiglu_backward, *args, slots=SLOTS)
    before = torch.fx.GraphModule({}, graph)(*args)
    rewritten(repeat_exponentials, graph)
    copies = [node for node in graph.nodes if node.meta.get(COPY_TAG) == "sigmoid"]
    assert [(node.target, node.meta[MOMENT_TAG].slot) for node in copies] == [(torch.ops.aten.sigmoid.default, 1)]
    assert [user.name for user in copies[0].users] == ["mul_1"]
    graph.lint()
    assert all(map(torch.equal, before, torch.fx.GraphModule({}, graph)(*args)))


@pytest.mark.parametrize("slots", [{**SLOTS, "mul_1": 0}, {name: 0 for name in SLOTS if name != "mul_1"}])
def test_an_exponential_that_is_read_at_one_moment_or_none_knows_when_is_not_repeated(slots: dict[str, int]) -> None:
    graph = tagged(swiglu_backward, *(torch.randn(4, 4) for _ in range(3)), slots=slots)
    rewritten(repeat_exponentials, graph)
    assert sum(node.target is torch.ops.aten.sigmoid.default for node in graph.nodes) == 1


def test_what_is_to_be_in_memory_is_not_repeated() -> None:
    graph = tagged(swiglu_backward, *(torch.randn(4, 4) for _ in range(3)), slots=SLOTS)
    next(node for node in graph.nodes if node.name == "sigmoid").meta[REALIZE_TAG] = True
    rewritten(repeat_exponentials, graph)
    assert not any(COPY_TAG in node.meta for node in graph.nodes)


def test_loop_that_something_reads_before_is_not_made_one_with_a_later_loop() -> None:
    graph = tagged(lambda x, w: (x.sin().mm(w), x.sin().cos()), torch.randn(4, 4), torch.randn(4, 4), slots={})
    sin, mm, cos = (next(n for n in graph.nodes if n.name == name) for name in ("sin", "mm", "cos"))
    cos.replace_input_with(cos.args[0], sin)
    for node, slot in ((sin, 0), (mm, 1), (cos, 2)):
        node.meta[MOMENT_TAG] = Moment(0, slot)
    assert not may_fuse([sin], [cos], feed_each_other=True)
    mm.meta[MOMENT_TAG] = Moment(0, 2)
    assert may_fuse([sin], [cos], feed_each_other=True)


def test_loops_of_one_moment_are_made_one_whatever_phase_their_parts_are_of() -> None:
    graph = tagged(lambda x: x.sin().cos(), torch.randn(4, 4), slots={})
    sin, cos = (next(n for n in graph.nodes if n.name == name) for name in ("sin", "cos"))
    sin.meta |= {MOMENT_TAG: Moment(0, 3), COPY_TAG: "sin"}
    cos.meta[MOMENT_TAG] = Moment(1, 3)
    assert may_fuse([sin], [cos], feed_each_other=True)
    cos.meta[MOMENT_TAG] = Moment(1, 4)
    assert not may_fuse([sin], [cos], feed_each_other=True), "a copy stays in its phase"


# --- inductor ---------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Layers as in a transformer's feed-forward part, with a rotation that concatenates, and a loss over classes."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.Linear(width, 3 * width, bias=False) for _ in range(2)]) for _ in range(num_layers)]
        )
        self.down = nn.ModuleList([nn.Linear(3 * width, width, bias=False) for _ in range(num_layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (gate, up), down, norm in zip(self.layers, self.down, self.norms, strict=True):
            h = norm(x)
            first, second = h.chunk(2, -1)
            h = torch.cat([-second, first], -1) * 0.5 + h
            x = x + down(nn.functional.silu(gate(h)) * up(h))
        return nn.functional.cross_entropy(x, x.argmax(-1))


class Weighted(nn.Module):
    """Layers, and a loss over many classes with four weights per row: loops over a row read its gradient's row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(64, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(x)).log_softmax(-1)
        for column in range(4):
            scores = scores * x[:, column, None]
        return scores.sum()


class Attending(nn.Module):
    """Attention with a mask and dropout, whose softmax also makes a mask of rows: its loops do not hand on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(64, 192) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(128, 128, dtype=torch.bool).tril()
        for linear in self.inputs:
            parts = (part.view(4, 128, 4, 16).transpose(1, 2) for part in linear(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(*parts, attn_mask=causal, dropout_p=0.1)
            x = x + y.transpose(1, 2).reshape(512, 64)
        return x.square().sum()


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Caches may have the code already, and ask nobody."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize(
    ("make", "memory_budget", "tolerance"),
    [
        (lambda: Gated(4, 64), 0.6, 0.05),
        (lambda: Gated(4, 64), 0.35, 0.05),
        (Weighted, 0.9, 0.05),
        (Attending, 0.5, 0.15),
    ],
)
def test_peak_of_kernels_is_the_predicted_and_the_measured_one(
    make: Callable[[], nn.Module],
    memory_budget: float,
    tolerance: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks: list[int] = []

    def check(self: KernelCheck, compiled: CompiledHalf) -> None:
        assert self.promise is not None
        peaks.append(kernel_peak(describe_kernels(compiled), self.promise.held))

    monkeypatch.setattr(KernelCheck, "check", check)
    torch.manual_seed(0)
    model, x = make(), torch.randn(512, 64)
    options = {"memory_budget": memory_budget, "dump": str(tmp_path)}
    compiled = torch.compile(model, backend="remat", options=options, fullgraph=True)
    compiled(x).backward()
    parameters = list(model.parameters())
    clear_gradients(parameters)
    measured = activation_peak(lambda: compiled(x), parameters, counter="allocator").activation_bytes
    (file,) = tmp_path.glob("*.json")
    predicted = remat.Plan.load(file).peak.num_bytes
    assert len(peaks) == 2
    assert math.isclose(max(peaks), measured, rel_tol=0.01)
    assert math.isclose(predicted, measured, rel_tol=tolerance)


def claim(factor: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have kernels counted for more than they take; returns where the promises are noted."""
    promised: list[int] = []

    def excess_of(self: Promise, compiled: Kernels) -> Excess | None:
        promised.append(self.planned_bytes)
        num_bytes = int(factor * kernel_peak(compiled, self.held))
        return Excess(self.planned_bytes, num_bytes) if num_bytes > self.num_bytes else None

    monkeypatch.setattr(Promise, "excess_of", excess_of)
    return promised


@pytest.mark.usefixtures("no_caches")
def test_where_kernels_take_more_than_the_budget_one_plans_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised = claim(1.4, monkeypatch)
    torch.manual_seed(0)
    model, x = Gated(4, 64), torch.randn(512, 64)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    options = {"memory_budget": 0.7, "dump": str(tmp_path)}
    torch.compile(model, backend="remat", options=options, fullgraph=True)(x).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-4, atol=1e-5)
    (file,) = tmp_path.glob("*.json")  # of the plan that is run, and of no other
    plan = remat.Plan.load(file)
    assert len(set(promised)) > 1
    assert plan.budget_bytes is not None
    assert plan.peak.num_bytes == promised[-1] < promised[0]
    assert 1.4 * plan.peak.num_bytes <= 1.01 * plan.budget_bytes


@pytest.mark.usefixtures("no_caches")
@pytest.mark.parametrize("most_plans", [4, 1])
def test_budget_that_no_plan_is_compiled_within_is_an_error_or_takes_the_lowest_plan(
    most_plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MOST_PLANS", most_plans)
    claim(50.0, monkeypatch)
    model, x = Gated(2, 32), torch.randn(64, 32)
    compiled = torch.compile(model, backend="remat", options={"memory_budget": 0.9}, fullgraph=True)
    words = "inductor's kernels take more than it for each plan.*Inductor's kernels for the lowest plan take"
    with pytest.raises(Exception, match=rf"(?s)memory_budget=0\.9: {words}.*Give at least \d+ bytes") as caught:
        compiled(x)
    assert "InfeasibleBudget" in str(caught.value)
    torch._dynamo.reset()
    options = {"memory_budget": 0.9, "on_infeasible": "minimum"}
    with pytest.warns(UserWarning, match="Taking the lowest plan"):
        torch.compile(model, backend="remat", options=options, fullgraph=True)(x).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("no_caches")
def test_budget_that_an_error_names_is_enough_for_the_kernels_too() -> None:
    built = zoo.get("gpt2").build("tiny")
    batch, params = built.make_batch(0), list(built.model.parameters())

    def compiled(budget: int) -> Callable[[], torch.Tensor]:
        torch._dynamo.reset()
        how: dict[str, Any] = {"backend": "remat", "options": {"memory_budget": budget}, "fullgraph": True}
        return torch.compile(lambda: built.loss_fn(built.model, batch), **how)

    with pytest.raises(Exception, match="InfeasibleBudget") as caught:
        compiled(2048)()
    text = str(caught.value)
    assert "It is set by `" in text
    (least,) = re.findall(r"Give at least (\d+) bytes", text)
    assert f"Inductor's kernels for the lowest plan take {int(least) / 2**10:.2f} KiB ({least} bytes)" in text
    step = compiled(int(least))
    step().backward()
    assert activation_peak(step, params, counter="allocator").activation_bytes <= 1.02 * int(least)


@pytest.mark.usefixtures("no_caches")
def test_other_errors_of_a_compiler_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def broken(*about_kernels: list[Any]) -> list[int]:
        calls.append(len(about_kernels))
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(backend, "planned_order", broken)
    compiled = torch.compile(Gated(1, 32), backend="remat", options={"memory_budget": 0.9}, fullgraph=True)
    with pytest.raises(Exception, match="broken on purpose"):
        compiled(torch.randn(64, 32))
    assert len(calls) == 1, "planned again for nothing"


@pytest.mark.usefixtures("no_caches")
def test_kernels_of_an_unknown_kind_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "describe_kernels", lambda half: half.no_such_thing)
    compiled = torch.compile(Gated(1, 32), backend="remat", options={"memory_budget": 0.9}, fullgraph=True)
    with pytest.warns(UserWarning, match="cannot be said what inductor's kernels take .*no_such_thing"):
        compiled(torch.randn(64, 32)).backward()


@pytest.mark.usefixtures("no_caches")
def test_branches_of_a_condition_are_no_halves_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    promised = claim(1.0, monkeypatch)
    model = Gated(2, 32)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin().cos() * x.sum(0), lambda x: x.exp() - 1.0, (x,))
        return model(x + y)

    compiled = torch.compile(loss, backend="remat", options={"memory_budget": 0.9}, fullgraph=True)
    compiled(torch.randn(64, 32)).backward()
    assert len(promised) == 2, "forward and backward"


def test_a_partition_function_that_others_call_leaves_a_margin() -> None:
    budget = remat.partitioner(memory_budget=0.5).request.budget
    assert budget is not None
    assert budget.margin == 0.07
    budget = remat.partitioner(memory_budget=0.5, inner="aot_eager").request.budget
    assert budget is not None
    assert budget.margin == 0.0
