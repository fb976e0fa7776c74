"""Turn submodules of a model into regions, by name, class or predicate, and undo it.

    remat.apply(model, "layers.*", policy=remat.policies.save_matmuls())
    remat.apply(model, LlamaDecoderLayer)
    remat.apply(model, lambda name, module: name.endswith("mlp"), name="mlp")
    remat.remove(model)

A marked module keeps its type, parameters, state_dict and hooks, and can be copied and pickled; only its `forward` is
wrapped. In a pattern `*` stands for one name or a part of one, `**` for any number of names, and the empty pattern for
the model itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from remat.regions.region import checkpoint_region, region_of_module, remove_region

from ..passes.shared import OptionError, Policy, matches

Target = str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]

_MAX_SHOWN = 8
_MAX_CLASSES = 20


@dataclass(frozen=True, slots=True)
class Applied:
    """Which submodules of a model were marked as regions, or unmarked."""

    names: tuple[str, ...]
    """Their paths below the model, in the model's order; the model itself has the empty path."""
    classes: tuple[str, ...]
    """The class of each."""
    action: str = "marked as a region"

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        if not self.names:
            return f"no module {self.action}"
        lines = [f"  {_shown(n)} ({c})" for n, c in zip(self.names, self.classes, strict=True)]
        if len(lines) > 2 * _MAX_SHOWN:
            lines[_MAX_SHOWN:-_MAX_SHOWN] = [f"  ... {len(lines) - 2 * _MAX_SHOWN} more"]
        return "\n".join([f"{len(self.names)} module{'s' * (len(self.names) > 1)} {self.action}:", *lines])


def apply(
    model: nn.Module,
    target: Target,
    *,
    policy: Policy | None = None,
    memory_budget: Any = None,
    name: str | None = None,
    **options: Any,
) -> Applied:
    """Mark every submodule that matches as a region and return which ones; none is an error.

    Each region is called by its module's path unless a name is given. Policy, budget and further options are those of
    `checkpoint_region`. A module that is a region already is an error: `remove` it first.
    """
    found = _find(model, target, "apply")
    for path, module in found:
        region = region_of_module(module)
        if region is not None:
            raise OptionError(
                f"remat.apply: {_shown(path)} is a region already (name {region.name!r}, policy {region.policy!r}). "
                f"Undo that first: remat.remove(model, {path!r})."
            )
    region_options = {"policy": policy, "memory_budget": memory_budget, **options}
    for path, module in found:
        checkpoint_region(name=name or path or type(module).__name__, **region_options)(module)
    return _summary(found, "marked as a region")


def remove(model: nn.Module, target: Target | None = None) -> Applied:
    """Undo `apply` (and `checkpoint_region` on modules) below a model, or where something matches."""
    found = _named_modules(model) if target is None else _find(model, target, "remove")
    marked = [(path, module) for path, module in found if region_of_module(module) is not None]
    for _, module in marked:
        remove_region(module)
    return _summary(marked, "unmarked")


def _summary(found: list[tuple[str, nn.Module]], action: str) -> Applied:
    return Applied(tuple(path for path, _ in found), tuple(type(module).__name__ for _, module in found), action)


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise OptionError(f"expected a torch.nn.Module whose submodules are meant, not {type(model).__name__}")
    return list(model.named_modules())


def _find(model: nn.Module, target: Any, caller: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that match, each once, under the first of its names that does."""
    _named_modules(model)
    is_meant = _predicate(target, caller)
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):  # a shared module may match by any of its names
        if id(module) not in found and is_meant(path, module):
            found[id(module)] = (path, module)
    if not found:
        raise OptionError(f"remat.{caller}: {_nothing_found(model, target)}")
    return list(found.values())


def _predicate(target: Any, caller: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(target, str):
        if target and not all(target.split(".")):
            raise OptionError(f"remat.{caller}: {target!r} is no pattern of a path like 'layers.*.mlp'")
        return lambda path, _: matches(target, path)
    classes = target if isinstance(target, tuple) else (target,)
    if classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        return lambda _, module: isinstance(module, classes)
    if callable(target) and not isinstance(target, (type, nn.Module)):
        return lambda path, module: bool(target(path, module))
    raise OptionError(
        f"remat.{caller}: {target!r} says no modules. Give a pattern of their paths like 'layers.*.mlp', a class of "
        "modules or a tuple of classes, or a function (path, module) -> bool."
    )


def _nothing_found(model: nn.Module, target: Any) -> str:
    paths = [path for path, _ in model.named_modules() if path]
    if isinstance(target, str):
        near = _near_paths(target, paths)
        hint = f"Did you mean {_listed(near)}?" if near else f"The model has {_listed(paths[:_MAX_SHOWN]) or 'none'}."
        return f"no submodule of {type(model).__name__} matches {target!r}. {hint}"
    if isinstance(target, (type, tuple)):
        wanted = target if isinstance(target, tuple) else (target,)
        names = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
        near = [n for c in wanted for n in difflib.get_close_matches(c.__name__, names, n=3)]
        hint = f"Did you mean {_listed(near)}?" if near else f"It has {_listed(names[:_MAX_CLASSES])}."
        return f"no submodule of {type(model).__name__} is a {' or '.join(c.__name__ for c in wanted)}. {hint}"
    shown = _listed(paths[:_MAX_SHOWN]) or "no submodules"
    return f"the predicate is true for no submodule of {type(model).__name__}, which has {shown}."


def _near_paths(pattern: str, paths: list[str]) -> list[str]:
    """Return paths that a pattern may have been meant for: the same below another root, or spelled alike."""
    nested = [path for path in paths if matches(f"**.{pattern}", path)]
    if nested:
        return nested[:_MAX_SHOWN]
    # Numbers and wildcards stand for each other when it comes to likeness.
    plain = {path: ".".join("*" if part.isdigit() else part for part in path.split(".")) for path in paths}
    close = difflib.get_close_matches(pattern, list(dict.fromkeys(plain.values())), n=3, cutoff=0.6)
    return close or difflib.get_close_matches(pattern, paths, n=3, cutoff=0.6)


def _listed(names: list[str]) -> str:
    quoted = [repr(n) for n in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}" if quoted else ""


def _shown(path: str) -> str:
    return path or "the model itself"
