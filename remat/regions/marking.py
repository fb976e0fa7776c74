"""What can be marked as a region, and with which options: everything else is an error that says what to do."""

from __future__ import annotations

import difflib
import inspect
import os
from typing import Any

from torch import nn

from ..passes.shared import OptionError

TIERS = ("cpu", "disk")
"""Where offloaded values may wait: in host memory, or in a file."""

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
    check_offload(options.get("offload", "cpu"), options.get("offload_folder"))
    if options.get("offload", "cpu") == "disk" and options.get("policy") is None:
        raise OptionError(
            'checkpoint_region(offload="disk") says where the values go that a policy offloads, and this region has no '
            "policy, so it recomputes everything. Give one that offloads, such as remat.policies.offload_names(...)."
        )


def check_offload(offload: Any, folder: Any) -> None:
    """Raise for a place to offload to that does not exist, or that is not said in full."""
    if offload not in TIERS:
        raise OptionError(f"offload={offload!r}: expected {' or '.join(repr(tier) for tier in TIERS)}")
    if offload == "disk" and not (isinstance(folder, (str, os.PathLike)) and os.fspath(folder)):
        raise OptionError(
            f'offload="disk" needs a folder on a disk with room for what is offloaded: offload_folder="/scratch/me", '
            f"not {folder!r}"
        )
    if offload != "disk" and folder is not None:
        raise OptionError(f'offload_folder={folder!r} goes with offload="disk", not with offload={offload!r}')


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
