"""Expressions of size symbols as text: written from sympy, stored in plans, evaluated without `eval`.

The text is Python's arithmetic with `Max` and `Min`: `Max(4096*s0*s1 + 64, 1024*s0**2)`. Sizes and bytes are whole
numbers; times may have others as factors. What sympy or torch can say beyond that (a size that depends on a condition)
is not expressed, and plans say so.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..torch_private import sympy_functions

if TYPE_CHECKING:
    import sympy

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

_CALLS: Mapping[str, Callable[..., Any]] = {"Max": max, "Min": min}

LARGEST_POWER = 64
"""No product of sizes has as many factors; a damaged file may, and would take for ever."""


class NotExpressible(Exception):
    """A size is computed by something that the text has no words for."""


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """The value of an expression of whole numbers for given sizes."""
    found = _evaluate(_parse(text), values)
    if not isinstance(found, int):
        raise ValueError(f"{text!r} is no expression of whole numbers")
    return found


def evaluate_real(text: str, values: Mapping[str, int]) -> float:
    """The value of an expression for given sizes."""
    found = float(_evaluate(_parse(text), values))
    if not math.isfinite(found):
        raise ValueError(f"{text!r} has no value at these sizes")
    return found


def symbols_in(text: str) -> tuple[str, ...]:
    """The symbols of an expression, in order of their names."""
    return tuple(sorted({n.id for n in ast.walk(_parse(text)) if isinstance(n, ast.Name)} - set(_CALLS)))


@lru_cache(maxsize=1024)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression of sizes") from error


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int(number) | float(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.Name(id=name):
            raise ValueError(f"nothing is said of {name}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _evaluate(left, values), _evaluate(right, values)
            if isinstance(op, ast.Pow) and not 0 <= second <= LARGEST_POWER:
                raise ValueError(f"a size is taken to the power {second}")
            if isinstance(op, (ast.FloorDiv, ast.Mod)) and not second:
                raise ValueError("a size is divided by zero")
            return _BINARY[type(op)](first, second)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name in _CALLS:
            return _CALLS[name]([_evaluate(arg, values) for arg in args])
    raise ValueError(f"`{ast.unparse(node)}` is no part of an expression of sizes")


_RELATIONS: Mapping[str, Callable[[Any, Any], Any]] = {"<=": operator.le, ">=": operator.ge, ">": operator.gt}


def is_true(relation: str, values: Mapping[str, int]) -> bool:
    """Does a relation between two expressions hold for given sizes?"""
    left, compare, right = _sides(relation)
    return bool(compare(evaluate(left, values), evaluate(right, values)))


def to_sympy(relation: str, symbols: Mapping[str, sympy.Symbol]) -> Any:
    """A relation as sympy has it."""
    left, compare, right = _sides(relation)
    return compare(_build(_parse(left), symbols), _build(_parse(right), symbols))


def _sides(relation: str) -> tuple[str, Callable[[Any, Any], Any], str]:
    for text, compare in _RELATIONS.items():
        left, found, right = relation.partition(f" {text} ")
        if found:
            return left, compare, right
    raise ValueError(f"{relation!r} is no relation between sizes")


def _build(node: ast.expr, symbols: Mapping[str, sympy.Symbol]) -> Any:
    import sympy

    made = sympy_functions()
    match node:
        case ast.Constant(value=int(number)):
            return sympy.Integer(number)
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand, symbols)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _build(left, symbols), _build(right, symbols)
            if isinstance(op, (ast.FloorDiv, ast.Mod)):
                return made["FloorDiv" if isinstance(op, ast.FloorDiv) else "PythonMod"](first, second)
            return _BINARY[type(op)](first, second)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args) if name in _CALLS:
            return made[name](*[_build(arg, symbols) for arg in args])
    raise ValueError(f"`{ast.unparse(node)}` is no part of an expression of sizes")


# -------------------------------------------------------------------------------------------------- writing


def largest(first: Any, second: Any) -> Any:
    """The larger of two numbers or expressions."""
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return max(first, second)
    import sympy

    # As it stands: sympy would try to find out which is larger, which takes long and finds nothing.
    return sympy.Max(first, second, evaluate=False)


def largest_of(texts: Sequence[str]) -> str:
    """The largest of several expressions."""
    return texts[0] if len(texts) == 1 else f"Max({', '.join(texts)})"


def weighted_sum(pairs: Sequence[tuple[Any, float]]) -> str:
    """Sympy expressions with factors as text: `0.25*s0*s1 + 3*s0 + 8`."""
    return _sum([(_weighted(expression, factor), _PRODUCT) for expression, factor in pairs]) if pairs else "0"


def _weighted(expression: Any, factor: float) -> str:
    number = str(int(factor)) if factor == int(factor) and abs(factor) < 2**53 else repr(factor)
    if expression == 1:
        return number
    text = _held(_write(expression), _PRODUCT)
    return text if factor == 1 else f"{number}*{text}"


def rounded(text: str) -> str:
    """An expression for people: four digits of what is no whole number."""
    return re.sub(r"(?<![\w.])\d+(\.\d+)?(e[+-]?\d+)?", lambda m: _four_digits(m.group()), text)


def _four_digits(number: str) -> str:
    return number if number.isdecimal() else f"{float(number):.4g}"


def write(expression: sympy.Expr) -> str:
    """A sympy expression as text."""
    return _write(expression)[0]


_SUM, _PRODUCT, _POWER, _ATOM = range(4)
"""How tightly the parts of a text hold together."""


def _write(expr: Any) -> tuple[str, int]:
    """The text, and how tightly it holds together."""
    if expr.is_Integer:
        return str(int(expr)), _ATOM if expr >= 0 else _SUM
    if expr.is_Symbol:
        return str(expr.name), _ATOM
    if expr.is_Add:
        return _sum([_write(arg) for arg in expr.as_ordered_terms()]), _SUM
    if expr.is_Mul:
        return _product(expr), _PRODUCT if expr.args[0] != -1 else _SUM
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return f"{_held(_write(expr.base), _ATOM)}**{int(expr.exp)}", _POWER
    return _call(expr)


def _sum(parts: Sequence[tuple[str, int]]) -> str:
    text = parts[0][0]
    for part, _ in parts[1:]:
        text += f" - {part[1:]}" if part.startswith("-") else f" + {part}"
    return text


def _product(expr: Any) -> str:
    factors = expr.as_ordered_factors()
    sign = ""
    if factors[0] == -1:
        sign, factors = "-", factors[1:]
    return sign + "*".join(_held(_write(factor), _POWER) for factor in factors)


def _held(part: tuple[str, int], tightness: int) -> str:
    text, own = part
    return text if own >= tightness else f"({text})"


def _call(expr: Any) -> tuple[str, int]:
    """What torch's own sympy functions say of sizes."""
    name, args = type(expr).__name__, expr.args
    if name in ("Max", "Min"):
        return f"{name}({', '.join(sorted(_write(arg)[0] for arg in args))})", _ATOM
    if name in ("FloorDiv", "CleanDiv"):
        return f"({_held(_write(args[0]), _ATOM)}//{_held(_write(args[1]), _ATOM)})", _ATOM
    if name == "CeilDiv":
        return f"(-(-{_held(_write(args[0]), _ATOM)}//{_held(_write(args[1]), _ATOM)}))", _ATOM
    if name in ("Mod", "PythonMod"):
        return f"({_held(_write(args[0]), _ATOM)} % {_held(_write(args[1]), _ATOM)})", _ATOM
    if name == "PowByNatural" and args[1].is_Integer:
        return f"{_held(_write(args[0]), _ATOM)}**{int(args[1])}", _POWER
    raise NotExpressible(f"{expr}")
