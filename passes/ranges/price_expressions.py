"""Prices as expressions of sizes: the cost model's own formulas, asked with symbols in place of numbers.

A price is the largest of some polynomials, in nanoseconds, of which most have one. Only a model that says so is asked
(`cost.Formulas`); what it says of a call is not taken if at the example's sizes it is not the price that was planned
with. A price that is missing here is known at the example's sizes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ..graph import JointGraph, Role, tensor_of
from ..prices import TICKS_PER_SECOND, UNKNOWN_USE, CostModel, Costs, Formulas, OpCall, Use, call_of
from ..shared import RematError
from ..sizes import NotExpressible, Sizes, TensorSpec, largest_of, weighted_sum
from ..torch_private import expression_of

Polynomial = tuple[tuple[Any, float], ...]
"""Monomials (sympy expressions) with their coefficients."""

ValueOf = Callable[[Any], float]
"""What a monomial stands for."""


@dataclass(frozen=True, slots=True)
class Price:
    """Nanoseconds: the largest of some polynomials of sizes."""

    alternatives: tuple[Polynomial, ...]

    def at(self, value_of: ValueOf) -> float:
        """The value at given sizes."""
        return max(sum(c * value_of(m) for m, c in polynomial) for polynomial in self.alternatives)

    def text(self) -> str:
        """The price as text; raises NotExpressible if it cannot be written down."""
        return largest_of([weighted_sum(polynomial) for polynomial in self.alternatives])


NOTHING = Price(((),))


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """The prices of every forward-side value in terms of sizes, by node position; None where only numbers are known."""

    save: tuple[Price | None, ...]
    run: tuple[Price | None, ...]
    recompute: tuple[Price | None, ...]
    """What the first recomputation adds: nothing, for what only backward needs."""


def general_prices(graph: JointGraph, model: CostModel, sizes: Sizes, costs: Costs) -> Prices:
    """Ask a cost model for its prices in terms of the symbols of a graph."""
    asked = _Asked(model, sizes)
    likes = costs.likes
    save, run = [], []
    for i, node in enumerate(graph.nodes):
        is_priced = graph.roles[i] in (Role.INPUT, Role.FORWARD, Role.EITHER)
        save.append(_checked(asked.save(node), costs.save_ticks[i], sizes) if is_priced else NOTHING)
        use = UNKNOWN_USE if likes is None else likes.use_of(i)
        run.append(_checked(asked.run(node, use), costs.run_ticks[i], sizes) if is_priced else NOTHING)
    recompute = [price if graph.roles[i] is Role.FORWARD else NOTHING for i, price in enumerate(run)]
    return Prices(tuple(save), tuple(run), tuple(recompute))


def _checked(price: Price | None, ticks: int, sizes: Sizes) -> Price | None:
    """A price if it is the one that was planned with: a formula may have cases, of which one was taken then."""
    if price is None or abs(price.at(sizes.value_of) - ticks) > 1 + 1e-9 * ticks:
        return None
    return price


class _Asked:
    """A cost model that remembers what it said of calls with symbols."""

    def __init__(self, model: CostModel, sizes: Sizes) -> None:
        self.model, self.sizes, self.expressions = model, sizes, _Expressions()
        self.known: dict[OpCall, Price | None] = {}
        self.kept: dict[tuple[int, str], Price | None] = {}

    def save(self, node: fx.Node) -> Price | None:
        """The price of keeping what a node returns."""
        tensor = tensor_of(node)
        if tensor is None:
            return NOTHING
        key = (self.sizes.size_number(tensor), tensor.device.type)
        if key not in self.kept:
            num_bytes: Any = sum((c * m for m, c in self.sizes.table[key[0]]), start=0)
            can_say = isinstance(self.model, Formulas)
            self.kept[key] = self._price(self.model.save_seconds(num_bytes, key[1])) if can_say else None
        return self.kept[key]

    def run(self, node: fx.Node, use: Use) -> Price | None:
        """The price of running a node."""
        if node.op != "call_function":
            return NOTHING
        if not isinstance(self.model, Formulas):
            return None
        call = call_of(node, self.expressions, use)
        if call not in self.known:
            self.known[call] = self._ask(call) if self.model.is_formula(call) else None
        return self.known[call]

    def _ask(self, call: OpCall) -> Price | None:
        try:
            return self._price(self.model.recompute_seconds(call))
        except (RematError, TypeError, AttributeError):
            return None  # a flop formula that needs numbers

    def _price(self, seconds: Any) -> Price | None:
        import sympy

        nanoseconds = sympy.sympify(seconds) * TICKS_PER_SECOND
        if not nanoseconds.free_symbols <= self.sizes.values.keys():
            return None
        factor, rest = nanoseconds.as_coeff_Mul()
        parts = [factor * part for part in rest.args] if isinstance(rest, sympy.Max) else [nanoseconds]
        return Price(tuple(dict.fromkeys(_polynomial(part) for part in parts)))


def _polynomial(expression: Any) -> Polynomial:
    import sympy

    pairs = sympy.expand(expression).as_coefficients_dict().items()
    return tuple(sorted(((m, float(c)) for m, c in pairs if c), key=_order))


def _order(pair: tuple[Any, float]) -> tuple[bool, str]:
    """Constants last."""
    return pair[0] == 1, str(pair[0])


class _Expressions:
    """Sizes as they are: numbers, or expressions of symbols."""

    def __init__(self) -> None:
        self._specs: dict[int, TensorSpec] = {}

    def of(self, size: int | torch.SymInt) -> Any:
        return size if isinstance(size, int) else expression_of(size)

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        spec = self._specs.get(id(tensor))
        if spec is None:
            shape = tuple([self.of(size) for size in tensor.shape])
            spec = self._specs[id(tensor)] = TensorSpec(shape, (), tensor.dtype, tensor.device.type)
        return spec


def total_of(prices: Iterable[tuple[Price | None, int]]) -> dict[Price, int] | None:
    """How often each price is paid; None if one of them is not known."""
    counts: dict[Price, int] = {}
    for price, count in prices:
        if price is None:
            return None
        if count:
            counts[price] = counts.get(price, 0) + count
    return counts


def total_text(total: Mapping[Price, int] | None) -> str:
    """A sum of prices as text; empty if it is not known or cannot be written down."""
    if total is None:
        return ""
    plain: dict[Any, float] = {}
    parts: dict[str, int] = {}
    try:
        for price, count in total.items():
            if len(price.alternatives) > 1:
                parts[price.text()] = parts.get(price.text(), 0) + count
                continue
            for monomial, coefficient in price.alternatives[0]:
                plain[monomial] = plain.get(monomial, 0.0) + count * coefficient
        pairs = sorted(plain.items(), key=_order)
        largest = [text if count == 1 else f"{count}*{text}" for text, count in parts.items()]
        return " + ".join([*([weighted_sum(pairs)] if pairs or not largest else []), *largest])
    except NotExpressible:
        return ""
