"""`@checkpoint_region`: mark code whose activations are to be dropped and recomputed, by a policy.

`call_region` is the joint: the one place where a call of marked code is handed to an engine, the eager one or, while
Dynamo traces, the operator that carries the region into the graph.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from remat.eager import is_recomputing
from remat.passes.torch_private import MODULE_CALL_CODES, constant_in_graphs
from remat.regions.carrier import operator_of
from remat.regions.engines import Runner, runner_of
from remat.regions.marking import check_markable, check_options

from ..passes.shared import Policy
from .region_options import RegionOptions

if TYPE_CHECKING:
    pass

__all__ = ["RegionOptions", "checkpoint_region", "is_recomputing"]

F = TypeVar("F", bound=Callable[..., Any])


_OPTION_NAMES = tuple(option.name for option in fields(RegionOptions))


@overload
def checkpoint_region(function: F) -> F: ...
@overload
def checkpoint_region(
    *,
    name: str | None = None,
    policy: Policy | None = None,
    memory_budget: Any = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    debug: bool = False,
    offload: str = "cpu",
    offload_folder: str | os.PathLike[str] | None = None,
) -> Callable[[F], F]: ...
def checkpoint_region(function: Any = None, *, name: str | None = None, **options: Any) -> Any:
    """Mark a function, method or module: what it computes is dropped after forward, recomputed in backward.

    Without a policy everything is recomputed. A module stays the module it is; its `forward` becomes the region. What
    a policy offloads waits in host memory, or with `offload="disk"` in a file in `offload_folder`.
    """
    if function is None:
        if not torch.compiler.is_dynamo_compiling():
            check_options(name, options, _OPTION_NAMES)
        return functools.partial(checkpoint_region, name=name, **options)
    if torch.compiler.is_dynamo_compiling():
        return _mark_while_traced(function, name, options)
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(checkpoint_region(name=name, **options)(function.__func__))
    check_markable(function)
    region = region_options(name or _default_name(function), options)
    if isinstance(function, nn.Module):
        return _mark_module(function, region)
    return _mark_function(function, region)


def region_options(name: str, options: dict[str, Any]) -> RegionOptions:
    """What was said about a region, with options that were checked, or an error that says which one is wrong."""
    check_options(name, options, _OPTION_NAMES)
    if options.get("offload_folder") is not None:
        options = {**options, "offload_folder": os.path.abspath(options["offload_folder"])}
    return RegionOptions(name=name, **options)


def _default_name(function: Any) -> str:
    if isinstance(function, nn.Module):
        return type(function).__name__
    return getattr(function, "__qualname__", type(function).__name__)


def _mark_function(function: Any, region: RegionOptions) -> Any:
    run = runner_of(region)

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        # As `call_region`, without its step on Python's stack: regions nest.
        if torch.compiler.is_dynamo_compiling():
            return operator_of(region)(function, *args, **kwargs)
        return run(function, args, kwargs)

    return marked


def _mark_module(module: nn.Module, region: RegionOptions) -> nn.Module:
    """Make a module's forward a region; type, parameters, hooks and state_dict keys stay as they are."""
    module.forward = RegionForward(module, region)
    return module


class RegionForward:
    """The `forward` of a marked module: an attribute of the module that `remove_region` takes away again.

    It knows its module weakly, so that the two do not keep each other alive, and goes along when the module is copied
    or pickled.
    """

    def __init__(self, module: nn.Module, region: RegionOptions) -> None:
        own = module.__dict__.get("forward", _NO_FORWARD)
        self.__setstate__({"module": module, "region": region, "own": own})

    @property
    def __wrapped__(self) -> Any:
        """The forward without a region, bound to its module; what `inspect.signature` looks at."""
        if self.own is not _NO_FORWARD:
            return self.own
        module = self.module()
        assert module is not None, "the module is gone, and this was its attribute"
        return type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as a region."""
        if torch.compiler.is_dynamo_compiling() and self.own is _NO_FORWARD:
            # After a graph break Dynamo takes a bound method for the attribute of that name, which is this object.
            module: Any = self.module()
            return call_region(functools.partial(type(module).forward, module), args, kwargs, self.region, self.run)
        if torch.compiler.is_dynamo_compiling():
            return call_region(self.own, args, kwargs, self.region, self.run)
        return call_region(self._forward_of_caller(sys._getframe(1)), args, kwargs, self.region, self.run)

    def _forward_of_caller(self, frame: FrameType) -> Any:
        """Return the forward of the module that is being called: a shallow copy has this object too."""
        if self.own is _NO_FORWARD and frame.f_code in MODULE_CALL_CODES:
            module = frame.f_locals["self"]
            if module.__dict__.get("forward") is self:
                return type(module).forward.__get__(module)
        return self.__wrapped__

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module(), "region": self.region, "own": self.own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module: weakref.ref[nn.Module] = weakref.ref(state["module"])
        self.region: RegionOptions = state["region"]
        self.own: Any = state["own"]
        self.run = runner_of(self.region)


class _NoForward(Enum):
    """Says that a module had no `forward` of its own, only its class's."""

    NO_FORWARD = "the class's"


_NO_FORWARD = _NoForward.NO_FORWARD


def region_of_module(module: nn.Module) -> RegionOptions | None:
    """Return what was said about a module's region; None if it is not marked."""
    forward = module.__dict__.get("forward")
    return forward.region if isinstance(forward, RegionForward) else None


def remove_region(module: nn.Module) -> None:
    """Undo the marking of a module."""
    forward = module.__dict__["forward"]
    assert isinstance(forward, RegionForward), "only a marked module has one"
    if forward.own is _NO_FORWARD:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward.own


class RegionCall:
    """Calls functions as regions, in the manner of `torch.utils.checkpoint`; copied and pickled by its options."""

    def __init__(self, region: RegionOptions) -> None:
        self.region = region
        self.run = runner_of(region)

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function as a region."""
        return call_region(function, args, kwargs, self.region, self.run)

    def __reduce__(self) -> tuple[Any, ...]:
        return RegionCall, (self.region,)


def call_region(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: RegionOptions, run: Runner
) -> Any:
    """Hand a call of marked code to an engine."""
    if torch.compiler.is_dynamo_compiling():
        return operator_of(region)(function, *args, **kwargs)
    return run(function, args, kwargs)


def _mark_while_traced(function: Any, name: str | None, options: dict[str, Any]) -> Any:
    """Mark a function inside code that Dynamo traces: the operator is all there is to it."""
    if name is None:
        # Dynamo knows a function's plain name only.
        name = type(function).__name__ if isinstance(function, nn.Module) else function.__name__
    operator = operator_of_options(name, **options)

    def marked(*args: Any, **kwargs: Any) -> Any:
        return operator(function, *args, **kwargs)

    return marked


@constant_in_graphs
def operator_of_options(name: str, **options: Any) -> Any:
    """Return the operator of a region that is marked while Dynamo traces."""
    return operator_of(region_options(name, options))
