"""Python floats that change from step to step, and so become symbols, wherever they are read first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import remat

Mark = Callable[..., Any]


def unmarked(function: Any) -> Any:
    """Stand for `checkpoint_region` where there is to be no region."""
    return function


class Scaled(nn.Module):
    """A layer with floats for attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = self.offset = 0.0


def argument_of_two_calls(mark: Mark, layer: Scaled) -> Any:
    region = mark(lambda x, factor: x + layer.linear(x) * factor)
    return lambda x, factor: region(region(x, factor), factor)


def attribute_read_outside_later(mark: Mark, layer: Scaled) -> Any:
    region = mark(lambda x: layer.linear(x) * layer.factor)
    return lambda x, factor: region(region(x)) * layer.factor


def attributes_of_nested_regions(mark: Mark, layer: Scaled) -> Any:
    inner = mark(lambda x: layer.linear(x) * layer.factor)
    outer = mark(lambda x: inner(x) + layer.offset)
    return lambda x, factor: outer(x) * layer.factor + outer(x.sin()) * layer.offset


_factor = 0.0


def global_variable(mark: Mark, layer: Scaled) -> Any:
    region = mark(lambda x: layer.linear(x) * _factor)
    return lambda x, factor: region(region(x)) * _factor


def inside_of_containers(mark: Mark, layer: Scaled) -> Any:
    region = mark(lambda x, given: layer.linear(x) * given["factors"][0])
    return lambda x, factor: region(region(x, {"factors": [factor]}), {"factors": [factor]}) * factor


def computed_with(mark: Mark, layer: Scaled) -> Any:
    region = mark(lambda x, factor: layer.linear(x) * math.sqrt(factor) + math.floor(2 * factor))
    return lambda x, factor: region(region(x, factor), 2 * factor) * math.sqrt(factor)


PROGRAMS = [
    argument_of_two_calls,
    attribute_read_outside_later,
    attributes_of_nested_regions,
    global_variable,
    inside_of_containers,
    computed_with,
]


def gradients(make: Any, mark: Mark, **compiler: Any) -> list[torch.Tensor]:
    """Train some steps with a float that differs in each."""
    global _factor
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, found = Scaled(), []
    run = make(mark, layer)
    compiled = torch.compile(run, fullgraph=True, **compiler) if compiler else run
    for factor in (0.3, 0.4, 0.5):
        _factor = layer.factor = factor
        layer.offset = factor + 1
        x = torch.randn(4, 8, requires_grad=True)
        compiled(x, factor).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    return found


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "remat"])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_float_that_becomes_a_symbol(make: Any, compiler: str, dynamic: bool | None) -> None:
    options = {"options": {"inner": "aot_eager"}} if compiler == "remat" else {}
    found = gradients(make, remat.checkpoint_region, backend=compiler, dynamic=dynamic, **options)
    for grad, expected in zip(found, gradients(make, unmarked), strict=True):
        assert torch.equal(grad, expected)


def test_a_float_is_no_reason_to_compile_anew() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    gradients(argument_of_two_calls, remat.checkpoint_region, backend=counter)
    assert counter.frame_count == 2, "once for the first float, once for all"
