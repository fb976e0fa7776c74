"""Modules around modules: torch's checkpoint and offload wrappers by their names, over remat's engines.

    from remat.wrappers import apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper, unwrap

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    model.head = checkpoint_wrapper(model.head, policy=remat.policies.save_matmuls())
    model.tower = offload_wrapper(model.tower, offload="disk", offload_folder="/scratch/me")
    unwrap(model)

A wrapper passes attributes and indices on, and leaves no trace in state_dict keys, so that checkpoints fit wrapped and
plain models alike. It is a region: captured as one by `torch.compile`, with a name, a policy and a budget if given.
`remat.apply` marks modules without putting anything around them, and is the simpler choice for new code.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from remat.passes.torch_private import peek_functorch_stack, targets_of_wrap_policy
from remat.regions import policies
from remat.regions.marking import check_offload
from remat.regions.region import RegionCall, region_options

from ..eager import OffloadHooks, checkpoint

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "OffloadWrapper",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
    "unwrap",
]

_INNER = "_checkpoint_wrapped_module"  # torch's name: FSDP, torchtitan and others cut it out of parameter names
_PREFIX = f"{_INNER}."

AutoWrapPolicy = Callable[..., bool]


class CheckpointImpl(Enum):
    """Which kind of checkpointing a wrapper does when it is not compiled."""

    REENTRANT = auto()
    NO_REENTRANT = auto()


class ActivationWrapper(nn.Module, ABC):
    """A module around another one that does something about its activations, and otherwise is that one."""

    def __init__(self, mod: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = mod
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # What copies and pickles asks for special names, which are those of the wrapper or nobody's.
            if name == _INNER or (name.startswith("__") and name.endswith("__")):
                raise
            return getattr(self._checkpoint_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        inner: Any = self._checkpoint_wrapped_module
        return inner[key]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped module's parameters, by the names they have there."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(_PREFIX, ""), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The wrapped module's buffers, by the names they have there."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(_PREFIX, ""), buffer


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:  # noqa: ARG001
    """Name what a wrapper has put into a state_dict as if it were not there."""
    long = prefix + _PREFIX
    _rename(state, [(key, prefix + key.removeprefix(long)) for key in state if key.startswith(long)])
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        # Modules look for their version under their name with or without wrapper, whichever they are loaded into.
        inside = {key: value for key, value in versions.items() if f"{key}.".startswith(long)}
        versions |= {(prefix + f"{key}.".removeprefix(long)).rstrip("."): value for key, value in inside.items()}


def _add_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:  # noqa: ARG001
    """Name what is loaded into a wrapper as it is named inside; keys that know the wrapper already are left alone."""
    long = prefix + _PREFIX
    own = [key for key in state if key.startswith(prefix) and not key.startswith(long)]
    _rename(state, [(key, long + key.removeprefix(prefix)) for key in own])


def _rename(state: dict[str, Any], names: list[tuple[str, str]]) -> None:
    for old, new in names:
        state[new] = state.pop(old)


# ------------------------------------------------------------------------------------------------------ recomputation


class CheckpointWrapper(ActivationWrapper):
    """A module whose activations are dropped after forward and computed again in backward."""

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        super().__init__(mod)
        if checkpoint_fn is None and "use_reentrant" in checkpoint_fn_kwargs:
            is_reentrant = checkpoint_fn_kwargs.pop("use_reentrant")
            checkpoint_impl = CheckpointImpl.REENTRANT if is_reentrant else CheckpointImpl.NO_REENTRANT
        self.checkpoint_impl = checkpoint_impl
        self._traced_fn: RegionCall | None = None
        if checkpoint_fn is not None:
            self.checkpoint_fn: Callable[..., Any] = functools.partial(checkpoint_fn, **checkpoint_fn_kwargs)
        elif checkpoint_impl is CheckpointImpl.REENTRANT:
            self.checkpoint_fn = functools.partial(checkpoint, use_reentrant=True, **checkpoint_fn_kwargs)
            self._traced_fn = RegionCall(region_options(type(mod).__name__, checkpoint_fn_kwargs))
        elif "context_fn" in checkpoint_fn_kwargs:
            self.checkpoint_fn = functools.partial(checkpoint, use_reentrant=False, **checkpoint_fn_kwargs)
        else:
            name = checkpoint_fn_kwargs.pop("name", None) or type(mod).__name__
            self.checkpoint_fn = RegionCall(region_options(name, checkpoint_fn_kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module as a region."""
        inner = self._checkpoint_wrapped_module
        if self._traced_fn is not None and torch.compiler.is_dynamo_compiling():
            return self._traced_fn(inner, *args, **kwargs)  # the reentrant kind is a way to run, not another meaning
        if self.checkpoint_impl is CheckpointImpl.REENTRANT and kwargs:
            return self.checkpoint_fn(_with_keywords(inner, tuple(kwargs)), *args, *kwargs.values())
        return self.checkpoint_fn(inner, *args, **kwargs)

    def name_region(self, name: str) -> None:
        """Call the region by a name in plans and messages, unless it was given one."""
        made = self.checkpoint_fn
        if isinstance(made, RegionCall) and made.region.name == type(self._checkpoint_wrapped_module).__name__:
            self.checkpoint_fn = RegionCall(replace(made.region, name=name))


def _with_keywords(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A function that takes its last arguments by position: the reentrant kind knows no keywords."""

    def call(*args: Any) -> Any:
        first = len(args) - len(names)
        return function(*args[:first], **dict(zip(names, args[first:], strict=True)))

    return call


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Wrap a module so that its activations are computed again in backward.

    Keywords go to `checkpoint_fn`, which is called with the module and its arguments. Without one they are those of
    `torch.utils.checkpoint` (`preserve_rng_state`, `context_fn`, `use_reentrant`, `determinism_check`, `early_stop`,
    `debug`) and of `checkpoint_region` (`name`, `policy`, `memory_budget`, `offload`, `offload_folder`).
    """
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


# ------------------------------------------------------------------------------------------------------ offloading


class OffloadWrapper(ActivationWrapper):
    """A module whose saved activations wait in host memory, or in a file, until backward needs them.

    Parameters and buffers of the module stay where they are. On the CPU activations are in host memory already, and
    only `offload="disk"` moves them.
    """

    def __init__(
        self, mod: nn.Module, *, offload: str = "cpu", offload_folder: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(mod)
        check_offload(offload, offload_folder)
        options = {"policy": policies.offload_all(), "offload": offload, "offload_folder": offload_folder}
        self._traced_fn = RegionCall(region_options(type(mod).__name__, options))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        inner = self._checkpoint_wrapped_module
        if torch.compiler.is_dynamo_compiling():
            return self._traced_fn(inner, *args, **kwargs)
        if not torch.is_grad_enabled() or peek_functorch_stack() is not None:
            return inner(*args, **kwargs)  # nothing is saved, or transforms that allow no hooks
        with OffloadHooks([*inner.parameters(), *inner.buffers()], self._traced_fn.region.disk_folder):
            return inner(*args, **kwargs)


def offload_wrapper(
    module: nn.Module, *, offload: str = "cpu", offload_folder: str | os.PathLike[str] | None = None
) -> nn.Module:
    """Wrap a module so that what it saves for backward waits in host memory, or in a file in a folder."""
    return OffloadWrapper(module, offload=offload, offload_folder=offload_folder)


# ------------------------------------------------------------------------------------------------------ whole models


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Wrap the submodules of a model that `check_fn`, or else `auto_wrap_policy`, says; the model itself is not.

    The policy is one of `torch.distributed.fsdp.wrap`. A module that occurs in several places is wrapped once, and the
    wrapper stands in all of them.
    """
    if auto_wrap_policy is None:
        wrapping = _Wrapping(checkpoint_wrapper_fn, _policy_of(check_fn))
    elif callable(auto_wrap_policy):
        wrapping = _Wrapping(checkpoint_wrapper_fn, auto_wrap_policy)
    else:
        targets = targets_of_wrap_policy(auto_wrap_policy, model)
        if targets is None:
            raise ValueError(f"Expected {auto_wrap_policy} to be callable or be a pre-defined wrap policy")
        keywords = targets
        wrapping = _Wrapping(
            lambda module: checkpoint_wrapper_fn(module, **keywords[module]),
            _policy_of(lambda module: module in keywords),
        )
    wrapping.wrap_children(model, "")


def _policy_of(is_meant: Callable[[nn.Module], bool]) -> AutoWrapPolicy:
    """A predicate in the form of FSDP's policies, which are asked twice: whether to go into a module, and about it."""

    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
        return recurse or is_meant(module)

    return policy


class _Wrapping:
    """One walk over a model, children first; knows what became of every module it has seen."""

    def __init__(self, wrap: Callable[..., nn.Module], policy: AutoWrapPolicy) -> None:
        self._wrap, self._policy = wrap, policy
        self._seen: dict[nn.Module, tuple[nn.Module, int]] = {}

    def wrap_children(self, module: nn.Module, path: str) -> int:
        """Put wrappers below a module and return how many elements of parameters they are around."""
        num_elements = sum(parameter.numel() for parameter in module.parameters())
        if not self._policy(module=module, recurse=True, nonwrapped_numel=num_elements):
            return 0
        num_wrapped, children = 0, set()
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            new, num_new = self._replacement(child, f"{path}.{name}" if path else name)
            if new is not child:
                setattr(module, name, new)
            num_wrapped += 0 if child in children else num_new
            children.add(child)
        return num_wrapped

    def _replacement(self, module: nn.Module, path: str) -> tuple[nn.Module, int]:
        if module not in self._seen:
            num_elements = sum(parameter.numel() for parameter in module.parameters())
            self._seen[module] = module, 0  # a module may contain itself by way of others
            num_wrapped = self.wrap_children(module, path)
            found = module, num_wrapped
            # torch asks no more below a module that it was told not to go into.
            if self._policy(module=module, recurse=True, nonwrapped_numel=num_elements) and self._policy(
                module=module, recurse=False, nonwrapped_numel=num_elements - num_wrapped
            ):
                found = self._wrap(module), num_elements
                if isinstance(found[0], CheckpointWrapper):
                    found[0].name_region(path)
            self._seen[module] = found
        return self._seen[module]


def unwrap(module: nn.Module) -> nn.Module:
    """Take every wrapper of this file away, at any depth, and return the module that is left at the top."""
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            inner = child
            while isinstance(inner, ActivationWrapper):
                inner = inner._checkpoint_wrapped_module
            if inner is not child:
                setattr(part, name, inner)
    return module
