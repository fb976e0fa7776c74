"""Run one training step under an engine with and without remat, and compare everything a user can see."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Program = Callable[..., Any]
Make = Callable[[], tuple[Program, tuple[Any, ...]]]


def recompute_is_free(call: object) -> float:
    """Price every recomputation at nothing, so that whatever may be recomputed is recomputed."""
    return 0.0


def recompute_is_ruinous(call: object) -> float:
    """Price every recomputation at days, so that whatever may be saved is saved."""
    return 1e6


@dataclass(frozen=True)
class Engine:
    """An inner compiler and a cost model: what `backend="remat"` is set to, and what it is compared with."""

    inner: str
    cost_model: Any = "roofline"
    inductor_options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.inner}-{getattr(self.cost_model, '__name__', self.cost_model)}"

    @property
    def is_exact(self) -> bool:
        """Whether the engine runs the same kernels whatever the split, so that results agree bit for bit."""
        return self.inner == "aot_eager"

    def compile(self, program: Program, **kwargs: Any) -> Program:
        """Compile with remat."""
        options = {"inner": self.inner, "cost_model": self.cost_model, **self.inductor_options}
        return torch.compile(program, backend="remat", options=options, **kwargs)

    def compile_without_remat(self, program: Program, **kwargs: Any) -> Program:
        """Compile with torch's own partitioner and the same compiler behind it."""
        if self.inductor_options:
            kwargs["options"] = dict(self.inductor_options)
        return torch.compile(program, backend=self.inner, **kwargs)

    def with_options(self, **options: Any) -> Engine:
        """The same engine with options of inductor's added, or itself where inductor is not used."""
        return Engine(self.inner, self.cost_model, options) if self.inner == "inductor" else self


_ENGINES = [
    Engine(inner, cost_model) for inner in ("aot_eager", "inductor") for cost_model in ("roofline", recompute_is_free)
]


def _params(is_slow: Callable[[Engine], bool]) -> list[Any]:
    return [
        pytest.param(engine, id=str(engine), marks=[pytest.mark.slow] if is_slow(engine) else []) for engine in _ENGINES
    ]


# Inductor spends seconds in the C++ compiler for each graph: only the programs that stress what differs between
# the engines run it by default.
every_engine = pytest.mark.parametrize("engine", _params(lambda engine: engine.inner == "inductor"))
every_engine_by_default = pytest.mark.parametrize("engine", _params(lambda engine: False))
aot_eager_engines = pytest.mark.parametrize("engine", _params(lambda engine: False)[:2])


@dataclass(frozen=True)
class Record:
    """What one training step leaves behind."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]
    generator: torch.Tensor


def identity(program: Program) -> Program:
    """Stand for eager execution where a compile function is expected."""
    return program


def take_step(compile_program: Callable[[Program], Program], make: Make, seed: int = 0) -> Record:
    """Build a program, compile it, run forward and backward once, and record the results."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    program, args = make()
    compiled = compile_program(program)
    torch.manual_seed(seed + 1)
    outputs = compiled(*args)
    # Numbers drawn between the passes shift the generator: a replay from the wrong place is then seen.
    torch.rand(7)
    loss = weighted_sum(outputs)
    if loss is not None:
        loss.backward()
    return Record(
        outputs=[_snapshot(leaf) for leaf in tree_leaves(outputs)],
        gradients={name: _snapshot(leaf.grad) for name, leaf in _leaves(program, args) if leaf.requires_grad},
        state=_state(program, args),
        generator=torch.get_rng_state(),
    )


def weighted_sum(outputs: Any) -> torch.Tensor | None:
    """Reduce every differentiable output to one loss whose gradient differs from element to element."""
    terms = [_weighted(leaf) for leaf in tree_leaves(outputs) if _is_differentiable(leaf)]
    return torch.stack(terms).sum() if terms else None


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _weighted(output: torch.Tensor) -> torch.Tensor:
    if output.is_complex():
        output = torch.view_as_real(output)
    if output.layout is not torch.strided:
        output = output.to_dense()
    if output.numel() == 0 or type(output) is not torch.Tensor:
        total = output.sum()
        return (total.a + 2 * total.b).double() if hasattr(total, "a") else total.double()
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64).reshape(output.shape)
    return (output * weights.to(output.dtype)).double().sum()


def _snapshot(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    if hasattr(value, "__tensor_flatten__"):
        return [_snapshot(getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    return value.detach().clone()


def _leaves(program: Program, args: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    leaves = [(f"args[{i}]", leaf) for i, leaf in enumerate(tree_leaves(args)) if isinstance(leaf, torch.Tensor)]
    leaves = [(name, leaf) for name, leaf in leaves if leaf.is_leaf]
    if isinstance(program, torch.nn.Module):
        leaves += list(program.named_parameters())
    return leaves


def _state(program: Program, args: Iterable[Any]) -> dict[str, Any]:
    state = {
        f"args[{i}]": _snapshot(leaf) for i, leaf in enumerate(tree_leaves(args)) if isinstance(leaf, torch.Tensor)
    }
    if isinstance(program, torch.nn.Module):
        state |= {name: _snapshot(buffer) for name, buffer in program.named_buffers()}
    return state


def assert_records_agree(
    actual: Record, expected: Record, *, exact: bool, check_generator: bool = True, **tolerance: float
) -> None:
    """Fail unless two steps gave the same outputs, gradients, state and, if asked, generator."""
    # Fused loops round transcendental functions of single precision apart by some 1e-5.
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5, **tolerance}
    for part in ("outputs", "gradients", "state"):
        torch.testing.assert_close(
            getattr(actual, part),
            getattr(expected, part),
            equal_nan=True,
            msg=lambda text, part=part: f"{part}: {text}",
            **tolerance,
        )
    if check_generator:
        assert torch.equal(actual.generator, expected.generator), "the generator stands elsewhere after the step"


def assert_step_agrees(engine: Engine, make: Make, *, random: bool = False, **compile_kwargs: Any) -> Record:
    """Fail unless remat's step equals the engine's own, and eager's where the program is not random.

    Eager draws other numbers than the compilers do for the same op, so a random program has only the engine's own
    step to be compared with.
    """
    compile_kwargs.setdefault("fullgraph", True)
    ours = take_step(lambda program: engine.compile(program, **compile_kwargs), make)
    theirs = take_step(lambda program: engine.compile_without_remat(program, **compile_kwargs), make)
    assert_records_agree(ours, theirs, exact=engine.is_exact)
    if not random:
        assert_agrees_with_eager(ours, make)
    return ours


def assert_step_agrees_with_eager(engine: Engine, make: Make) -> Record:
    """Fail unless remat's step equals eager's, where the engine without remat cannot be the judge."""
    ours = take_step(lambda program: engine.compile(program, fullgraph=True), make)
    assert_agrees_with_eager(ours, make)
    return ours


def assert_agrees_with_eager(ours: Record, make: Make) -> None:
    """Fail unless a recorded step equals the eager one up to rounding."""
    assert_records_agree(ours, take_step(identity, make), exact=False, check_generator=False)


class OpCounter(TorchDispatchMode):
    """Count the ops that run, by name without overload (`aten.mm` for both the functional and the out variant)."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(getattr(func, "overloadpacket", func))] += 1
        return func(*args, **(kwargs or {}))


def count_backward_ops(compile_program: Callable[[Program], Program], make: Make) -> collections.Counter[str]:
    """Run one step and count what its backward pass executes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    program, args = make()
    loss = weighted_sum(compile_program(program)(*args))
    assert loss is not None
    with OpCounter() as counter:
        loss.backward()
    return counter.counts


def detached_copy(args: Any) -> Any:
    """Copy nested arguments into fresh leaves with the same `requires_grad`."""

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return tree_map(copy_leaf, args)
