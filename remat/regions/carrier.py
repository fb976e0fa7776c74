"""What carries a region through Dynamo: one higher-order operator per kind of region.

Dynamo traces a call of marked code into a call of the operator with the code as a graph. Name, options and policy are
part of the operator's own name, so graphs that differ in any of them are different text to every cache.
"""

from __future__ import annotations

import functools
import hashlib
import operator as operators
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from ..passes.shared import RematError, fingerprint, normalise_policy
from ..passes.torch_private import (
    HigherOrderOperator,
    constant_in_graphs,
    is_faking,
    skip_code,
    trace_as_wrapper,
    tracer,
)
from .engines import runner_of, untraceable
from .trace import run_body, run_traced

if TYPE_CHECKING:
    from .region_options import RegionOptions


class RegionOperator(HigherOrderOperator):
    """Calls a region's body; whoever traces the call records the body's ops with the region on them."""

    def __init__(self, name: str, region: RegionOptions) -> None:
        super().__init__(name, cacheable=True)  # type: ignore[no-untyped-call]
        self.region = region
        self.runner = runner_of(region)
        self.policy = None if region.policy is None else normalise_policy(region.policy)
        self.codes: dict[CodeType, CodeType] = {}
        """Copies of the code of broken bodies: Dynamo compiles per code object, and this one is inside the region."""
        self.breaks: dict[str, str] = {}
        """Lines inside the region that could not be captured, with the reason."""

    def __call__(self, body: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the body: traced, looked at, for real, or piece by piece after a graph break."""
        if not isinstance(body, fx.GraphModule):
            return self._call_broken(body, args, kwargs)
        if tracer() is not None:
            return self._trace(body, args)
        if is_faking() or _writes_to_inputs(body):
            return run_body(body, *args)
        return self.runner(body, args, kwargs)

    def _trace(self, body: fx.GraphModule, args: Any) -> Any:
        return run_traced(
            lambda *inputs: run_body(body, *inputs),
            args,
            name=self.region.name,
            policy=self.policy,
            preserve_rng_state=self.region.preserve_rng_state,
            budget=self.region.budget,
            disk_folder=self.region.disk_folder,
        )

    def _call_broken(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call code that Dynamo could not capture whole: it compiles the pieces, each of them inside the region."""
        if self.region.budget is not None:
            raise RematError(untraceable(self.region, *next(iter(self.breaks.items()), ("", ""))))
        self._warn_of_breaks()
        with _inside(self):
            return self._own(function)(*args, **kwargs)

    def _own(self, function: Any) -> Any:
        """The same function over a code object of this operator's."""
        match function:
            case FunctionType():
                code = self.codes.setdefault(function.__code__, function.__code__.replace())
                own = FunctionType(
                    code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
                )
                own.__kwdefaults__ = function.__kwdefaults__
                own.__dict__.update(function.__dict__)
                return own
            case MethodType():
                return MethodType(self._own(function.__func__), function.__self__)
            case functools.partial():
                return functools.partial(self._own(function.func), *function.args, **function.keywords)
        return function

    def note_break(self, line: str, reason: str) -> None:
        """Remember a graph break, to be reported if the program goes on in spite of it."""
        self.breaks.setdefault(line, reason)

    def _warn_of_breaks(self) -> None:
        for line in [line for line, reason in self.breaks.items() if reason]:
            reason, self.breaks[line] = self.breaks[line], ""
            file, _, number = line.rpartition(":")
            text = (
                f"graph break in region {self.region.name} at {line or 'an unknown line'}: {reason}. The code on both "
                'sides is compiled, and backend="remat" keeps the policy in force on both; what crosses the break '
                "is saved."
            )
            warnings.warn_explicit(text, UserWarning, file or "unknown", int(number or 0))


_WRITERS = frozenset({"batch_norm", "instance_norm", "setitem", "iadd", "isub", "imul", "itruediv"})


def _writes_to_inputs(body: fx.GraphModule) -> bool:
    """True for a body that changes module state which the compiler made an argument of it.

    Only a backend that runs captured graphs as they are calls one for real. Nothing in the graph tells such a buffer
    from a tensor of the user's, so that it could be put back for a replay, and the body is run as plain code.
    """
    return any(
        argument.op == "placeholder"
        for part in body.modules()
        if isinstance(part, fx.GraphModule)  # regions inside are bodies of their own
        for node in part.graph.nodes
        if node.op in ("call_function", "call_method") and _may_write(node.target)
        for argument in node.all_input_nodes
    )


def _may_write(target: Any) -> bool:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__"))


# -------------------------------------------------------------------------------------------------- one per kind

_operators: dict[str, RegionOperator] = {}


@constant_in_graphs
def operator_of(region: RegionOptions) -> RegionOperator:
    """The operator of a region, known to Dynamo. Dynamo calls this while it traces."""
    name = operator_name(region)
    if name not in _operators:
        operator = RegionOperator(name, region)
        if not trace_as_wrapper(operator, operator.note_break):
            raise RematError(
                f"region {region.name}: this version of torch keeps no table of higher-order operators that remat "
                "could enter its own into, so regions cannot be compiled. Install the torch that remat asks for, or "
                "keep this code out of torch.compile by torch.compiler.disable."
            )
        skip_code(RegionOperator.__call__.__code__)
        skip_code(RegionOperator._call_broken.__code__)
        _operators[name] = operator
    return _operators[name]


def operator_name(region: RegionOptions) -> str:
    """A name that differs whenever regions differ in anything that shows in what is compiled."""
    policy = "" if region.policy is None else fingerprint(normalise_policy(region.policy))
    switches = (region.preserve_rng_state, region.determinism_check, region.early_stop, region.debug)
    options = (*switches, region.disk_folder)
    digest = hashlib.sha256(repr((region.name, policy, region.memory_budget, options)).encode()).hexdigest()[:16]
    return f"remat_{_identifier(region.name)}_{_identifier(_short_name(region.policy))}_{digest}"


def _short_name(policy: Any) -> str:
    if policy is None:
        return "recompute"
    name = getattr(policy, "__name__", None)
    return name if isinstance(name, str) else type(policy).__name__


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")


# -------------------------------------------------------------------------------------------------- graph breaks

_state = local()


@contextmanager
def _inside(operator: RegionOperator) -> Iterator[None]:
    """Note that what is compiled from now on is part of a region."""
    before = broken_regions()
    _state.broken = (*before, operator)
    try:
        yield
    finally:
        _state.broken = before


def broken_regions() -> tuple[RegionOperator, ...]:
    """The regions, outermost first, whose pieces are being run after a graph break."""
    found: tuple[RegionOperator, ...] = getattr(_state, "broken", ())
    return found


def inside_broken_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Put a graph that was captured after a graph break back into its regions."""
    for operator in reversed(broken_regions()):
        gm = _called_by(operator, gm)
    return gm


def _called_by(operator: RegionOperator, gm: fx.GraphModule) -> fx.GraphModule:
    """Make a graph do nothing but call an operator with what it was as the body."""
    graph, inner = gm.graph, fx.Graph()
    inner.output(inner.graph_copy(graph, {}))
    values: Any = graph.output_node().args[0]
    # The inputs stay as they are: the compiler has notes on them that a copy would not have.
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in reversed(list(graph.nodes)):
        if node.op != "placeholder":
            graph.erase_node(node)
    gm.add_submodule(_BODY, fx.GraphModule(gm, inner))
    called = graph.call_function(operator, (graph.get_attr(_BODY), *inputs))
    graph.output(tuple(graph.call_function(operators.getitem, (called, i)) for i in range(len(values))))
    gm.recompile()
    return gm


_BODY = "remat_region_body"
