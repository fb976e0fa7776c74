"""Operators, FX graphs and what AOTAutograd writes on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.fx as fx
import torch.fx.traceback as fx_traceback
from torch._C import Generator as Generator
from torch._C import (
    _get_dispatch_mode,
)
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BackwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PhiloxBackwardBaseOffsetAOTInput,
    PhiloxBackwardSeedAOTInput,
    PhiloxForwardBaseOffsetAOTInput,
    PhiloxForwardSeedAOTInput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    TangentAOTInput,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental._backward_state import BackwardState
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

if TYPE_CHECKING:
    pass
from .dispatch import _PROXY

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BackwardState",
    "BackwardTokenAOTInput",
    "FakeScriptObject",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "OpOverload",
    "OpOverloadPacket",
    "PhiloxBackwardBaseOffsetAOTInput",
    "PhiloxBackwardSeedAOTInput",
    "PhiloxForwardBaseOffsetAOTInput",
    "PhiloxForwardSeedAOTInput",
    "PlainAOTInput",
    "SavedForBackwardsAOTOutput",
    "SavedForBackwardsNoVcCheckAOTOutput",
    "TangentAOTInput",
    "effectful_operators",
    "functional_operators",
    "fx_current_meta",
    "fx_preserving_meta",
    "graph_module",
    "is_registered_as_effectful",
    "is_tracing_backward_too",
    "next_region_number",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "traced_node_of",
    "traced_nodes_since",
    "traced_nodes_so_far",
    "tracer",
]


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Wrap `graph` in a module that generates its Python code only when it is first called."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


@cache
def effectful_operators() -> frozenset[HigherOrderOperator]:
    """The higher-order operators that wrap something with effects: a token, a kernel or an op that writes."""
    names = (
        "with_effects",
        "triton_kernel_wrapper_mutation",
        "triton_kernel_wrapper_functional",
        "auto_functionalized",
        "auto_functionalized_v2",
    )
    return _operators(names)


@cache
def functional_operators() -> frozenset[HigherOrderOperator]:
    """The higher-order operators that do nothing but run the graphs they are given."""
    names = (
        "invoke_subgraph",
        "cond",
        "while_loop",
        "scan",
        "associative_scan",
        "map_impl",
        "flex_attention",
        "flex_attention_backward",
    )
    return _operators(names)


def _operators(names: Iterable[str]) -> frozenset[HigherOrderOperator]:
    return frozenset(getattr(torch.ops.higher_order, name) for name in names if hasattr(torch.ops.higher_order, name))


def is_registered_as_effectful(op: Any) -> bool:
    """True for an op that its author has told torch to keep in order, and so not to repeat."""
    from torch._higher_order_ops.effects import has_effects

    return bool(has_effects(op))


def fx_current_meta() -> dict[str, Any]:
    """Return the metadata that nodes traced from now on are given."""
    return fx_traceback.current_meta


def traced_nodes_so_far() -> int:
    """Count the nodes of the graph that is being traced."""
    mode = _get_dispatch_mode(_PROXY)
    return 0 if mode is None else len(mode.tracer.graph.nodes)


def traced_nodes_since(mark: int) -> Iterator[Any]:
    """Return the nodes traced since `traced_nodes_so_far` said `mark`, newest first."""
    mode = _get_dispatch_mode(_PROXY)
    if mode is None:
        return iter(())
    nodes = mode.tracer.graph.nodes
    return islice(reversed(nodes), len(nodes) - mark)


def next_region_number() -> int:
    """A number larger than that of every region so far, torch's own included."""
    from torch._higher_order_ops.wrap import uid

    return next(uid)


def tracer() -> Any:
    """The object that records the graph being traced, one per graph; None outside."""
    mode = _get_dispatch_mode(_PROXY)
    return None if mode is None else mode.tracer


def is_tracing_backward_too() -> bool:
    """False while a graph is recorded that ends with forward: nothing in it is needed again later.

    AOTAutograd itself tells what it records by the names of the inputs. Graphs inside of a graph count as parts of one
    that has a backward.
    """
    recording = proxy_tensor._CURRENT_MAKE_FX_TRACER
    if recording is None or recording.is_hop_subgraph_tracer():
        return True
    inputs = tracer().graph.find_nodes(op="placeholder")
    return any("tangents" in str(node.target) for node in inputs)


def fx_preserving_meta() -> AbstractContextManager[Any]:
    """Copy the metadata of interpreted nodes to those that are traced from them."""
    return fx_traceback.preserve_node_meta()


def traced_node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node of the graph being traced that computes a tensor."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
        tensor = torch._from_functional_tensor(tensor.elem)
    slot: Any = get_proxy_slot(tensor, tracer(), None)
    return None if slot is None else slot.proxy.node
