"""Trace a function up to the moment at which its joint graphs are split, and stop before anything is lowered or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..passes.rewrites import telling_intermediates
from ..passes.shared import RematError, causes_of
from ..passes.torch_private import CustomPartitionerFn, aot_compile, break_after, graph_break_of, inductor_compile

Split = tuple[fx.GraphModule, fx.GraphModule]
Visit = Callable[[fx.GraphModule, int], Split]
"""What is done with a joint graph: gets it with the number of forward's outputs, returns the two halves."""


class _Stop(Exception):
    """Ends a compilation once its graphs have been split."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What tracing met."""

    num_graphs: int
    """Graphs that Dynamo made of the function."""
    num_split: int
    """Joint graphs among them, and inside of them, that were split."""
    graph_break: str
    """Why there are several graphs; empty if one graph holds the whole function."""
    graph_breaks: tuple[str, ...] = ()
    """Every break that was met, each with its line."""


def capture(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    visit: Visit,
    *,
    fuses: bool,
    dynamic: bool | None = False,
) -> Captured:
    """Hand every joint graph of a function to `visit`, traced as `backend="remat"` traces it for these inputs.

    A function that is one graph is not run at all. One that Dynamo breaks into several is run forward without being
    compiled, since what follows a break depends on what came before; random numbers and a module's buffers are put
    back afterwards.
    """
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    backend = _Backend(visit, fuses)
    try:
        # Sizes seen while tracing for a plan must not turn dynamic when the model is compiled for another batch later.
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    except Exception as error:
        if _has_cause(error, _Stop):
            return backend.captured("")
        reason = graph_break_of(error)
        if reason is None:
            raise _own_error(error) from error
    else:
        return backend.captured("")  # a function without a single tensor op has no graph to stop in
    return _capture_broken(function, args, kwargs, _Backend(visit, fuses, runs=True), reason, dynamic)


def _capture_broken(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: _Backend,
    reason: str,
    dynamic: bool | None,
) -> Captured:
    try:
        with _state_put_back(function):
            torch.compile(function, backend=backend, dynamic=dynamic)(*args, **kwargs)
    except Exception as error:
        raise _own_error(error) from error
    return backend.captured(reason)


def split_only(gm: fx.GraphModule, example_inputs: list[Any], settings: Mapping[str, Any]) -> None:
    """Do what inductor does with a Dynamo graph, settings' partition function included, up to generating code."""
    try:
        inductor_compile(gm, example_inputs, {**settings, "force_disable_caches": True}, inner_compile=_stop)
    except Exception as error:
        if not _has_cause(error, _Stop):
            raise


class _Backend:
    """A torch.compile backend that splits joint graphs and compiles nothing."""

    def __init__(self, visit: Visit, fuses: bool, *, runs: bool = False) -> None:
        self.visit, self.fuses = visit, fuses
        self.runs = runs
        """Run Dynamo's graphs as they are, instead of stopping at the first."""
        self.num_graphs = self.num_split = 0
        self.breaks: dict[str, None] = {}

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        reason = break_after(gm)
        if reason:
            self.breaks[reason] = None
        try:
            self._split(gm, example_inputs)
        except Exception as error:
            if not (self.runs and _has_cause(error, _Stop)):
                raise
        return gm

    def _split(self, gm: fx.GraphModule, example_inputs: list[Any]) -> None:
        splitter = _Splitter(self)
        if self.fuses:
            settings = {"custom_partitioner_fn": splitter, "force_disable_caches": True}
            if any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in example_inputs):
                # With it inductor makes empty tensors of all results on `meta`, and of the program nothing is left.
                settings["joint_graph_constant_folding"] = False
            inductor_compile(gm, example_inputs, settings, inner_compile=_stop)
        else:
            told = telling_intermediates(splitter, example_inputs)
            aot_compile(gm, example_inputs, compiler=_stop, partition_fn=told)

    def captured(self, reason: str) -> Captured:
        """Say what was met."""
        return Captured(self.num_graphs, self.num_split, reason, tuple(self.breaks) or ((reason,) if reason else ()))


class _Splitter(CustomPartitionerFn):
    """The partition function of a capturing backend."""

    def __init__(self, backend: _Backend) -> None:
        self.backend = backend

    def __call__(  # type: ignore[override] # the base class has only **kwargs
        self,
        gm: fx.GraphModule,
        joint_inputs: object,  # noqa: ARG002 (part of the protocol)
        *,
        num_fwd_outputs: int,
        **_: object,
    ) -> Split:
        """Let the visitor split the graph."""
        self.backend.num_split += 1
        return self.backend.visit(gm, num_fwd_outputs)

    def uuid(self) -> None:
        """Keep this out of compile caches."""
        return


def _stop(*_: object, **__: object) -> Any:
    raise _Stop


def _has_cause(error: BaseException, kind: type[BaseException]) -> bool:
    return any(isinstance(cause, kind) for cause in causes_of(error))


def _own_error(error: Exception) -> Exception:
    """What went wrong, without Dynamo's wrapping if it is one of remat's own errors."""
    return next((cause for cause in causes_of(error) if isinstance(cause, RematError)), error)


@contextmanager
def _state_put_back(function: Callable[..., Any]) -> Iterator[None]:
    """Undo what running a module forward does to the random generators and to its buffers."""
    buffers = list(function.buffers()) if isinstance(function, torch.nn.Module) else []
    copies = [buffer.detach().clone() for buffer in buffers]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, copy in zip(buffers, copies, strict=True):
                    buffer.copy_(copy)
