"""The reentrant variant: forward without a graph; in backward a second forward with its own backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from remat.eager.state import rng
from remat.passes.torch_private import is_full_backward

from ..state import (
    Ambient,
    RenormReplay,
    WatchedState,
    generators_of,
    is_in_force,
    reach,
    renormed_twice,
    replayed,
    restored,
)
from ..types import local


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs with every tensor cut off its history, still asking for grad where it did."""
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"Only tuple of tensors is supported. Got Unsupported input type: {type(inputs).__name__}")
    return tuple(
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for value in inputs
    )


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn if no tensor among the inputs asks for grad, since then none will flow."""
    if not any(value.requires_grad for value in inputs if isinstance(value, torch.Tensor)):
        warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=2)


class CheckpointFunction(torch.autograd.Function):
    """A region as one node of the graph: `apply(function, preserve_rng_state, *args)`."""

    @staticmethod
    def forward(ctx: Any, run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Run the function without a graph and keep its arguments."""
        check_backward_validity(args)
        reached = reach(run_function, args)
        ctx.run_function = run_function
        ctx.ambient = Ambient.current()
        ctx.rng = rng.RngSnapshot(rng.accelerator_devices(args), generators_of(reached)) if preserve_rng_state else None
        ctx.state = WatchedState(reached, run_function) if reached.modules or reached.tensors else None
        ctx.tensor_positions = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(args[i] for i in ctx.tensor_positions))
        try:
            with torch.no_grad():
                outputs = run_function(*args)
        except BaseException:
            if ctx.state is not None:
                ctx.state.end_forward()
            raise
        if ctx.rng is not None:
            ctx.rng.seal()
        if ctx.state is not None:
            ctx.state.seal()
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the function again, with a graph, and backward through that."""
        if not is_full_backward():
            raise RuntimeError(
                "the reentrant variant of torch.utils.checkpoint is incompatible with .grad() and with "
                "backward's "
                "`inputs` argument: it cannot tell which gradients are wanted. Pass use_reentrant=False."
            )
        inputs = list(ctx.others)
        for position, tensor in zip(ctx.tensor_positions, ctx.saved_tensors, strict=True):
            inputs[position] = tensor
        detached = detach_variable(tuple(inputs))
        outputs = _replay(ctx, detached)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        wanted = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=False)
            if isinstance(out, torch.Tensor) and out.requires_grad
        ]
        if not wanted:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
        return None, None, *(x.grad if isinstance(x, torch.Tensor) else None for x in detached)


def _replay(ctx: Any, args: tuple[Any, ...]) -> Any:
    with ExitStack() as stack:
        stack.enter_context(rng.replayed(ctx.rng))
        if not is_in_force(ctx.ambient):
            stack.enter_context(restored(ctx.ambient))
        copies = ctx.state.buffers.copies() if ctx.state is not None and ctx.state.buffers is not None else None
        if copies:
            stack.enter_context(replayed(copies))
        if ctx.state is not None and ctx.state.renormed:
            stack.enter_context(RenormReplay(ctx.state.renormed, renormed_twice))
        stack.enter_context(torch.enable_grad())
        local.reentrant_depth += 1
        try:
            return ctx.run_function(*args)
        finally:
            local.reentrant_depth -= 1
