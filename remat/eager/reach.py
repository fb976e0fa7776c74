"""What a function can reach: tensors, modules and generators that a region may read besides its arguments.

Found by looking, not by running: closure cells, the globals its code names, a method's object, a partial's
arguments, and containers of those. The module tree below each module found is walked once and remembered.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat.eager.generators import is_generator_class

_MAX_DEPTH = 4  # closures inside closures; each wrapper around the user's function takes one
_MAX_ITEMS = 256  # of one container

Name = Any  # a string, or (name of a container, key in it): put together only when somebody reads it

TENSOR, MODULE, GENERATOR, CALLABLE, CONTAINER, OBJECT, NOTHING = range(7)

# Packages whose objects and classes hold no generators of the user's.
_WITHOUT_GENERATORS = frozenset({"torch", "numpy", "remat", *sys.stdlib_module_names})


@dataclass(slots=True)
class Reached:
    """Tensors with their names, modules with their names, and explicit generators."""

    tensors: list[tuple[Name, torch.Tensor]] = field(default_factory=list)
    modules: list[tuple[Name, nn.Module]] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)


def name_text(name: Name) -> str:
    """Return a name as Python code would spell it."""
    return name if isinstance(name, str) else f"{name_text(name[0])}[{name[1]!r}]"


_LOOKED_AT_IN_GLOBALS = frozenset({TENSOR, MODULE, GENERATOR, OBJECT})
_kinds: dict[type, int] = {}


def _kind_of(cls: type) -> int:
    if issubclass(cls, torch.Tensor):
        return TENSOR
    if issubclass(cls, nn.Module):
        return MODULE
    if is_generator_class(cls):
        return GENERATOR
    if issubclass(cls, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)):
        return CALLABLE
    if issubclass(cls, (list, tuple, dict)):
        return CONTAINER
    is_class = issubclass(cls, type)
    return OBJECT if is_class or cls.__module__.partition(".")[0] not in _WITHOUT_GENERATORS else NOTHING


def kind_of(value: Any) -> int:
    """Return what a value is to us; remembered per type."""
    cls = type(value)
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _kind_of(cls)
    return kind


def reach(function: Any) -> Reached:
    """Return what a function can reach without its arguments."""
    found = Reached()
    _visit_callable("", function, found, _MAX_DEPTH)
    return found


def reach_arguments(names: Iterable[Any], values: Iterable[Any], found: Reached) -> None:
    """Add what arguments lead to; tensors among the arguments themselves are looked after elsewhere."""
    for name, value in zip(names, values, strict=False):
        kind = _kinds.get(type(value))
        if kind != NOTHING and kind != TENSOR and kind_of(value) != TENSOR:
            _visit(f"argument {name}", value, found, _MAX_DEPTH)


def _visit(name: Name, value: Any, found: Reached, depth: int) -> None:
    kind = kind_of(value)
    if kind == NOTHING:
        return
    if kind == TENSOR:
        found.tensors.append((name, value))
    elif kind == MODULE:
        if all(value is not module for _, module in found.modules):
            found.modules.append((name, value))
    elif kind == GENERATOR:
        found.generators.append(value)
    elif kind == OBJECT:
        _visit_attributes(value, found)
    elif depth > 0 and kind == CALLABLE:
        _visit_callable(name, value, found, depth - 1)
    elif depth > 0 and kind == CONTAINER and len(value) <= _MAX_ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            item_kind = _kinds.get(type(item))
            if item_kind == TENSOR:
                found.tensors.append(((name, key), item))
            elif item_kind != NOTHING:
                _visit((name, key), item, found, depth - 1)


def _visit_callable(name: Name, function: Any, found: Reached, depth: int) -> None:
    cls = type(function)
    if cls is types.FunctionType:
        _visit_function(function, found, depth)
    elif cls is types.MethodType:
        _visit("self", function.__self__, found, depth)
        if kind_of(function.__self__) in (NOTHING, OBJECT):
            _visit_object(function.__self__, found, depth)
        _visit_callable(name, function.__func__, found, depth)
    elif cls is types.BuiltinFunctionType:
        if kind_of(function.__self__) == GENERATOR:  # `generator.random`, say
            _visit(name, function.__self__, found, depth)
    elif isinstance(function, nn.Module):
        _visit(name, function, found, depth)
        _visit_object(function, found, 0)
    elif isinstance(function, functools.partial):
        _visit_callable(name, function.func, found, depth)
        _visit("partial argument", function.args, found, depth)
        _visit("partial argument", function.keywords, found, depth)
    else:
        _visit_object(function, found, depth)


def _visit_attributes(obj: Any, found: Reached) -> None:
    """Look for generators among the attributes of an object or class of the user's."""
    if isinstance(obj, type) and obj.__module__.partition(".")[0] in _WITHOUT_GENERATORS:
        return
    if not isinstance(obj, type):
        found.generators += [v for v in getattr(obj, "__dict__", {}).values() if kind_of(v) == GENERATOR]
        return
    names = _generators_of_classes.get(obj)
    if names is None:
        names = _generators_of_classes[obj] = [n for n, v in vars(obj).items() if kind_of(v) == GENERATOR]
    found.generators += [v for v in (getattr(obj, n, None) for n in names) if kind_of(v) == GENERATOR]


_generators_of_classes: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _visit_object(obj: Any, found: Reached, depth: int) -> None:
    for name, value in getattr(obj, "__dict__", {}).items():
        kind = kind_of(value)
        if kind == GENERATOR or (depth > 0 and kind in (TENSOR, MODULE)):
            _visit(name, value, found, depth)


def _visit_function(function: types.FunctionType, found: Reached, depth: int) -> None:
    code = function.__code__
    if function.__closure__ is not None:
        for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            kind = _kinds.get(type(value))
            if kind == TENSOR:
                found.tensors.append((name, value))
            elif kind != NOTHING:
                _visit(name, value, found, depth)
    variables = function.__globals__
    if function.__module__ is not None and function.__module__.split(".", 1)[0] == "torch":
        return  # torch's own globals hold no user state
    for name in _global_names(code):
        value = variables.get(name)
        if value is not None:
            kind = _kinds.get(type(value))
            if kind is None or kind in _LOOKED_AT_IN_GLOBALS:
                _visit_global(name, value, found, depth)
    if function.__defaults__:
        _visit("default argument", function.__defaults__, found, depth)


def _visit_global(name: str, value: Any, found: Reached, depth: int) -> None:
    if kind_of(value) in _LOOKED_AT_IN_GLOBALS:
        _visit(name, value, found, depth)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function's code, inner functions included, may look up as globals."""
    names = dict.fromkeys(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.update(dict.fromkeys(_global_names(const)))
    return tuple(names)


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The parameter dictionaries of a module tree, and its modules that own buffers, with their names.

    Modules are held weakly: the tree is remembered under its root and must not keep that alive.
    """

    num_children: int
    parameters: tuple[tuple[str, dict[str, Any]], ...]
    with_buffers: tuple[tuple[str, weakref.ref[nn.Module]], ...]
    with_generators: tuple[tuple[weakref.ref[nn.Module], str], ...]

    def generators(self) -> list[Any]:
        """Return the generators that are attributes of the modules."""
        found = []
        for reference, name in self.with_generators:
            module = reference()
            value = module.__dict__.get(name) if module is not None else None
            if kind_of(value) == GENERATOR:
                found.append(value)
        return found


_trees: weakref.WeakKeyDictionary[nn.Module, ModuleTree] = weakref.WeakKeyDictionary()


def module_tree(module: nn.Module) -> ModuleTree:
    """Return a module's tree, walked once per module object."""
    tree = _trees.get(module)
    if tree is None or tree.num_children != len(module._modules):
        tree = _trees[module] = _walk_module(module)
    return tree


def _walk_module(module: nn.Module) -> ModuleTree:
    named = list(module.named_modules())
    return ModuleTree(
        num_children=len(module._modules),
        parameters=tuple((name, child._parameters) for name, child in named if child._parameters),
        with_buffers=tuple((name, weakref.ref(child)) for name, child in named if child._buffers),
        with_generators=tuple(
            (weakref.ref(m), name) for _, m in named for name, v in m.__dict__.items() if kind_of(v) == GENERATOR
        ),
    )


def generators_of(reached: Reached) -> list[Any]:
    """Return every explicit generator that was reached, those of the modules included."""
    found = reached.generators
    for _, module in reached.modules:
        tree = module_tree(module)
        if tree.with_generators:
            found = [*found, *tree.generators()]
    return found
