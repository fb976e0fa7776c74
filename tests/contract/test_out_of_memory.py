"""Memory that runs out in forward, recomputation or backward: the region works again, and the error says what to do."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.eager_testing import MUST_SAVE
from torch import nn

import remat
from remat.eager.types.execution import local
from remat.passes.shared.out_of_memory import add_advice, advice_of, advising, is_out_of_memory
from remat.wrappers import checkpoint_wrapper, offload_wrapper

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Fuse:
    """Lets the n-th run of an op of ours fail."""

    when: int | None = None
    in_backward = False

    @classmethod
    def burn(cls) -> None:
        if cls.when is not None:
            cls.when -= 1
            if cls.when < 0:
                cls.when = None
                raise torch.OutOfMemoryError(MESSAGE)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Fuse.burn()
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        if Fuse.in_backward:
            raise torch.OutOfMemoryError(MESSAGE)
        return grad * 2


@pytest.fixture(autouse=True)
def fresh_fuse() -> Iterator[None]:
    Fuse.when, Fuse.in_backward = None, False
    yield
    Fuse.when, Fuse.in_backward = None, False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.dropout(self.first(x).sin(), 0.3)
        return self.norm(self.second(Fused.apply(h)).cos())


def save_some(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_SAVE if op is torch.ops.aten.addmm.default else False


KINDS = {
    "bare": checkpoint_wrapper,
    "policy": lambda net: checkpoint_wrapper(net, policy=save_some),
    "offload": lambda net: checkpoint_wrapper(net, policy=remat.policies.offload_all()),
    "nested": lambda net: checkpoint_wrapper(checkpoint_wrapper(net, name="inner"), name="outer"),
    "wrapper": offload_wrapper,
}


def run_step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(8, 16, requires_grad=True)
    model.zero_grad()
    model(x).sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


def live_tensors() -> dict[int, torch.Tensor]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # The generator's newest state is remembered from step to step, and its place is taken by the next one.
    return {id(tensor): tensor for tensor in tensors if not is_generator_state(tensor)}


def num_generator_states() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) and is_generator_state(thing) for thing in gc.get_objects())


def is_generator_state(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.dtype == torch.uint8 and tensor.shape == torch.get_rng_state().shape


PHASES = {"forward": {"when": 0}, "recomputation": {"when": 1}, "backward": {"in_backward": True}}


@pytest.mark.parametrize(
    ("kind", "phase"),
    [(kind, phase) for kind in KINDS for phase in PHASES if (kind, phase) != ("wrapper", "recomputation")],
)
def test_region_is_as_before_after_it_ran_out_of_memory(kind, phase) -> None:
    expected = run_step(KINDS[kind](Net()))
    model = KINDS[kind](Net())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_before = torch.get_rng_state()
    before, num_states = live_tensors(), num_generator_states()
    for option, value in PHASES[phase].items():
        setattr(Fuse, option, value)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run_step(model)
    Fuse.in_backward = False
    model.zero_grad()
    assert live_tensors().keys() <= before.keys(), "what the failed step held is gone"
    assert num_generator_states() <= num_states
    assert local.execution is None and not remat.is_recomputing()
    torch.set_rng_state(random_before)
    model.load_state_dict(state)  # batch norm has seen the batch
    result = run_step(model)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "phase", "pattern"),
    [
        (
            "bare",
            "forward",
            r"forward of region Net, which recomputes .*smaller regions.*memory_budget",
        ),
        ("bare", "recomputation", r"recomputation of region Net, which recomputes everything already"),
        ("policy", "recomputation", r"recomputation of region Net, whose policy save_some \(.*\) keeps 1\.00 KiB"),
        ("offload", "forward", r"forward of region Net, whose policy offload_all\(\) keeps"),
        ("nested", "forward", r"forward of region outer/inner, "),
    ],
)
def test_error_says_what_could_be_done(kind, phase, pattern) -> None:
    Fuse.when = PHASES[phase]["when"]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_step(KINDS[kind](Net()))
    advice = advice_of(caught.value)
    assert len(advice.splitlines()) == 1
    assert re.search(f"^remat: out of memory in the {pattern}", advice), advice


def test_other_errors_are_left_alone() -> None:
    @remat.checkpoint_region
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else") as caught:
        fails(torch.ones(1, requires_grad=True))
    assert advice_of(caught.value) == ""


def test_allocator_of_the_cpu_is_known() -> None:
    @remat.checkpoint_region
    def large(x: torch.Tensor) -> torch.Tensor:
        return x * torch.empty(2**60, dtype=torch.uint8)

    with pytest.raises(RuntimeError, match="allocate") as caught:
        large(torch.ones(1, requires_grad=True))
    assert is_out_of_memory(caught.value) and "forward of region" in advice_of(caught.value)


def test_python_without_notes_gets_the_advice_in_the_message() -> None:
    class Old(torch.OutOfMemoryError):
        def __getattribute__(self, name: str) -> Any:
            if name in ("add_note", "__notes__"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    error = Old(MESSAGE)
    add_advice(error, "try less")
    add_advice(error, "said already")
    assert str(error) == f"{MESSAGE}\nremat: try less"
    assert isinstance(error, torch.OutOfMemoryError)


@torch.library.custom_op("remat_test::fused", mutates_args=())
def fused(x: torch.Tensor, where: str) -> torch.Tensor:
    if where == "forward" or Fuse.in_backward:
        Fuse.burn()
    return x * 2


@fused.register_fake
def _(x: torch.Tensor, where: str) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("remat_test::fused", lambda ctx, grad: (fused(grad, "backward"), None))


@pytest.mark.parametrize("budget", [None, 0.8])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_compiled_step_names_the_next_budget_and_works_again(phase, budget) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return fused(x.sin().exp(), "forward").cos().exp().sin() * x

    x = torch.randn(1024, 256, requires_grad=True)
    options = {"inner": "aot_eager", "memory_budget": budget}
    compiled = torch.compile(function, backend="remat", options=options)
    (expected,) = torch.autograd.grad(compiled(x).sum(), x)
    Fuse.when, Fuse.in_backward = (0, False) if phase == "forward" else (1, True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.autograd.grad(compiled(x).sum(), x)
    advice = advice_of(caught.value)
    assert "compiled code, planned for an activation peak of" in advice
    assert 'options={"memory_budget": "' in advice and "KiB" in advice
    Fuse.when = None
    (again,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_inductor_names_the_next_budget(phase) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return fused(x.sin(), "forward").cos()

    x = torch.randn(64, 64, requires_grad=True)
    compiled = torch.compile(function, backend="remat")
    (expected,) = torch.autograd.grad(compiled(x).sum(), x)
    Fuse.when, Fuse.in_backward = (0, False) if phase == "forward" else (1, True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.autograd.grad(compiled(x).sum(), x)
    assert "The next cheaper plan" in advice_of(caught.value)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], expected)


def test_plan_that_is_not_known_leaves_a_fraction_to_try() -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        advising(fails, "compiled code", lambda: None)()
    assert '"memory_budget": 0.5' in advice_of(caught.value)
