"""A short text that changes whenever a user's function does: what cache keys are made of."""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any


def fingerprint(function: Callable[..., Any]) -> str:
    """Describe a callable by its code, constants, defaults and closed-over values.

    What cannot be described (an object with hidden state) gets a random text: it never hits a cache, and so never a
    wrong entry.
    """
    return hashlib.sha256("\n".join(_describe(function, ())).encode()).hexdigest()[:16]


def _describe(value: Any, above: tuple[int, ...]) -> list[str]:
    """Lines that stand for a value; `above` holds the functions around it, so that recursion ends."""
    if isinstance(value, FunctionType):
        return _describe_function(value, above)
    if isinstance(value, functools.partial):
        return ["partial", *_describe((value.func, value.args, tuple(sorted(value.keywords.items()))), above)]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), repr(value.co_names), *_describe(value.co_consts, above)]
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *(line for item in value for line in _describe(item, above))]
    if isinstance(value, dict):
        return _describe(tuple(value.items()), above)
    if isinstance(value, (frozenset, set)):
        return ["set", *sorted(repr(item) for item in value)]
    if value is None or isinstance(value, (str, bytes, int, float, complex, bool)):
        return [f"{type(value).__name__} {value!r}"]
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    # Classes and functions of these packages change only with their versions, which are in every key.
    if name and getattr(value, "__module__", "").split(".")[0] in ("builtins", "math", "torch", "remat"):
        return [f"{value.__module__}.{name}"]
    return [_unknown(value)]


def _describe_function(function: FunctionType, above: tuple[int, ...]) -> list[str]:
    name = f"{function.__module__}.{function.__qualname__}"
    if id(function) in above:
        return [name]
    above = (*above, id(function))
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    used = {n: function.__globals__[n] for n in _names_in(function.__code__) if n in function.__globals__}
    return [
        name,
        *_describe(function.__code__, above),
        *_describe((function.__defaults__, function.__kwdefaults__ or {}), above),
        *_describe(cells, above),
        *(line for name, value in sorted(used.items()) for line in [name, *_describe_global(value, above)]),
    ]


def _names_in(code: CodeType) -> set[str]:
    """Names that a function reads, those of its inner functions and comprehensions included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for part in inner for name in _names_in(part))}


def _describe_global(value: Any, above: tuple[int, ...]) -> list[str]:
    """Functions and constants count by content; modules by name, since their content is versioned elsewhere."""
    if isinstance(value, ModuleType):
        return [f"module {value.__name__} {getattr(value, '__version__', '')}"]
    return _describe(value, above)


def _unknown(value: Any) -> str:
    return f"{type(value).__name__} {uuid.uuid4()}"
