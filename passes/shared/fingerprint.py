"""A short text that changes whenever a user's function does: what cache keys are made of."""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from ..torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket

_VERSIONED = frozenset({"torch", "numpy", "sympy", "networkx", "remat", *sys.stdlib_module_names})
"""Packages whose content changes only with a version that is in every key, or with Python's own."""


def fingerprint(function: Callable[..., Any]) -> str:
    """Describe a callable by its code, constants, defaults, attributes, and the values it closes over or reads.

    What cannot be described (an object with hidden state, a module of the user's) gets a random text: it never hits a
    cache, and so never a wrong entry.
    """
    return hashlib.sha256("\n".join(_describe(function, ())).encode()).hexdigest()[:16]


def _describe(value: Any, above: tuple[int, ...]) -> Iterator[str]:
    """Lines that stand for a value; `above` holds what it is inside of, so that cycles end."""
    if id(value) in above:
        yield "cycle"
    elif value is None or isinstance(value, (str, bytes, int, float, complex, bool)):
        yield f"{type(value).__name__} {value!r}"
    elif _is_versioned(value) and not isinstance(value, OpOverload):  # whose name leaves out which overload it is
        yield f"{value.__module__}.{value.__qualname__}"
    elif isinstance(value, ModuleType):
        yield f"module {value.__name__}" if value.__name__.split(".")[0] in _VERSIONED else _unknown(value)
    else:
        yield type(value).__name__
        for part in _parts(value):
            yield from _describe(part, (*above, id(value)))


def _is_versioned(value: Any) -> bool:
    """True for classes and plain functions of a package with a version."""
    module = getattr(value, "__module__", None)
    is_named = isinstance(getattr(value, "__qualname__", None), str) and "<locals>" not in value.__qualname__
    is_plain = getattr(value, "__self__", None) is None
    return is_named and is_plain and isinstance(module, str) and module.split(".")[0] in _VERSIONED


def _parts(value: Any) -> Iterator[Any]:
    """What a value consists of; something random for what hides its parts."""
    match value:
        case FunctionType():
            yield from (value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, value.__dict__)
            yield from value.__closure__ or ()
            names = sorted(_names_in(value.__code__))
            yield from ((name, value.__globals__[name]) for name in names if name in value.__globals__)
        case CodeType():
            yield from (value.co_code, value.co_names, value.co_consts)
            if not _imported_in(value) <= _VERSIONED:
                yield _unknown(value)
        case CellType():
            try:
                yield value.cell_contents
            except ValueError:  # not filled yet
                yield "empty"
        case functools.partial():
            yield from (value.func, value.args, value.keywords)
        case tuple() | list():
            yield from value
        case dict():
            yield from value.items()
        case set() | frozenset():
            yield from sorted(repr(item) for item in value)
        case OpOverload() | OpOverloadPacket() | HigherOrderOperator():
            yield str(value)
        case Enum():
            yield (type(value).__module__, type(value).__qualname__, value.name)
        case _ if is_dataclass(value) and _is_versioned(type(value)):
            yield (type(value).__module__, type(value).__qualname__)
            yield from ((f.name, getattr(value, f.name)) for f in fields(value) if f.compare)
        case _:
            yield _unknown(value)


def _names_in(code: CodeType) -> set[str]:
    """Names that a function reads, those of its inner functions and comprehensions included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for part in inner for name in _names_in(part))}


def _imported_in(code: CodeType) -> set[str]:
    """Packages that a function imports when it runs."""
    return {str(i.argval).split(".")[0] for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}


def _unknown(value: Any) -> str:
    return f"{type(value).__name__} {uuid.uuid4()}"
