"""Whose code a file or a module is: decided here for all of the project, by the folders that packages are in.

A name on the way says nothing: people keep programs in `~/torch/` and in clones that are called `remat`. A package's
folder counts as it is spelled where the package was found, and with links followed, since one that is installed for
development is found through a link.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch


class Whose(Enum):
    """Who wrote a piece of code, as far as it makes a difference."""

    USERS = "the user's, or that of a library of his"
    TORCHS = "torch's"
    REMATS = "remat's"
    PYTHONS = "of Python's own library"
    NOBODYS = "generated"


def folders_of(*modules: ModuleType) -> tuple[str, ...]:
    """Return how the names of files begin that lie where some modules do."""
    folders = [Path(module.__file__).parent for module in modules if module.__file__ is not None]
    return tuple(dict.fromkeys(f"{folder}{os.sep}" for given in folders for folder in (given, given.resolve())))


_PASSES = sys.modules[__name__.removesuffix(".shared.whose")]
_REMAT = sys.modules[__name__.partition(".")[0]]
_FOLDERS = {
    Whose.REMATS: folders_of(_REMAT, _PASSES),
    Whose.TORCHS: folders_of(torch),
    Whose.PYTHONS: folders_of(os),
}
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # in Python's folder, but no part of its library
_GENERATED = ("<eval_with_key>", "<frozen ")  # by torch.fx, and Python's import system


@lru_cache(maxsize=4096)
def whose(file: str) -> Whose:
    """Say whose code is in a file, given its name as Python's code objects have it."""
    if file.startswith(_GENERATED):
        return Whose.NOBODYS
    for owner, folders in _FOLDERS.items():
        for folder in folders:
            if file.startswith(folder) and not (owner is Whose.PYTHONS and _is_installed(file[len(folder) :])):
                return owner
    return Whose.USERS


def _is_installed(file: str) -> bool:
    parts: Iterable[str] = Path(file).parts
    return not _INSTALLED.isdisjoint(parts)


def is_users(file: str) -> bool:
    """True for a file of the user's program, or of a library of his."""
    return whose(file) is Whose.USERS


@lru_cache(maxsize=4096)
def is_users_module(name: str) -> bool:
    """True for a module, given by its full name, of the user's program or of a library of his."""
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    return package not in sys.stdlib_module_names if file is None else is_users(file)
