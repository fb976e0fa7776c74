"""Every name of `torch.utils.checkpoint`, with the same signatures, over remat's engine.

Code written for torch runs after changing the import. Where torch refuses (several backwards through a selective
region, say) this works; where torch is silently wrong (an argument changed in place) this raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy
from torch.utils.checkpoint import checkpoint as _traced_checkpoint

from remat.eager.torch_api.groups import GraphExecGroup
from remat.eager.torch_api.reentrant import CheckpointFunction, check_backward_validity, detach_variable
from remat.eager.torch_api.sequential import split_in_segments

from ...passes.shared import SelectiveCheckpointContext, normalise_policy
from ..calls import cached_spec, noop_context_fn, run_region
from ..selective import OnMutation, Recorder, Replayer
from ..state import DefaultDeviceType, get_device_states, set_device_states
from ..types import SAC_IGNORED_OPS, CheckpointError, set_checkpoint_debug_enabled, set_checkpoint_early_stop

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]

_USE_REENTRANT_TIP = (
    "the use_reentrant parameter should be passed explicitly. torch's default is still True, and is kept "
    "here; "
    "use_reentrant=False is recommended: it supports keyword arguments, autograd.grad and nesting."
)


_USUAL = cached_spec(preserve_rng_state=True, determinism_check="default", debug=False, early_stop=True)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function without keeping its activations; backward runs it again to have them."""
    if use_reentrant is None:
        warnings.warn(f"torch.utils.checkpoint: {_USE_REENTRANT_TIP}", stacklevel=2)
        use_reentrant = True
    if not use_reentrant and is_dynamo_compiling():
        # Dynamo records this function of torch's as a region of its graph; it is not run.
        return _traced_checkpoint(
            function,
            *args,
            use_reentrant=False,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            **({} if context_fn is noop_context_fn else {"context_fn": context_fn}),
            **kwargs,
        )
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if use_reentrant:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        if context_fn is not noop_context_fn or debug is not False:
            raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
        return CheckpointFunction.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]
    if preserve_rng_state is True and determinism_check == "default" and debug is False and early_stop is True:
        spec = _USUAL
    else:
        spec = cached_spec(preserve_rng_state, determinism_check, debug, early_stop)
    return run_region(function, args, kwargs, spec, context_fn)


def checkpoint_sequential(
    functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """Run functions one after the other in segments, and keep activations of the last segment only."""
    if use_reentrant is None:
        warnings.warn(f"torch.utils.checkpoint.checkpoint_sequential: {_USE_REENTRANT_TIP}", stacklevel=2)
        use_reentrant = True
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    regions, rest = split_in_segments(functions, segments)
    for region in regions:
        input = checkpoint(region, input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return rest(input)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a pair of contexts that save what a policy says, to be returned by a `context_fn`."""
    policy = normalise_policy(policy_fn_or_list, allow_packets=False)
    on_mutation = OnMutation.ALLOW if allow_cache_entry_mutation else OnMutation.RAISE
    recorder = Recorder(policy, on_mutation)
    return recorder, Replayer(None, owner=recorder)
