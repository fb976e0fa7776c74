"""What a function's code speaks of, and whose it is: the user's, or that of a library which holds no state of his."""

from __future__ import annotations

import dis
import functools
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...passes.shared import is_users_module


@functools.lru_cache(maxsize=4096)  # asked for each function of each call
def _holds_state(module: str | None) -> bool:
    """True unless it is a library's whose objects, classes and functions hold no state of the user's."""
    return module is None or (is_users_module(module) and module.partition(".")[0] != "numpy")


def is_users_class(cls: type) -> bool:
    """True for a class that is not one of the libraries' without state."""
    return _holds_state(cls.__module__)


def is_users_function(function: Any) -> bool:
    """True for a function that is not one of the libraries' without state."""
    return _holds_state(getattr(function, "__module__", None))


class InertGlobals(NamedTuple):
    """Globals of a function behind which there is nothing of the user's, as long as they are what they were."""

    names: tuple[str, ...]
    values: tuple[Any, ...]
    other_names: tuple[str, ...]


def find_inert(names: tuple[str, ...], variables: dict[str, Any]) -> InertGlobals:
    """Tell the globals behind which there is nothing of the user's from the others."""
    inert = tuple(name for name in names if _is_inert(variables.get(name)))
    others = tuple(name for name in names if name not in inert)
    return InertGlobals(inert, tuple(variables.get(name) for name in inert), others)


def _is_inert(value: Any) -> bool:
    """True for modules, and for functions and classes of torch's, Python's and so on."""
    if value is None or type(value) is types.ModuleType:
        return True
    if isinstance(value, type):
        return not is_users_class(value)
    return isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and not is_users_function(value)


@dataclass(slots=True)
class CodeFacts:
    """The names that a function's code speaks of."""

    code: types.CodeType
    """Held, so that no other code takes its id."""
    free_names: tuple[str, ...]
    global_names: tuple[str, ...]
    inert: InertGlobals | None = None
    """Of the function that had this code when it was last looked into."""


_MAX_CODES = 4096
# By id: the hash of a code object is computed from all it consists of, each time.
facts_of_codes: dict[int, CodeFacts] = {}


def look_at_code(code: types.CodeType) -> CodeFacts:
    """Find the names that a piece of code speaks of, and remember them."""
    if len(facts_of_codes) >= _MAX_CODES:
        facts_of_codes.clear()
    facts = facts_of_codes[id(code)] = CodeFacts(code, code.co_freevars, global_names(code))
    return facts


_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function's code, inner functions included, may look up as globals."""
    loads = (i for i in dis.get_instructions(code) if i.opname in _GLOBAL_LOADS)
    names = dict.fromkeys(i.argval for i in loads)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(dict.fromkeys(global_names(const)))
    return tuple(names)
