"""Every import of a private torch module, and nothing else, so that a new torch release touches one file.

Names that cost seconds to import (Dynamo, inductor) are functions here: `import remat` stays light, and the passes
work on any FX graph without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed
import torch.fx as fx

# What the eager engine needs.
import torch.fx.traceback as fx_traceback
from torch import _ops
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_key_parse,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_set_dispatch_key_excluded,
    _ExcludeDispatchKeyGuard,
    _get_dispatch_mode,
    _IncludeDispatchKeyGuard,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C import Generator as Generator
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _get_graph_exec_group as get_graph_exec_group
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _len_torch_function_stack as len_torch_function_stack
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C import _set_graph_exec_group as set_graph_exec_group
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._autograd import _get_current_graph_task_keep_graph as current_graph_task_keeps_graph
from torch._C._autograd import _make_saved_tensor as make_saved_tensor
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch._C._autograd import _unsafe_set_version_counter as set_versions
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack as peek_functorch_stack
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
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import _is_non_strict_tracing
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import (
    find_symbol_binding_fx_nodes,
    free_symbols,
    is_symbol_binding_fx_node,
    statically_known_true,
)
from torch.overrides import _get_current_function_mode_stack as get_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

if TYPE_CHECKING:
    import sympy
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

__all__ = [
    "MODULE_CALL_CODE",
    "MODULE_CALL_CODES",
    "AOTInput",
    "AOTOutput",
    "BackwardState",
    "BackwardTokenAOTInput",
    "CustomPartitionerFn",
    "DeviceContext",
    "DisableTorchDispatch",
    "FakeScriptObject",
    "FakeTensor",
    "FunctionalTensor",
    "Generator",
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
    "SavedTensor",
    "TangentAOTInput",
    "TorchDispatchMode",
    "alias_of",
    "compiled_code_key",
    "constant_in_graphs",
    "current_graph_task_id",
    "current_graph_task_keeps_graph",
    "default_store",
    "find_symbol_binding_fx_nodes",
    "free_symbols",
    "fx_current_meta",
    "fx_preserving_meta",
    "get_eval_frame_callback",
    "get_function_mode_stack",
    "get_graph_exec_group",
    "graph_module",
    "has_process_group",
    "inductor_mode_options",
    "inductor_option_names",
    "is_any_autocast_enabled",
    "is_faking",
    "is_full_backward",
    "is_in_forward_ad",
    "is_registered_as_effectful",
    "is_sym_node",
    "is_symbol_binding_fx_node",
    "is_tracing",
    "is_tracing_backward_too",
    "is_tracing_proxies",
    "len_torch_function_stack",
    "make_saved_tensor",
    "next_region_number",
    "peek_functorch_stack",
    "pop_mode",
    "pop_saved_tensors_hooks",
    "push_mode",
    "push_saved_tensors_hooks",
    "queue_after_backward",
    "redirect_compiled_code_to",
    "run_and_save_rng_state",
    "run_uncompiled",
    "run_with_rng_state",
    "set_grad_enabled",
    "set_graph_exec_group",
    "set_versions",
    "skip_code",
    "targets_of_wrap_policy",
    "top_saved_tensors_hooks",
    "trace_as_wrapper",
    "traced_node_of",
    "traced_nodes_since",
    "traced_nodes_so_far",
    "tracer",
    "tree_leaves",
    "tree_map",
    "unwatched_collectives",
    "watch_collectives",
    "watched_collectives",
    "without_modes",
]


if torch.distributed.is_available():
    from torch.distributed import distributed_c10d

    _distributed: Any = distributed_c10d
else:
    _distributed = None


def __getattr__(name: str) -> Any:
    if name == "CustomPartitionerFn":  # a base class, needed only once something compiles
        from torch._inductor import custom_graph_pass

        return custom_graph_pass.CustomPartitionerFn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


MODULE_CALL_CODE: CodeType = torch.nn.Module._call_impl.__code__
"""The code that every call of a module runs, whichever class it is of."""

MODULE_CALL_CODES: tuple[CodeType, ...] = (
    MODULE_CALL_CODE,
    *(constant for constant in MODULE_CALL_CODE.co_consts if isinstance(constant, CodeType)),
)
"""That code, and the function inside it that calls `forward` where there are hooks."""


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


def is_registered_as_effectful(op: Any) -> bool:
    """True for an op that its author has told torch to keep in order, and so not to repeat."""
    from torch._higher_order_ops.effects import has_effects

    return bool(has_effects(op))


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
    gm: fx.GraphModule,
    example_inputs: list[Any],
    config_patches: dict[str, Any],
    *,
    may_fuse: MayFuse | None = None,
    inner_compile: Callable[..., Any] | None = None,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    with_backward: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with inductor under the given settings.

    `may_fuse` may forbid a fusion; `inner_compile` replaces code generation; `around` is put around what runs the code.
    Backward is compiled when it first runs, or right away `with_backward`.
    """
    from torch._functorch import config as aot_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    generate = compile_fx_inner if inner_compile is None else inner_compile

    def generate_code(*args: Any, **kwargs: Any) -> Any:
        # Inductor reads its setting for this once per thread, so a setting would come too late.
        with nullcontext() if may_fuse is None else V.set_choices_handler(_choices_with(may_fuse)):
            generated: Any = generate(*args, **kwargs)
        run = getattr(generated, "current_callable", None)  # which goes into no cache
        if around is not None and callable(run):
            generated.current_callable = around(run)
        return generated

    with aot_config.patch(force_non_lazy_backward_lowering=True) if with_backward else nullcontext():
        compiled = compile_fx(gm, example_inputs, inner_compile=generate_code, config_patches=config_patches)
    assert callable(compiled), "inductor returns files only when it compiles ahead of time"
    return compiled


def inductor_error() -> type[Exception]:
    """What inductor raises around the errors of its passes."""
    from torch._inductor.exc import InductorError

    return InductorError


REALIZE_TAG = "inductor_realize_to_strides"
"""`node.meta` key by which inductor is told to write a node's result to memory."""


class MayFuse(Protocol):
    """Given the graph nodes behind two kernels, and whether one feeds the other: may they become one?"""

    def __call__(self, first: list[fx.Node], second: list[fx.Node], *, feed_each_other: bool) -> bool: ...


def _choices_with(may_fuse: MayFuse) -> Any:
    """Inductor's heuristics, with a veto on fusing kernels."""
    from torch._inductor.choices import InductorChoices

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            allowed = may_fuse(origins_of(node1), origins_of(node2), feed_each_other=True)
            return allowed and bool(InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score))

        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            allowed = may_fuse(origins_of(node1), origins_of(node2), feed_each_other=False)
            return allowed and bool(InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    return Choices()


class KernelOrder(Protocol):
    """Given where each kernel stands, the graph's nodes behind it and which others it has to wait for: their order."""

    def __call__(self, places: list[int], nodes: list[list[fx.Node]], waits_for: list[set[int]]) -> list[int]: ...


def kernel_order_pass(order: KernelOrder, key: str, watch: Callable[[CompiledHalf], None]) -> Any:
    """A setting of inductor that puts the kernels in order once it has made them; `key` stands for it in caches.

    `watch` is shown what is going to run, and may raise an exception to stop that.
    """
    from torch._inductor import ir
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
    from torch._inductor.graph import SubgraphLowering
    from torch._inductor.virtualized import V

    class Reorder(CustomSchedulerPass):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            maker = {name: k for k, node in enumerate(nodes) for name in node.get_buffer_names()}
            made = [{maker[dep.name] for dep in node.unmet_dependencies if dep.name in maker} for node in nodes]
            waits_for = [others - {k} for k, others in enumerate(made)]
            places, origins = [node.max_order for node in nodes], [origins_of(node) for node in nodes]
            ordered = [nodes[k] for k in order(places, origins, waits_for)]
            if not isinstance(V.graph, SubgraphLowering):  # a condition's branch is no half of a step
                watch(CompiledHalf(ordered, V.graph, ir))
            return ordered

        def uuid(self) -> str:
            return key

        def __reduce__(self) -> tuple[type[str], tuple[str]]:
            return (str, (key,))  # settings are pickled into the keys of caches

    return Reorder()


class CompiledHalf(NamedTuple):
    """Forward or backward as inductor has it before it generates code."""

    kernels: list[Any]
    """Scheduler nodes, in the order in which they will run."""
    graph: Any
    """What was lowered: buffers, inputs, outputs."""
    ir: Any
    """The module with the classes of buffers and layouts."""


def origins_of(kernel: Any) -> list[fx.Node]:
    """The graph nodes that a kernel of inductor's was made from."""
    return [origin for part in kernel.get_nodes() if part.node is not None for origin in part.node.get_origins()]


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


def graph_break_of(error: Exception) -> str | None:
    """Why Dynamo could not trace a function as one graph, in a line; None if the error is of another kind."""
    from torch._dynamo.exc import Unsupported

    return str(error).strip().partition("\n")[0] if isinstance(error, Unsupported) else None


def fake_mode() -> Any:
    """A context in which tensors are made without memory, on whatever device they say they are."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


def break_after(gm: fx.GraphModule) -> str:
    """Why Dynamo ended a graph before the function's end, in a line with the program's line; empty if it did not."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = "" if frame is None else f"{frame.filename}:{frame.lineno}: "
    return where + str(reason.reason).strip().partition("\n")[0]


def run_graph_as_is(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The compiler of `inner="aot_eager"`: run the graph's ops one by one, freeing inputs as they die."""
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        # Ops that run one by one write over none of backward's inputs, so backward can run twice.
        context.fw_metadata.bw_donated_idxs = []
    return boxed_nop(gm, example_inputs)


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function take its arguments as one list that it empties."""
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(function)


def statically_equal(a: Any, b: Any) -> bool:
    """True if two sizes are known to be equal, whatever the values of their symbols; adds no guard."""
    return statically_known_true(a == b)


def statically_at_least(a: Any, b: Any) -> bool:
    """True if a size is known to be no smaller than another, whatever the values of their symbols; adds no guard."""
    return statically_known_true(a >= b)


def symbols_of(value: object) -> list[sympy.Symbol]:
    """The size symbols inside a tensor or a symbolic number, in order of their names."""
    return sorted(free_symbols(value), key=lambda symbol: symbol.name)


# -------------------------------------------------------------------------------------------------- the eager engine


def run_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function and keep Dynamo out of it and of all it calls."""
    from torch._dynamo import disable

    return disable(function, recursive=True)(*args)  # type: ignore[no-untyped-call]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run a function when the backward pass that is under way has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def targets_of_wrap_policy(policy: Any, model: torch.nn.Module) -> dict[torch.nn.Module, dict[str, Any]] | None:
    """The modules that a policy object of FSDP's names, with keywords for each; None for any other object."""
    from torch.distributed.fsdp.wrap import _Policy

    if not isinstance(policy, _Policy):
        return None
    return policy._run_policy(model, ignored_modules=set(), root_kwargs={})


def skip_code(code: CodeType) -> None:
    """Keep Dynamo from compiling one function; what it calls is not affected."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


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


is_full_backward: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid
"""Whether the running backward goes to all leaves; False for `autograd.grad` and for `inputs=`."""

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


# -------------------------------------------------------------------------------------------------- collectives

# A dispatch key that torch itself leaves alone: ops without a kernel for it never notice that it is set.
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


# -------------------------------------------------------------------------------------------------- ranks


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


# -------------------------------------------------------------------------------------------------- regions in graphs


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo call a function while it traces, and take the result for a constant.

    This is what `torch.compiler.assume_constant_result` does, without importing Dynamo for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def trace_as_wrapper(operator: HigherOrderOperator, on_break: Callable[[str, str], None] | None = None) -> bool:
    """Teach Dynamo to trace through calls of an operator of ours; False if this torch has no place to say so.

    `on_break` is told the line and the reason when the code inside cannot be captured as one graph.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import higher_order_ops

    classes = getattr(higher_order_ops, "_hop_name_to_variable_class", None)
    wrapper = getattr(higher_order_ops, "WrapHigherOrderVariable", None)
    if not isinstance(classes, dict) or wrapper is None:
        return False

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        try:
            with _floats_read_outside():
                return wrapper._call_function(self, tx, args, kwargs)
        except Unsupported as error:
            if on_break is not None:
                on_break(_line_of(error), str(error.args[0] if error.args else error).strip().splitlines()[0])
            raise

    name = operator.__name__
    # Function modes and tensor subclasses see the ops inside of a region, as they do in eager, and not the region.
    members = {"_HOP_NAME": f"torch.ops.higher_order.{name}", "allow_side_effects": True, "call_function": call}
    classes[name] = type(f"{name}_variable", (wrapper,), members)
    return True


@contextmanager
def _floats_read_outside() -> Iterator[None]:
    """Have Python floats that become symbols read in the outermost graph, where the float is an input.

    Dynamo reads a float in the graph that it is tracing when it first meets it. If that is the graph inside of a
    region, the symbol is unknown outside, and the next reader there fails. Dynamo holds a lock while it traces.
    """
    from torch._dynamo.variables.builder import VariableBuilder

    wrap = VariableBuilder.wrap_symfloat

    def wrap_outside(builder: Any, value: float) -> Any:
        output = builder.tx.output
        tracers, output.tracers = output.tracers, [output.root_tracer]
        try:
            return wrap(builder, value)
        finally:
            output.tracers = tracers

    VariableBuilder.wrap_symfloat = wrap_outside  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        VariableBuilder.wrap_symfloat = wrap  # type: ignore[method-assign]


def _line_of(error: Any) -> str:
    """The innermost line of the user's program that an error of Dynamo's is about, `file:line`."""
    stack = list(getattr(error, "real_stack", None) or ())
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""


def untraced_line(error: BaseException) -> tuple[str, str] | None:
    """The line that could not be traced, and why; None if neither Dynamo nor what it hands graphs to says so."""
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException

    if isinstance(error, BackendCompilerFailed):  # its own text is about the backend
        cause = error.inner_exception
        return _line_of(error), f"{type(cause).__name__}: {next(iter(_lines_of(cause)), '')}"
    if not isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit)):
        return None
    lines = _lines_of(error)
    told = [
        line.partition(": ")[2] for line in lines if line.startswith(("Explanation: ", "Developer debug context: "))
    ]
    return _line_of(error), ": ".join([*lines[:1], *told[:1]])


def _lines_of(error: BaseException) -> list[str]:
    """What an error says, line by line; without what says nothing."""
    return [line.strip() for line in str(error.args[0] if error.args else error).splitlines() if line.strip()]


def program_fails(error: BaseException) -> bool:
    """True if Dynamo met an error that the program itself raises, not something that it cannot trace."""
    from torch._dynamo.exc import ObservedException, TorchRuntimeError, Unsupported

    is_observed = isinstance(error, Unsupported) and str(error).lstrip().startswith("Observed exception")
    return is_observed or isinstance(error, (ObservedException, TorchRuntimeError))


def next_region_number() -> int:
    """A number larger than that of every region so far, torch's own included."""
    from torch._higher_order_ops.wrap import uid

    return next(uid)


def has_process_group() -> bool:
    """True if this process can communicate with others.

    The same as `torch.distributed.is_initialized`, which takes four calls, for who asks in every region.
    """
    return _distributed is not None and _distributed._world.default_pg is not None


def is_faking() -> bool:
    """True while tensors stand for values that are not there: a compiler looks at the program."""
    if _len_torch_dispatch_stack() == 0:  # as it mostly is
        return False
    kinds = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)
    return any(_get_dispatch_mode(kind) is not None for kind in kinds)


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


# -------------------------------------------------------------------------------------------------- dynamic shapes


def shape_env_of(size: torch.SymInt) -> Any:
    """The environment that knows what is known of a size's symbols."""
    return size.node.shape_env


def expression_of(size: torch.SymInt) -> sympy.Expr:
    """A symbolic size as an expression of the symbols that are still open."""
    return size.node.expr


def example_values(shape_env: Any) -> dict[sympy.Symbol, int]:
    """The sizes that the graph was traced with, for symbols that have one; the length of a ragged dimension is none."""
    return {symbol: int(value) for symbol, value in shape_env.backed_var_to_val.items() if value.is_Integer}


def symbol_bounds(shape_env: Any, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
    """The least and the largest value that a symbol can have; None where nothing is known."""
    found = shape_env.var_to_range.get(symbol)
    if found is None:
        return None, None
    lower, upper = found.lower, found.upper
    low = int(lower) if lower.is_Integer else None
    # "As large as a number can be" says nothing.
    high = int(upper) if upper.is_Integer and upper < 2**62 else None
    return low, high


def known_upper_bounds(shape_env: Any, symbol: sympy.Symbol) -> list[sympy.Expr]:
    """Expressions that a symbol is asserted not to exceed, such as `u0 <= s0`."""
    asserted = shape_env.deferred_runtime_asserts.get(symbol, ())
    relations = [known.expr for known in asserted if known.expr.is_Relational]
    return [r.gts for r in relations if hasattr(r, "lts") and r.lts == symbol and symbol not in r.gts.free_symbols]


def guards_of(shape_env: Any) -> list[sympy.Basic]:
    """What the traced graph takes for granted of its sizes."""
    return [guard.expr for guard in shape_env.guards]


def add_guard(shape_env: Any, condition: sympy.Basic) -> bool:
    """Take a condition on sizes for granted: who compiled the graph compiles anew where it does not hold."""
    return bool(shape_env.evaluate_expr(condition))


def fixed_ranges(shape_env: Any) -> frozenset[sympy.Symbol]:
    """Symbols for which the user has asked for one graph over a stated range, which a guard must not narrow."""
    from torch._guards import TracingContext
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    context = TracingContext.try_get()
    if context is None:
        return frozenset()
    found = set()
    contexts: Any = context.tensor_to_context
    for traced in contexts.values():
        for dim, constraint in enumerate(getattr(traced, "constraint_sizes", ())):
            if isinstance(constraint, StrictMinMaxConstraint):
                symbol = shape_env.source_to_var.get(f"{traced.tensor_source.name}.size()[{dim}]")
                found.add(symbol)
    return frozenset(symbol for symbol in found if symbol is not None)


@cache
def sympy_functions() -> dict[str, Any]:
    """Torch's own sympy functions of whole numbers, by name."""
    from torch.utils._sympy import functions

    return {name: getattr(functions, name) for name in ("FloorDiv", "PythonMod", "Max", "Min")}
