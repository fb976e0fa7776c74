"""Read what was stored as text, with errors that name the file."""

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
