"""Dataclasses from JSON data: every field is looked at, and what is wrong with one is an error that names its path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, fields, is_dataclass
from enum import Enum, EnumType
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""Turns JSON data into what a field holds; the text is the field's path."""

NOT_STORED = {"is_stored": False}
"""Metadata of a field that says something of an object in memory, and is not part of its JSON form."""

LARGEST = 2**63 - 1
"""No count of bytes, size or position is larger; a damaged file's may be, and nothing can be computed with it."""

LONGEST_SHOWN = 60
"""Characters of a value that an error shows."""


class Damaged(ValueError):
    """Stored data is not what its form says."""


def read(kind: type[T], data: Any) -> T:
    """Make a dataclass from JSON data; errors begin with the path of the field that is wrong."""
    return cast("T", _reader(cast("Any", kind))(data, ""))


def stored(instance: Any) -> dict[str, Any]:
    """What of a dataclass is part of its JSON form."""
    names = {field.name for field in fields(instance) if _is_stored(field)}
    return {name: value for name, value in asdict(instance).items() if name in names}


def _is_stored(field: Field[Any]) -> bool:
    return bool(field.metadata.get("is_stored", True))


def refused(path: str, value: object, expected: str) -> Damaged:
    """Say which field is wrong, what it holds and what it should."""
    return Damaged(f"{path or 'it'} is {shown(value)}, expected {expected}")


def shown(value: object) -> str:
    """A value for an error, cut short."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


@cache
def _reader(kind: Any) -> Reader:
    """What reads values of a type, as annotations write it."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, EnumType):
        return _enum_reader(cast("type[Enum]", kind))
    if is_dataclass(kind):
        return _object_reader(cast("type[Any]", kind))
    if get_origin(kind) is UnionType:
        return _optional_reader(*[part for part in get_args(kind) if part is not NoneType])
    assert get_origin(kind) is tuple, f"no field has type {kind}"
    item, *others = get_args(kind)
    return _list_reader(item) if others == [...] else _row_reader(get_args(kind))


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise refused(path, value, "a text")
    return value


def _is_true(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise refused(path, value, "true or false")
    return value


def _whole(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise refused(path, value, "a whole number from 0")
    return value


def _number(value: Any, path: str) -> float:
    # What is not a number is not between any two, and infinity is beyond the largest.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise refused(path, value, "a number from 0")
    return value


_PLAIN: Mapping[Any, Reader] = {str: _text, bool: _is_true, int: _whole, float: _number}


def _enum_reader(kind: type[Enum]) -> Reader:
    names = ", ".join(repr(name) for name in kind.__members__)

    def read_name(value: Any, path: str) -> Enum:
        if not isinstance(value, str) or value not in kind.__members__:
            raise refused(path, value, f"one of {names}")
        return kind[value]

    return read_name


def _optional_reader(kind: Any) -> Reader:
    inner = _reader(kind)

    def read_optional(value: Any, path: str) -> Any:
        if value is None:
            return None
        try:
            return inner(value, path)
        except Damaged as error:
            raise Damaged(f"{error}, or null" if kind in _PLAIN else str(error)) from None

    return read_optional


def _list_reader(kind: Any) -> Reader:
    item = _reader(kind)

    def read_list(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise refused(path, value, "a list")
        return tuple([item(part, f"{path}[{k}]") for k, part in enumerate(value)])

    return read_list


def _row_reader(kinds: tuple[Any, ...]) -> Reader:
    items = [_reader(kind) for kind in kinds]

    def read_row(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise refused(path, value, f"a list of {len(items)}")
        return tuple([item(part, f"{path}[{k}]") for k, (item, part) in enumerate(zip(items, value, strict=True))])

    return read_row


def _object_reader(kind: type[Any]) -> Reader:
    hints = get_type_hints(kind)
    items = {field.name: _reader(hints[field.name]) for field in fields(kind) if _is_stored(field)}

    def read_object(value: Any, path: str) -> Any:
        inside = f"{path}." if path else ""
        if not isinstance(value, dict):
            raise refused(path, value, "an object with fields")
        unknown = next((name for name in value if name not in items), None)
        if unknown is not None:
            raise Damaged(f"{inside}{unknown} is no field of it; expected {', '.join(items)}")
        missing = [f"{inside}{name}" for name in items if name not in value]
        if missing:
            raise Damaged(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        return kind(**{name: items[name](part, f"{inside}{name}") for name, part in value.items()})

    return read_object
