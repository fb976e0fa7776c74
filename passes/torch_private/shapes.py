"""Symbolic sizes: expressions, bounds, guards."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch._C import Generator as Generator
from torch._C._autograd import SavedTensor as SavedTensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback as get_eval_frame_callback
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import (
    find_symbol_binding_fx_nodes,
    free_symbols,
    is_symbol_binding_fx_node,
    statically_known_true,
)
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

if TYPE_CHECKING:
    import sympy

__all__ = [
    "add_guard",
    "example_values",
    "expression_of",
    "find_symbol_binding_fx_nodes",
    "fixed_ranges",
    "free_symbols",
    "guards_of",
    "is_sym_node",
    "is_symbol_binding_fx_node",
    "known_upper_bounds",
    "shape_env_of",
    "statically_at_least",
    "statically_equal",
    "symbol_bounds",
    "symbol_hint",
    "symbols_of",
    "sympy_functions",
]


def symbol_hint(value: torch.SymInt) -> int | None:
    """The example size behind a symbolic one, without adding a guard; None when there is none."""
    node = value.node
    hint = node.hint if node.has_hint() else None
    return None if hint is None else int(hint)


def statically_equal(a: Any, b: Any) -> bool:
    """True if two sizes are known to be equal, whatever the values of their symbols; adds no guard."""
    return statically_known_true(a == b)


def statically_at_least(a: Any, b: Any) -> bool:
    """True if a size is known to be no smaller than another, whatever the values of their symbols; adds no guard."""
    return statically_known_true(a >= b)


def symbols_of(value: object) -> list[sympy.Symbol]:
    """The size symbols inside a tensor or a symbolic number, in order of their names."""
    return sorted(free_symbols(value), key=lambda symbol: symbol.name)


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
