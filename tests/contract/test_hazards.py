"""Programs on which a partitioner goes wrong without a sound: writes in backward, layouts, custom functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness import Engine, aot_eager_engines, assert_step_agrees_with_eager
from torch import nn
from torch.utils.checkpoint import checkpoint


def vector() -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 4).requires_grad_()


class WithBuffer(nn.Module):
    """A module whose forward is given, with one buffer."""

    def __init__(self, body: Any, buffer: torch.Tensor) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("buffer", buffer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x, self.buffer)


class CountsInBackward(torch.autograd.Function):
    """Its gradient is a forward value that was computed from a buffer, and backward changes that buffer."""

    @staticmethod
    def forward(ctx, x, buffer):
        value = x * buffer
        ctx.save_for_backward(value)
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (value,) = ctx.saved_tensors
        ctx.buffer.add_(1)
        return value * 2, None


@aot_eager_engines
def test_gradient_is_computed_before_backward_overwrites_what_it_reads(engine: Engine) -> None:
    def make() -> Any:
        return WithBuffer(lambda x, b: CountsInBackward.apply(x, b) * 3, torch.full((4,), 2.0)), (vector(),)

    assert_step_agrees_with_eager(engine, make)


class HalvesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer):
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.buffer.mul_(0.5)
        return grad * x, None


@aot_eager_engines
def test_buffer_that_both_passes_change_ends_up_right(engine: Engine) -> None:
    def body(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return HalvesInBackward.apply(x.sin(), buffer)

    assert_step_agrees_with_eager(engine, lambda: (WithBuffer(body, torch.ones(4)), (vector(),)))


@pytest.mark.parametrize(
    "make_buffer",
    [
        pytest.param(lambda: torch.arange(32.0).reshape(8, 4)[1:5], id="offset"),
        pytest.param(lambda: torch.arange(32.0).reshape(4, 8)[:, ::2], id="gaps"),
        pytest.param(lambda: torch.arange(16.0).reshape(4, 4).t(), id="transposed"),
    ],
)
@aot_eager_engines
def test_view_by_strides_of_an_overwritten_buffer_reads_its_old_contents(engine: Engine, make_buffer: Any) -> None:
    def body(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        strided = buffer.as_strided((4,), (2,), 3).sin()
        shifted = buffer.as_strided((4,), (1,), 5) + x
        y = (x * strided).sin() * (x + buffer).cos() * shifted
        buffer.add_(1)
        return y

    assert_step_agrees_with_eager(engine, lambda: (WithBuffer(body, make_buffer()), (vector(),)))


@torch.library.custom_op("remat_tests::increment_", mutates_args=("x",))
def increment_(x: torch.Tensor) -> None:
    CALLS.append("increment")
    x.add_(1)


CALLS: list[str] = []


class IncrementsForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        changed = x.clone()
        increment_(changed)
        ctx.save_for_backward(changed)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (changed,) = ctx.saved_tensors
        return grad * changed


class IncrementsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        changed = x.clone()
        increment_(changed)
        return grad * changed


@pytest.mark.parametrize("function", [IncrementsForBackward, IncrementsInBackward])
@aot_eager_engines
def test_op_that_writes_for_backward_only_runs_once_and_in_its_own_pass(engine: Engine, function: Any) -> None:
    assert_step_agrees_with_eager(engine, lambda: (lambda x: function.apply(x.sin()).exp(), (vector(),)))

    torch._dynamo.reset()
    x = vector()
    CALLS.clear()
    output = engine.compile(lambda x: function.apply(x.sin()).exp(), fullgraph=True)(x)
    in_forward = len(CALLS)
    output.sum().backward()
    assert (in_forward, len(CALLS)) == ((1, 1) if function is IncrementsForBackward else (0, 1))


class SortsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.sort().values + x.argmax()


@aot_eager_engines
def test_custom_backward_may_sort_what_a_checkpointed_region_recomputes(engine: Engine) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: SortsInBackward.apply(y.sin()).exp(), x, use_reentrant=False).cos()

    assert_step_agrees_with_eager(engine, lambda: (program, (vector(),)))


@torch.library.custom_op("remat_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(length: int) -> torch.Tensor:
    return torch.rand(length)


@noise.register_fake
def _(length: int) -> torch.Tensor:
    return torch.empty(length)


@aot_eager_engines
def test_random_op_that_names_no_device_is_kept(engine: Engine) -> None:
    assert_step_agrees_with_eager(engine, lambda: (lambda x: (x.sin() * noise(4)).exp(), (vector(),)))
