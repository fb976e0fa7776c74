"""Process groups, collectives, and wrap policies of FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import _ops
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_key_parse,
    _ExcludeDispatchKeyGuard,
    _IncludeDispatchKeyGuard,
)
from torch._C import Generator as Generator
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

if TYPE_CHECKING:
    pass

__all__ = [
    "completed_work",
    "default_store",
    "has_process_group",
    "targets_of_wrap_policy",
    "unwatched_collectives",
    "wait_for",
    "watch_collectives",
    "watched_collectives",
]


if torch.distributed.is_available():
    from torch.distributed import distributed_c10d

    _distributed: Any = distributed_c10d
else:
    _distributed = None


def targets_of_wrap_policy(policy: Any, model: torch.nn.Module) -> dict[torch.nn.Module, dict[str, Any]] | None:
    """The modules that a policy object of FSDP's names, with keywords for each; None for any other object."""
    from torch.distributed.fsdp.wrap import _Policy

    if not isinstance(policy, _Policy):
        return None
    return policy._run_policy(model, ignored_modules=set(), root_kwargs={})


_WATCH_KEY_NAME = "TESTING_ONLY_GenericMode"


_watch_libraries: list[Any] = []
"""Registrations last as long as these objects."""


def watch_collectives(namespaces: Iterable[str], kernel: Callable[..., Any]) -> None:
    """Have `kernel(op, *args, **kwargs)` called instead of every op of some libraries, where they are watched.

    A dispatch mode would do the same at some microseconds per op of any kind; this costs other ops nothing.
    """
    fallback: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallback.fallback(torch.library.fallthrough_kernel, _WATCH_KEY_NAME)
    _watch_libraries.append(fallback)
    _let_higher_order_ops_pass(_dispatch_key_parse(_WATCH_KEY_NAME))
    wanted = frozenset(namespaces)
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in wanted:
            op = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
            full_name = f"{name}.{schema.overload_name}" if schema.overload_name else name
            library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            library.impl(full_name, partial(kernel, op), _WATCH_KEY_NAME)
            _watch_libraries.append(library)


def _let_higher_order_ops_pass(key: DispatchKey) -> None:
    """Let ops of higher order, those that are still to come included, take no notice of a dispatch key."""
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for op in _ops._higher_order_ops.values():
        op.fallthrough(key)  # type: ignore[no-untyped-call]


def watched_collectives() -> AbstractContextManager[Any]:
    """Hand collectives to the kernel that watches them, on this thread."""
    return _IncludeDispatchKeyGuard(_dispatch_key_parse(_WATCH_KEY_NAME))


def unwatched_collectives() -> AbstractContextManager[Any]:
    """Run collectives as they are."""
    return _ExcludeDispatchKeyGuard(DispatchKeySet(_dispatch_key_parse(_WATCH_KEY_NAME)))


def default_store() -> Any:
    """A part of the store that the ranks of torch.distributed's default group share, for remat alone.

    None where there is none (MPI), and for a pretended group (backend "fake"), whose store keeps nothing.
    """
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, get_backend

    store: Any = _get_default_store()
    return None if store is None or "fake" in str(get_backend()) else PrefixStore("remat", store)


def completed_work() -> Any:
    """The handle of a collective that is done, as c10d's ops return it."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def wait_for(work: Any) -> None:
    """Wait for an asynchronous collective, given what its op returned."""
    from torch._C._distributed_c10d import Work

    (work if isinstance(work, Work) else Work.unbox(work)).wait()


def has_process_group() -> bool:
    """True if this process can communicate with others.

    The same as `torch.distributed.is_initialized`, which takes four calls, for who asks in every region.
    """
    return _distributed is not None and _distributed._world.default_pg is not None
