"""Every import of a private torch name, so that a new torch touches one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from types import CodeType
from typing import Any

# --- eager engine -------------------------------------------------------------------------------------------
import torch.fx.traceback as fx_traceback
from torch._C import DispatchKey as DispatchKey
from torch._C import Generator as Generator
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C import _get_graph_exec_group as get_graph_exec_group
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_function_stack as len_torch_function_stack
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C import _set_graph_exec_group as set_graph_exec_group
from torch._C import _SetExcludeDispatchKeyGuard as SetExcludeDispatchKeyGuard
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._autograd import _get_current_graph_task_keep_graph as current_graph_task_keeps_graph
from torch._C._autograd import _make_saved_tensor as make_saved_tensor
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack as peek_functorch_stack
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import _is_checkpoint_valid as is_full_backward
from torch.compiler import _is_non_strict_tracing
from torch.overrides import _get_current_function_mode_stack as get_function_mode_stack
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

# Names of the eager engine.
__all__ = [
    "DeviceContext",
    "DisableTorchDispatch",
    "DispatchKey",
    "FunctionalTensor",
    "Generator",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "SavedTensor",
    "SetExcludeDispatchKeyGuard",
    "TorchDispatchMode",
    "compiled_code_key",
    "current_graph_task_id",
    "current_graph_task_keeps_graph",
    "fx_current_meta",
    "get_eval_frame_callback",
    "get_function_mode_stack",
    "get_graph_exec_group",
    "is_any_autocast_enabled",
    "is_full_backward",
    "is_tracing",
    "is_tracing_proxies",
    "len_torch_function_stack",
    "make_saved_tensor",
    "peek_functorch_stack",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "redirect_compiled_code_to",
    "run_uncompiled",
    "set_grad_enabled",
    "set_graph_exec_group",
    "skip_code",
    "top_saved_tensors_hooks",
    "traced_nodes_since",
    "traced_nodes_so_far",
    "tree_leaves",
    "tree_map",
]


def run_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function and keep Dynamo out of it and of all it calls."""
    from torch._dynamo import disable

    return disable(function, recursive=True)(*args)  # type: ignore[no-untyped-call]


def skip_code(code: CodeType) -> None:
    """Keep Dynamo from compiling one function; what it calls is not affected."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def is_tracing_proxies() -> bool:
    """True while a compiler records ops into an FX graph; a non-strict trace wants eager's ops instead."""
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None and not _is_non_strict_tracing()


def is_tracing() -> bool:
    """True while ops are being recorded into an FX graph by anybody."""
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None


def fx_current_meta() -> dict[str, Any]:
    """Return the metadata that nodes traced from now on are given."""
    return fx_traceback.current_meta


def traced_nodes_so_far() -> int:
    """Count the nodes of the graph that is being traced."""
    mode = _get_dispatch_mode(_TorchDispatchModeKey.PROXY)
    return 0 if mode is None else len(mode.tracer.graph.nodes)


def traced_nodes_since(mark: int) -> Iterator[Any]:
    """Return the nodes traced since `traced_nodes_so_far` said `mark`, newest first."""
    mode = _get_dispatch_mode(_TorchDispatchModeKey.PROXY)
    if mode is None:
        return iter(())
    nodes = mode.tracer.graph.nodes
    return islice(reversed(nodes), len(nodes) - mark)


def compiled_code_key(func: Any, args: Any) -> Any:
    """Tell compiled blocks apart, which are all calls of one higher-order op; other ops are their own key."""
    from torch._higher_order_ops.wrap import _resolve_inductor_callable, inductor_compiled_code

    if func is inductor_compiled_code and args:
        return func, _resolve_inductor_callable(args[0]).idx
    return func


def redirect_compiled_code_to(mode: type[TorchDispatchMode]) -> None:
    """Let a dispatch mode see compiled blocks as one op each."""
    from torch._higher_order_ops.utils import redirect_to_mode
    from torch._higher_order_ops.wrap import inductor_compiled_code

    redirect_to_mode(inductor_compiled_code, mode)
