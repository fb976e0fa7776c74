"""The autograd engine: saved tensors, their hooks, graph tasks, and the code of a module's call."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch._C import Generator as Generator
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _get_graph_exec_group as get_graph_exec_group
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C import _set_graph_exec_group as set_graph_exec_group
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._autograd import _get_current_graph_task_keep_graph as current_graph_task_keeps_graph
from torch._C._autograd import _make_saved_tensor as make_saved_tensor
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._C._autograd import _unsafe_set_version_counter as set_versions
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
    "MODULE_CALL_CODE",
    "MODULE_CALL_CODES",
    "Generator",
    "SavedTensor",
    "current_graph_task_id",
    "current_graph_task_keeps_graph",
    "get_graph_exec_group",
    "is_full_backward",
    "make_saved_tensor",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "queue_after_backward",
    "set_grad_enabled",
    "set_graph_exec_group",
    "set_versions",
    "top_saved_tensors_hooks",
]


MODULE_CALL_CODE: CodeType = torch.nn.Module._call_impl.__code__
"""The code that every call of a module runs, whichever class it is of."""


MODULE_CALL_CODES: tuple[CodeType, ...] = (
    MODULE_CALL_CODE,
    *(constant for constant in MODULE_CALL_CODE.co_consts if isinstance(constant, CodeType)),
)
"""That code, and the function inside it that calls `forward` where there are hooks."""


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run a function when the backward pass that is under way has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


is_full_backward: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid
"""Whether the running backward goes to all leaves; False for `autograd.grad` and for `inputs=`."""
