"""Modes: dispatch, functions, fake tensors, tracing, functorch, forward-mode derivatives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_set_dispatch_key_excluded,
    _get_dispatch_mode,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C import Generator as Generator
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_function_stack as len_torch_function_stack
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack as peek_functorch_stack
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import _is_non_strict_tracing
from torch.overrides import _get_current_function_mode_stack as get_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

if TYPE_CHECKING:
    pass

__all__ = [
    "DeviceContext",
    "DisableTorchDispatch",
    "FakeTensor",
    "FunctionalTensor",
    "TorchDispatchMode",
    "alias_of",
    "fake_mode",
    "get_function_mode_stack",
    "is_any_autocast_enabled",
    "is_faking",
    "is_in_forward_ad",
    "is_tracing",
    "is_tracing_proxies",
    "len_torch_function_stack",
    "peek_functorch_stack",
    "pop_mode",
    "push_mode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "without_modes",
]


def without_modes() -> AbstractContextManager[Any]:
    """Leave fake-tensor and tracing modes for a while, so that real tensors can be made and run."""
    return _disable_current_modes()


def fake_mode() -> Any:
    """A context in which tensors are made without memory, on whatever device they say they are."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


def push_mode(mode: TorchDispatchMode) -> tuple[bool, bool]:
    """Enter a dispatch mode that lets compilers be; return what `pop_mode` needs.

    The same as the mode's own `__enter__`, without its three queues for modes that are entered several times.
    """
    flags = _python_dispatch._is_in_torch_dispatch_mode, _python_dispatch._is_in_non_infra_torch_dispatch_mode
    _python_dispatch._is_in_torch_dispatch_mode = _python_dispatch._is_in_non_infra_torch_dispatch_mode = True
    _push_on_torch_dispatch_stack(mode)
    return flags


def pop_mode(flags: tuple[bool, bool]) -> None:
    """Leave the innermost dispatch mode."""
    _python_dispatch._is_in_torch_dispatch_mode, _python_dispatch._is_in_non_infra_torch_dispatch_mode = flags
    _pop_torch_dispatch_stack(None)


_COUNTS_VERSIONS = DispatchKey.ADInplaceOrView


_detach = torch.Tensor.detach


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without history that shares the version counter, also inside of a mode's dispatch.

    There, the layer that counts versions is switched off, and an alias made without it would count for itself.
    """
    if not _dispatch_tls_is_dispatch_key_excluded(_COUNTS_VERSIONS):
        return _detach(tensor)
    _dispatch_tls_set_dispatch_key_excluded(_COUNTS_VERSIONS, False)
    try:
        return _detach(tensor)
    finally:
        _dispatch_tls_set_dispatch_key_excluded(_COUNTS_VERSIONS, True)


_PROXY = _TorchDispatchModeKey.PROXY  # looked up once: the engine asks in every region


def is_in_forward_ad() -> bool:
    """True inside of `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


def is_tracing_proxies() -> bool:
    """True while a compiler records ops into an FX graph; a non-strict trace wants eager's ops instead."""
    return _len_torch_dispatch_stack() != 0 and is_tracing() and not _is_non_strict_tracing()


def is_tracing() -> bool:
    """True while ops are being recorded into an FX graph by anybody."""
    # How many modes there are is quicker to ask for, and mostly there is none.
    return _len_torch_dispatch_stack() != 0 and _get_dispatch_mode(_PROXY) is not None


def is_faking() -> bool:
    """True while tensors stand for values that are not there: a compiler looks at the program."""
    if _len_torch_dispatch_stack() == 0:  # as it mostly is
        return False
    kinds = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)
    return any(_get_dispatch_mode(kind) is not None for kind in kinds)
