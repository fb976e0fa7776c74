"""Single ops with symbols for sizes: odd ones (of scalars, or without any memory of their own) run like others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OPS: dict[str, Op] = {
    "mm": lambda x, y: x @ y,
    "ldexp": lambda x, y: torch.ldexp(x, y.detach().round().to(torch.int32)),
    "log_softmax with dtype": lambda x, y: torch.log_softmax(x, 0, dtype=torch.float64) * y,
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x) * y,
    "solve_ex": lambda x, y: torch.linalg.solve_ex(x @ x.T + 9 * torch.eye(x.shape[0]), y).result,
    "masked.mean": lambda x, y: torch.masked.mean(x, 0, mask=y.detach() > 0),
    "sum of a scalar": lambda x, y: x.sum().sum(0) * y,
    "mean of a scalar": lambda x, y: torch.mean(x.sum(), 0, keepdim=True) + y.mean(),
    "views alone": lambda x, y: x.t().t()[:],
}


@pytest.mark.filterwarnings("ignore:memory_budget=0.9")  # the lowest plan of one op may be the only one
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("memory_budget", [None, 0.9])
def test_an_op_with_symbolic_sizes_has_eagers_gradients(name: str, inner: str, memory_budget: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2))
    op = OPS[name]
    expected = torch.autograd.grad(op(x, y).sum(), (x, y), allow_unused=True)
    options = {"inner": inner, "memory_budget": memory_budget, "on_infeasible": "minimum"}
    compiled = torch.compile(op, backend="remat", options=options, dynamic=True)
    found = torch.autograd.grad(compiled(x, y).sum(), (x, y), allow_unused=True)
    tolerance = {"rtol": 0, "atol": 0} if inner == "aot_eager" else {}
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **tolerance)
