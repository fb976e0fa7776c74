"""Programs whose sizes change from call to call, or are known only once the data is there.

A program takes `mark`, `checkpoint_region` or its stand-in without effect, and returns a module. It is called with a
batch of any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat

aten = torch.ops.aten
WIDTH = 16
Mark = Callable[..., Any]
Compile = Callable[[nn.Module], Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class Program:
    """A module that is made anew for each engine, and what is special about it."""

    make: Callable[[Mark], nn.Module]
    is_random: bool = False
    """Draws numbers, other ones in eager than in compiled code."""
    is_unbacked: bool = False
    """Has sizes that only the data tells."""


PROGRAMS: dict[str, Program] = {}


def program(**facts: bool) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        PROGRAMS[make.__name__] = Program(make, **facts)
        return make

    return add


class Net(nn.Module):
    """Two linear layers, and a body that is written as a function."""

    def __init__(self, body: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x).pow(2).sum()

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


# ------------------------------------------------------------------------------------------------- sizes of inputs


@program()
def layers(mark: Mark) -> nn.Module:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = net.mlp(x)
        return x.softmax(-1)

    return Net(body)


@program()
def attention(mark: Mark) -> nn.Module:
    """Memory grows with the square of the rows."""

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            h = net.up(x)
            x = net.mlp((h @ h.t() / x.shape[0]).softmax(-1) @ x)
        return x

    return Net(body)


@program()
def sizes_in_arithmetic(mark: Mark) -> nn.Module:
    """Backward reads sizes and what is computed from them."""

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.up(x).tanh() * (x.shape[0] * 2 + 1) / (x.shape[0] + 3)
        half = x.shape[0] // 2
        low, high = h[:half], h[half:]
        mean = low.exp().mean(0) + high.cos().mean(0)
        return net.down(torch.cat([high, low, mean[None].expand(half + 1, -1)]))

    return Net(body)


@program()
def region(mark: Mark) -> nn.Module:
    inner = mark(lambda net, x: net.mlp(x).sin())

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return inner(net, inner(net, x).exp() / x.shape[0])

    return Net(body)


@program()
def policies(mark: Mark) -> nn.Module:
    first = mark(lambda net, x: net.mlp(x).sin(), policy=[aten.addmm.default, aten.mm.default])
    second = mark(
        lambda net, x: remat.name(net.mlp(x), "kept").sin().exp().tanh(), policy=remat.policies.save_names("kept")
    )

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return second(net, first(net, x)) * x.shape[0]

    return Net(body)


@program()
def nested_regions(mark: Mark) -> nn.Module:
    inner = mark(lambda net, x: net.mlp(x).sin(), policy=remat.policies.save_matmuls())
    outer = mark(lambda net, x: inner(net, inner(net, x).exp().view(-1, WIDTH)).tanh())

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return outer(net, outer(net, x))[: x.shape[0] - 1]

    return Net(body)


@program()
def shared_module_called_twice(mark: Mark) -> nn.Module:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = mark(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = x[: (x.shape[0] + 1) // 2]
            return self.part(self.part(x)).exp().sum() + self.part(half).sin().sum()

    return Shared()


@program(is_random=True)
def dropout_in_a_region(mark: Mark) -> nn.Module:
    inner = mark(lambda net, x: F.dropout(net.mlp(F.dropout(x, 0.3)), 0.2).sin())

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(inner(net, x), 0.4) * torch.rand(x.shape[0], 1)

    return Net(body)


# ------------------------------------------------------------------------------------------------- sizes of data


@program(is_unbacked=True)
def nonzero(mark: Mark) -> nn.Module:
    inner = mark(lambda net, x: net.mlp(x).sin())

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        index = (x[:, 0] > 0).nonzero().squeeze(-1)
        return inner(net, x.exp()[index]).tanh() * (index.shape[0] + 1)

    return Net(body)


@program(is_unbacked=True)
def nonzero_inside_a_region(mark: Mark) -> nn.Module:
    def select(net: Net, x: torch.Tensor) -> torch.Tensor:
        index = (x[:, 0] > 0).nonzero().squeeze(-1)
        return net.mlp(x.exp()[index]).sin()

    inner = mark(select)

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return inner(net, x).tanh()

    return Net(body)


@program(is_unbacked=True)
def masked_select(mark: Mark) -> nn.Module:
    inner = mark(lambda x: x.masked_select(x > 0.1).sin())

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return inner(net.mlp(x)).exp()

    return Net(body)


@program(is_unbacked=True)
def boolean_index(mark: Mark) -> nn.Module:
    inner = mark(lambda net, x: net.mlp(x.exp()[x[:, 0] > 0]).sin(), policy=remat.policies.save_matmuls())

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return inner(net, x).tanh()

    return Net(body)


@program(is_unbacked=True)
def item(mark: Mark) -> nn.Module:
    inner = mark(lambda net, x, n: net.mlp(x[:n]).sin() * n)

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        n = (x[:, 0] > 0).sum().item()
        torch._check(n >= 0)  # inductor wants to know, with and without remat
        torch._check(n <= x.shape[0])
        return inner(net, x.exp(), n).tanh()

    return Net(body)


@program(is_unbacked=True, is_random=True)
def dropout_of_unknown_size(mark: Mark) -> nn.Module:
    inner = mark(lambda net, x: F.dropout(net.mlp(x), 0.3).sin())

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        index = (x[:, 0] > 0).nonzero().squeeze(-1)
        return F.dropout(inner(net, x[index]), 0.2).exp()

    return Net(body)


# ------------------------------------------------------------------------------------------------- running


def unmarked(function: Any = None, **_: Any) -> Any:
    """Stand for `checkpoint_region` where there are to be no regions."""
    return function if function is not None else lambda inner: inner


@contextmanager
def data_dependence_captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def batch(num_rows: int) -> torch.Tensor:
    """Rows, the first element of the first positive and of the second negative."""
    x = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))
    x[0, 0], x[1, 0] = 1.0, -1.0
    return x.requires_grad_()


def train(compile_model: Compile, make: Callable[[Mark], nn.Module], mark: Mark, sizes: Any, marks: bool) -> list[Any]:
    """Loss and gradients of a step per size."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make(mark)
    compiled = compile_model(model)
    results: list[Any] = []
    for size in sizes:
        x = batch(size)
        if marks:
            torch._dynamo.mark_dynamic(x, 0)
        model.zero_grad()
        torch.manual_seed(size)
        loss = compiled(x)
        torch.rand(3)  # moves the generator, so that numbers replayed from here are seen
        loss.backward()
        results += [loss.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    return results
