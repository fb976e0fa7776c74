"""Store text, and read what was stored, with errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
