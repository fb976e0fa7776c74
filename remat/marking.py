"""What can be marked as a region, and with which options: everything else is an error that says what to do."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from torch import nn

from remat.passes.errors import OptionError

SWITCHES = ("preserve_rng_state", "early_stop", "debug")


def check_markable(function: Any) -> None:
    """Raise for what is no function, method or module, and for functions that do not do their work when called."""
    if not callable(function):
        raise OptionError(
            f"checkpoint_region marks a function, a method or a module, not {type(function).__name__}. "
            "Write @checkpoint_region above the function; options go by keyword: "
            '@checkpoint_region(name="mlp").'
        )
    if isinstance(function, type):
        raise OptionError(
            f"checkpoint_region marks a function, a method or a module, and {function.__name__} is a class. "
            "Mark its forward method, or an instance of it."
        )
    target = function.forward if isinstance(function, nn.Module) else function
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise OptionError(
            f"checkpoint_region cannot mark {_name_of(function)}: it is a generator, which computes only when it is "
            "iterated over, after the call that would be the region. Mark a function that returns its results, such as "
            "the one that computes a single item."
        )
    if inspect.iscoroutinefunction(target):
        raise OptionError(
            f"checkpoint_region cannot mark {_name_of(function)}: it is a coroutine (async def), which computes only "
            "when it is awaited, after the call that would be the region. Mark a plain function that it calls."
        )


def check_options(name: Any, options: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise for options that do not exist, and for values that are not of the option's type."""
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(
                f"checkpoint_region has no option {option!r}; it has {', '.join(repr(k) for k in known)}.{hint}"
            )
    if name is not None and (not isinstance(name, str) or not name):
        raise OptionError(f'checkpoint_region(name={name!r}): a name is a text that is not empty, such as "mlp"')
    for option in SWITCHES:
        if option in options and not isinstance(options[option], bool):
            raise OptionError(f"checkpoint_region({option}={options[option]!r}): expected True or False")


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
