"""Inductor: its options, its kernels before code is generated, and what it is told about them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch.fx as fx
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
    "REALIZE_TAG",
    "CompiledHalf",
    "KernelOrder",
    "MayFuse",
    "inductor_compile",
    "inductor_error",
    "inductor_mode_options",
    "inductor_option_names",
    "inductor_option_type",
    "kernel_order_pass",
    "origins_of",
]


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

    def __call__(self, first: list[fx.Node], second: list[fx.Node], *, feed_each_other: bool) -> bool:
        """Answer for two kernels."""


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

    def __call__(self, places: list[int], nodes: list[list[fx.Node]], waits_for: list[set[int]]) -> list[int]:
        """Return the positions of the kernels in the order in which they are to run."""


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
