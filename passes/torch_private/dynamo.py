"""Dynamo: how regions get into its graphs, what it could not capture, and AOTAutograd behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch.fx as fx
from torch._C import Generator as Generator
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._ops import HigherOrderOperator
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
    "aot_compile",
    "boxed",
    "break_after",
    "compiled_code_key",
    "constant_in_graphs",
    "get_eval_frame_callback",
    "graph_break_of",
    "program_fails",
    "redirect_compiled_code_to",
    "run_graph_as_is",
    "run_uncompiled",
    "skip_code",
    "trace_as_wrapper",
    "untraced_line",
]


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


def run_uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function and keep Dynamo out of it and of all it calls."""
    from torch._dynamo import disable

    return disable(function, recursive=True)(*args)  # type: ignore[no-untyped-call]


def skip_code(code: CodeType) -> None:
    """Keep Dynamo from compiling one function; what it calls is not affected."""
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


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
