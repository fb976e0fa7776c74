"""Store text and read what was stored, with errors that name the file, and find the form of what is to be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from .errors import OptionError

T = TypeVar("T")


def parsed_file(path: str | os.PathLike[str], parse: Callable[[str], T]) -> T:
    """Parse a text file; what is wrong with its content is an error with the file's name in front."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file; one that is there already is replaced as a whole, or stays as it is."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{os.fspath(path)!r} cannot be written: there is no folder {str(target.parent)!r}")
    if target.is_dir():
        raise IsADirectoryError(f"{os.fspath(path)!r} cannot be written: it is a folder; name a file in it")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def form_of(path: str | os.PathLike[str], forms: Iterable[str]) -> str:
    """The form in which a file is to be written, by its suffix; an error if that is none, or if it has no folder."""
    target, known = Path(path), tuple(forms)
    form = target.suffix.lower()
    if form not in known:
        raise OptionError(f"{os.fspath(path)!r}: expected a file name that ends in {', '.join(known)}")
    if not target.parent.is_dir():
        raise OptionError(f"{os.fspath(path)!r}: there is no folder {os.fspath(target.parent)!r}")
    return form
