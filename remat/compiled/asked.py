"""Checks of what `explain` and `pareto` are asked about: a function, and arguments that it takes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..passes.shared import OptionError


def check_call(asking: Callable[..., Any], function: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse what cannot be called, and arguments that look like a misspelt option of `asking`."""
    name = asking.__name__
    if not callable(function):
        raise OptionError(f"{name}({function!r}): expected a module or a function, and then its arguments")
    taken = _keywords_of(function)
    options = _options_of(asking)
    for given in kwargs:
        near = difflib.get_close_matches(given, options, n=1, cutoff=0.8)
        if taken is not None and given not in taken and near:
            raise OptionError(
                f"{name}(..., {given}=...): the function that is asked about takes no argument {given!r}, and {name} "
                f"has no such option. Did you mean {near[0]!r}?"
            )


def _options_of(asking: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(asking).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _keywords_of(function: Any) -> frozenset[str] | None:
    """The names of arguments that a function takes by keyword; None if it takes any, or does not say."""
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    try:
        found = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    except (TypeError, ValueError):  # what is written in C may not say
        return None
    kinds = {parameter.kind for parameter in found.values()}
    return None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(found)
