"""Sizes that are symbols: what number each stands for while planning, and bytes as polynomials of them.

Plans are made with numbers. A symbol of an input's size stands for the size of the example; one that only the data
will tell (the rows that `nonzero` finds) for an upper bound: what the graph says of it, else what the option
`unbacked_hint` says. Where there is neither, a number is taken that plans own up to, and no budget is planned with it.

Bytes are also kept as polynomials, so that a plan can say what it takes at other sizes. A polynomial is a sum of
monomials with whole coefficients; what is no polynomial (a size divided by another) is a monomial of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NewType

import torch
import torch.fx as fx

from ..graph import describe_value
from ..torch_private import example_values, expression_of, known_upper_bounds, shape_env_of, symbol_bounds
from .tensor_specs import TensorSpec, spec_of

if TYPE_CHECKING:
    import sympy

GUESSED_SIZE = 4096
"""Stands for a size of which nothing at all is known: large enough not to look free."""

Terms = tuple[tuple[Any, int], ...]
"""Monomials (sympy expressions) with their coefficients."""

SizeNumber = NewType("SizeNumber", int)
"""Which of the sizes that are met in a graph: a position in the table of their polynomials, no number of bytes. Sizes
with the same number are equal whatever the symbols stand for; number 0 is nothing at all."""

NO_SIZE = SizeNumber(0)


class Origin(Enum):
    """Where the number that stands for a symbol comes from."""

    EXAMPLE = "size of the example"
    BOUND = "upper bound"
    OPTION = "option unbacked_hint"
    GUESS = "nothing is known of it; a guess"


@dataclass(frozen=True, slots=True)
class SizeSymbol:
    """One symbol of a graph's sizes."""

    name: str
    value: int
    """What it stood for while planning."""
    origin: str
    """Where that number comes from."""
    low: int
    """The least value it can have."""
    high: int | None
    """The largest value it can have; None if nothing is known of that."""
    bound: str = ""
    """What a size that only the data tells is known not to exceed, in terms of other symbols."""


class Forms:
    """Tensors and bytes of one graph in terms of its symbols: found once, read at all sizes."""

    def __init__(self) -> None:
        self._specs: dict[int, TensorSpec] = {}
        self._tensors: list[torch.Tensor] = []
        self._texts: dict[TensorSpec, str] = {}
        self._number_of_spec: dict[TensorSpec, SizeNumber] = {}
        self._number_of_terms: dict[Terms, SizeNumber] = {(): NO_SIZE}
        self.table: list[Terms] = [()]
        """Distinct sizes in bytes, by their numbers."""

    def of(self, size: int | torch.SymInt) -> Any:
        """A size as it is: a number, or an expression of symbols."""
        return size if isinstance(size, int) else expression_of(size)

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor with expressions for sizes. Asking a tensor for those is slow, and every reader does."""
        spec = self._specs.get(id(tensor))
        if spec is None:
            spec = self._specs[id(tensor)] = spec_of(tensor, self.of)
            self._tensors.append(tensor)  # another one would not be told from it if it were gone
        return spec

    def text_of(self, value: object) -> str:
        """What a node returns, as text."""
        if not isinstance(value, torch.Tensor):
            return describe_value(value)
        spec = self.spec_of(value)
        text = self._texts.get(spec)
        if text is None:
            text = self._texts[spec] = describe_value(value)
        return text

    def size_number(self, tensor: torch.Tensor) -> SizeNumber:
        """Which size a tensor's bytes are."""
        spec = self.spec_of(tensor)
        number = self._number_of_spec.get(spec)
        if number is None:
            product: Any = tensor.element_size()
            for factor in spec.shape:
                product = factor * product
            number = self._number_of_spec[spec] = self.number_of(terms_of(product))
        return number

    def number_of(self, terms: Terms) -> SizeNumber:
        """Which size a polynomial is."""
        number = self._number_of_terms.get(terms)
        if number is None:
            number = self._number_of_terms[terms] = SizeNumber(len(self.table))
            self.table.append(terms)
        return number


class Sizes:
    """Numbers for the symbols of one graph, and for every size that is computed from them."""

    def __init__(
        self,
        shape_env: Any,
        values: Mapping[sympy.Symbol, int],
        bounds: Mapping[sympy.Symbol, sympy.Expr],
        origins: Mapping[sympy.Symbol, Origin],
        forms: Forms | None = None,
    ) -> None:
        self.shape_env, self.values, self.bounds, self.origins = shape_env, dict(values), dict(bounds), dict(origins)
        self.forms = Forms() if forms is None else forms
        """What is the same whatever the symbols stand for."""
        self.table = self.forms.table
        self._numbers: dict[Any, int] = {}
        self._specs: dict[TensorSpec, TensorSpec] = {}

    @staticmethod
    def find(nodes: Iterable[fx.Node], unbacked_hint: int | None = None) -> Sizes:
        """Find the symbols in the sizes of a graph's tensors, and a number for each."""
        found = _Found()
        for node in nodes:
            found.add(node)
        return found.sizes(unbacked_hint)

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbols in the sizes of the graph's tensors, in order of their names."""
        return tuple(self.values)

    @property
    def backed(self) -> tuple[sympy.Symbol, ...]:
        """Those of them that inputs have."""
        return tuple(s for s in self.values if self.origins[s] is Origin.EXAMPLE)

    @property
    def guessed(self) -> tuple[sympy.Symbol, ...]:
        """Those of which nothing is known."""
        return tuple(s for s in self.values if self.origins[s] is Origin.GUESS)

    def at(self, values: Mapping[sympy.Symbol, int]) -> Sizes:
        """The same graph at other sizes of its inputs."""
        chosen = {**self.values, **values}
        for symbol, bound in self.bounds.items():
            chosen[symbol] = int(bound.xreplace(integers(chosen))) if bound.free_symbols else int(bound)
        return Sizes(self.shape_env, chosen, self.bounds, self.origins, self.forms)

    def of(self, size: int | torch.SymInt) -> int:
        """The number that a size stands for."""
        return size if isinstance(size, int) else self.value_of(expression_of(size))

    def value_of(self, expression: sympy.Expr) -> int:
        """The number that an expression of sizes stands for."""
        number = self._numbers.get(expression)
        if number is None:
            extra = {s: GUESSED_SIZE for s in expression.free_symbols if s not in self.values}
            # A graph may have numbers that only the data tells, and no tensor with such a size.
            examples = example_values(self.shape_env) if extra and self.shape_env is not None else {}
            known = {s: examples.get(s, n) for s, n in extra.items()}
            number = self._numbers[expression] = int(expression.xreplace(integers({**self.values, **known})))
        return number

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Bytes of a tensor's elements."""
        return spec_of(tensor, self.of).num_bytes if not self.values else self.spec_of(tensor).num_bytes

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor, without guarding on its symbolic sizes."""
        if not self.values:
            return spec_of(tensor)
        form = self.forms.spec_of(tensor)
        spec = self._specs.get(form)
        if spec is None:
            shape, stride = (tuple([self._number(size) for size in sizes]) for sizes in (form.shape, form.stride))
            spec = self._specs[form] = TensorSpec(shape, stride, form.dtype, form.device)
        return spec

    def _number(self, size: Any) -> int:
        return size if isinstance(size, int) else self.value_of(size)

    # ---------------------------------------------------------------------------------------------- polynomials

    def size_number(self, value: Any) -> SizeNumber:
        """Which size the bytes of a tensor's elements are; what is no tensor has none."""
        if not isinstance(value, torch.Tensor):
            return NO_SIZE
        return self.forms.size_number(value) if self.values else self.number_of(terms_of(self.bytes_of(value)))

    def number_of(self, terms: Terms) -> SizeNumber:
        """Which size a polynomial is."""
        return self.forms.number_of(terms)

    @property
    def table_bytes(self) -> list[int]:
        """The bytes of all sizes met so far, by their numbers."""
        return [self.value_of_terms(terms) for terms in self.table]

    def value_of_terms(self, terms: Terms) -> int:
        """The number that a polynomial stands for."""
        return sum(coefficient * self.value_of(monomial) for monomial, coefficient in terms)


def terms_of(expression: Any) -> Terms:
    """An expression as a sum of monomials."""
    import sympy

    if isinstance(expression, int):
        return ((sympy.S.One, expression),) if expression else ()
    pairs = sympy.expand(expression).as_coefficients_dict().items()
    if any(not coefficient.is_Integer for _, coefficient in pairs):
        return ((expression, 1),)
    ordered = sorted(pairs, key=lambda pair: str(pair[0]))
    return tuple((monomial, int(coefficient)) for monomial, coefficient in ordered if coefficient)


def _expressions(sizes: Sequence[int | torch.SymInt]) -> list[Any]:
    return [size if isinstance(size, int) else expression_of(size) for size in sizes]


def integers(values: Mapping[sympy.Symbol, int]) -> dict[Any, Any]:
    """What symbols stand for, as sympy has numbers."""
    import sympy

    return {symbol: sympy.Integer(value) for symbol, value in values.items()}


class _Found:
    """The symbols met so far, and what ops say of them."""

    def __init__(self) -> None:
        self.shape_env: Any = None
        self.symbols: dict[Any, None] = {}
        self.by_op: dict[Any, Any] = {}
        self.seen: set[Any] = set()

    def add(self, node: fx.Node) -> None:
        """Look at the sizes of what a node returns."""
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            sizes: Sequence[int | torch.SymInt] = tensor.shape
            for size in sizes:
                if not isinstance(size, int):
                    self._add_size(size)
            if node.target in _SELECTING:
                self._add_bound(node, tensor)
            elif node.target is torch.ops.aten.index.Tensor:
                self._add_bound_of_mask(node, tensor)

    def _add_size(self, size: torch.SymInt) -> None:
        expression = expression_of(size)
        if expression not in self.seen:
            self.seen.add(expression)
            self.shape_env = shape_env_of(size)
            self.symbols.update(dict.fromkeys(expression.free_symbols))

    def _add_bound(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """A selection has no more rows than there are elements to select from."""
        shapes = [_expressions(source.meta["val"].shape) for source in node.all_input_nodes]
        if all(shape == shapes[0] for shape in shapes):  # one may be broadcast to the other
            self._bound_by(tensor.shape[0], shapes[0])

    def _add_bound_of_mask(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Indexing with a mask selects no more than the mask has elements."""
        indices = node.args[1]
        assert isinstance(indices, (list, tuple))
        given = [(place, index) for place, index in enumerate(indices) if isinstance(index, fx.Node)]
        if len(given) != 1:
            return
        place, index = given[0]
        mask = index.meta["val"]
        if mask.dtype is torch.bool:
            self._bound_by(tensor.shape[place], _expressions(mask.shape))

    def _bound_by(self, rows: int | torch.SymInt, shape: Sequence[Any]) -> None:
        if isinstance(rows, int):
            return
        bound: Any = 1
        for size in shape:
            bound = size * bound
        self.by_op.setdefault(expression_of(rows), bound)

    def sizes(self, unbacked_hint: int | None) -> Sizes:
        """A number for each symbol."""
        import sympy

        ordered = sorted(self.symbols, key=lambda symbol: symbol.name)
        examples = {} if self.shape_env is None else example_values(self.shape_env)
        values = {s: examples[s] for s in ordered if s in examples}
        origins = dict.fromkeys(values, Origin.EXAMPLE)
        bounds: dict[Any, Any] = {}
        for symbol in (s for s in ordered if s not in examples):
            bound = self._bound(symbol, values)
            if bound is not None:
                bounds[symbol], origins[symbol] = sympy.sympify(bound), Origin.BOUND
                values[symbol] = int(bounds[symbol].xreplace(integers(values)))
            else:
                values[symbol] = GUESSED_SIZE if unbacked_hint is None else unbacked_hint
                origins[symbol] = Origin.GUESS if unbacked_hint is None else Origin.OPTION
        return Sizes(self.shape_env, {s: values[s] for s in ordered}, bounds, origins)

    def _bound(self, symbol: Any, backed: Mapping[Any, int]) -> Any:
        """What a size that only the data tells cannot exceed; None if nothing is known."""
        _, high = symbol_bounds(self.shape_env, symbol)
        candidates = [*([] if high is None else [high]), *known_upper_bounds(self.shape_env, symbol)]
        if symbol in self.by_op:
            candidates.append(self.by_op[symbol])
        usable = [b for b in candidates if isinstance(b, int) or b.free_symbols <= backed.keys()]
        return usable[0] if usable else None


_SELECTING = (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
"""Ops whose result has as many rows as elements are selected."""


def describe(sizes: Sizes) -> tuple[SizeSymbol, ...]:
    """The symbols of a graph, as plans state them."""
    return tuple(_described(sizes, symbol) for symbol in sizes.symbols)


def _described(sizes: Sizes, symbol: Any) -> SizeSymbol:
    from .expressions import NotExpressible, write

    low, high = symbol_bounds(sizes.shape_env, symbol)
    bound = sizes.bounds.get(symbol)
    try:
        text = "" if bound is None or not bound.free_symbols else write(bound)
    except NotExpressible:
        text = ""
    return SizeSymbol(symbol.name, sizes.values[symbol], sizes.origins[symbol].value, max(low or 0, 0), high, text)
