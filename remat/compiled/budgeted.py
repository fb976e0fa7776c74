"""Eager regions with a memory budget: traced once per input signature, planned, and run by the plan, op by op.

Deciding what to keep under a budget takes the whole region with its backward, which eager never sees. So the region is
captured with fake tensors, its joint graph is planned as `backend="remat"` plans it, with the region's budget as that
of the graph, and the two halves are run with the kernels that eager would run.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ..eager import is_in_region
from ..passes.budgets import LOWEST_PLAN_OPTION
from ..passes.shared import InfeasibleBudget, RematError, causes_of
from ..passes.torch_private import (
    is_faking,
    is_in_forward_ad,
    peek_functorch_stack,
    program_fails,
    tree_flatten,
    untraced_line,
)
from ..regions import Runner, operator_of, untraceable
from .backend import op_by_op
from .watching import MakeWatcher

if TYPE_CHECKING:
    from ..regions import RegionOptions


MAX_SIGNATURES = 64
"""How many input signatures a region keeps plans for; the one that was used longest ago goes first."""


class PlannedRegion:
    """Runs a region by plans for its budget, one per input signature."""

    def __init__(self, region: RegionOptions, unplanned: Runner, watch: MakeWatcher) -> None:
        self.region, self.unplanned, self.watch = region, unplanned, watch
        self.compiled: OrderedDict[Any, Callable[..., Any]] = OrderedDict()

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function by its plan, made now if there is none yet."""
        if not torch.is_grad_enabled() or peek_functorch_stack() is not None:
            return function(*args, **kwargs)  # as regions without a budget do: nothing is kept, or nothing can be
        if is_faking() or is_in_forward_ad():
            # Somebody else's trace has no memory to bound, and compiled code has no forward-mode derivatives.
            return self.unplanned(function, args, kwargs)
        try:
            out = self._compiled_for(args, kwargs)(function, args, kwargs)
            _explain_double_backward(self.region, _nodes_of(out) - _nodes_of((args, kwargs)))
            return out
        except Exception as error:
            explained = _explained(self.region, error)
            if explained is None:
                raise
            if any(program_fails(cause) for cause in causes_of(error)):
                self.unplanned(function, args, kwargs)  # raises the program's own error, as its callers expect
            raise explained from error

    def _compiled_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        # A region around this one may keep results for its own backward; they must stay as they are.
        overwrites = not is_in_region()
        key = overwrites, _signature(args, kwargs)
        if key not in self.compiled:
            self.compiled[key] = _compile(self.region, overwrites, self.watch)
        self.compiled.move_to_end(key)
        if len(self.compiled) > MAX_SIGNATURES:
            self.compiled.popitem(last=False)
        return self.compiled[key]


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What tells apart inputs that need plans of their own; the compiler's guards check everything else."""
    leaves, spec = tree_flatten((args, kwargs))
    return spec, tuple(_described(leaf) for leaf in leaves)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


def _compile(region: RegionOptions, overwrites: bool, watch: MakeWatcher) -> Callable[..., Any]:
    """Make a callable that plans the region when it is first called."""
    not_compiled = (
        f"region {region.name} has memory_budget={region.memory_budget!r}, which takes a plan, and a plan a trace by "
        "torch.compile, which is switched off here (TORCHDYNAMO_DISABLE, torch.compiler.set_stance, or a dispatch mode "
        "that compilers cannot look into). Leave out memory_budget and say by a policy what is kept."
    )
    # The graph has the budget, so the region inside must not have it once more.
    inner = operator_of(replace(region, memory_budget=None))

    def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise RematError(not_compiled)
        return inner(function, *args, **kwargs)

    # Compilers count how often they compile a code object; each plan has its own.
    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    backend = functools.partial(op_by_op, memory_budget=region.memory_budget, overwrites=overwrites, watch=watch)
    return torch.compile(own, backend=backend, fullgraph=True, dynamic=False)


class _NoDoubleBackward(torch.autograd.Function):
    """Passes a gradient on, and raises if a backward comes back through it."""

    @staticmethod
    def forward(ctx: Any, message: str, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient itself."""
        ctx.message = message
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        """Say what the compiler's own error does not: which region, and what to do."""
        raise RematError(ctx.message)


def _nodes_of(values: Any) -> set[Any]:
    """The graph nodes of compiled code that made the tensors among some values."""
    nodes = [leaf.grad_fn for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]
    return {node for node in nodes if node is not None and node.name() == "CompiledFunctionBackward"}


def _explain_double_backward(region: RegionOptions, nodes: set[Any]) -> None:
    """Let a backward through the gradients of a planned region raise an error that names it."""
    message = (
        f"region {region.name} has memory_budget={region.memory_budget!r}: its plan is for one backward, and there is "
        "none for a backward through its gradients (create_graph=True). Leave out memory_budget and say by a policy "
        "what is kept: such regions have double backward."
    )

    def guard(grads: tuple[Any, ...], _: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():  # as it is in backward without create_graph
            return None
        return tuple(_NoDoubleBackward.apply(message, g) if _has_history(g) else g for g in grads)  # type: ignore[no-untyped-call]

    for node in nodes:
        node.register_hook(guard)


def _has_history(grad: Any) -> bool:
    return isinstance(grad, torch.Tensor) and grad.requires_grad


def _explained(region: RegionOptions, error: Exception) -> RematError | None:
    """What went wrong in terms of the region; None for errors that are the program's own."""
    own = next((cause for cause in causes_of(error) if isinstance(cause, RematError)), None)
    if isinstance(own, InfeasibleBudget):
        advice = f'leave the region to torch.compile(..., backend="remat"), whose option {LOWEST_PLAN_OPTION}'
        return InfeasibleBudget(
            f"region {region.name}: {own}".replace(f"set {LOWEST_PLAN_OPTION} to take", f"{advice} takes")
        )
    if own is not None:
        return own
    found = [line for cause in causes_of(error) if (line := untraced_line(cause)) is not None]
    # Errors are wrapped in others on their way up: the one that knows the line tells most.
    return RematError(untraceable(region, *max(found, key=lambda line: bool(line[0])))) if found else None
