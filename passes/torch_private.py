"""Every import of a private torch module, and nothing else, so that a new torch release touches one file.

Names that cost seconds to import (Dynamo, inductor) are functions here: `import remat` stays light, and the passes
work on any FX graph without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BackwardTokenAOTInput,
    InputMutationAOTOutput,
    PhiloxBackwardBaseOffsetAOTInput,
    PhiloxBackwardSeedAOTInput,
    PhiloxForwardBaseOffsetAOTInput,
    PhiloxForwardSeedAOTInput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    TangentAOTInput,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import (
    find_symbol_binding_fx_nodes,
    free_symbols,
    is_symbol_binding_fx_node,
)
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    import sympy
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BackwardState",
    "BackwardTokenAOTInput",
    "CustomPartitionerFn",
    "FakeScriptObject",
    "FakeTensor",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "OpOverload",
    "PhiloxBackwardBaseOffsetAOTInput",
    "PhiloxBackwardSeedAOTInput",
    "PhiloxForwardBaseOffsetAOTInput",
    "PhiloxForwardSeedAOTInput",
    "SavedForBackwardsAOTOutput",
    "SavedForBackwardsNoVcCheckAOTOutput",
    "TangentAOTInput",
    "find_symbol_binding_fx_nodes",
    "free_symbols",
    "graph_module",
    "inductor_mode_options",
    "inductor_option_names",
    "is_sym_node",
    "is_symbol_binding_fx_node",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "without_modes",
]


def __getattr__(name: str) -> Any:
    if name == "CustomPartitionerFn":  # a base class, needed only once something compiles
        from torch._inductor import custom_graph_pass

        return custom_graph_pass.CustomPartitionerFn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Wrap `graph` in a module that generates its Python code only when it is first called."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def without_modes() -> AbstractContextManager[Any]:
    """Leave fake-tensor and tracing modes for a while, so that real tensors can be made and run."""
    return _disable_current_modes()


def symbol_hint(value: torch.SymInt) -> int | None:
    """The example size behind a symbolic one, without adding a guard; None when there is none."""
    node = value.node
    hint = node.hint if node.has_hint() else None
    return None if hint is None else int(hint)


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


def inductor_option_names() -> frozenset[str]:
    """Every option that `torch.compile(backend="inductor", options=...)` knows."""
    from torch._inductor import list_options

    return frozenset(list_options())


def inductor_option_type(name: str) -> object:
    """The declared type of an inductor option."""
    from torch._inductor import config

    return config.get_type(name)  # type: ignore[attr-defined] # the config module gets it at import


def inductor_mode_options() -> dict[str, dict[str, Any]]:
    """What each `mode=` of torch.compile switches on in inductor."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options())


def inductor_compile(
    gm: fx.GraphModule, example_inputs: list[Any], config_patches: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a Dynamo graph with inductor under the given settings."""
    from torch._inductor.compile_fx import compile_fx

    compiled = compile_fx(gm, example_inputs, config_patches=config_patches)
    assert callable(compiled), "inductor returns files only when it compiles ahead of time"
    return compiled


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    compiler: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    partition_fn: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
) -> Callable[..., Any]:
    """Trace a Dynamo graph's joint graph, split it with `partition_fn` and hand both halves to `compiler`."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
    )
    return backend(gm, example_inputs)


def run_graph_as_is(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The compiler of `inner="aot_eager"`: run the graph's ops one by one, freeing inputs as they die."""
    from torch._dynamo.backends.debugging import boxed_nop

    return boxed_nop(gm, example_inputs)


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function take its arguments as one list that it empties."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(function)


def symbols_of(value: object) -> list[sympy.Symbol]:
    """The size symbols inside a tensor or a symbolic number, in order of their names."""
    return sorted(free_symbols(value), key=lambda symbol: symbol.name)
