"""What a function can reach: tensors, modules and generators that a region may read besides its arguments.

Found by looking, not by running: closure cells, the globals its code names, a method's object, a partial's
arguments, attributes of objects, and containers of those, to any depth and up to a number of objects. What global
functions and module trees lead to is found once and remembered. What is missed all the same, and changed by the
region, is met by the guard of the region's first recomputation (`remat.eager.state.state.WriteGuard`).
"""

from __future__ import annotations

import collections
import functools
import operator
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.eager.state.code_facts import (
    facts_of_codes,
    find_inert,
    global_names,
    is_users_class,
    is_users_function,
    look_at_code,
)
from remat.eager.state.generators import is_generator_class

_MAX_VISITS = 2048  # objects looked into for one call of a region
_MAX_ITEMS = 256  # of one container

Name = Any  # a string, or (name of a container, key in it): put together only when somebody reads it

_PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})

TENSOR, MODULE, GENERATOR, CALLABLE, CONTAINER, OBJECT, NOTHING = range(7)


class Reached:
    """Tensors with their names, modules with their names, explicit generators, and the functions gone through."""

    __slots__ = ("codes", "generators", "modules", "tensor_names", "tensors", "visited")

    def __init__(self, visited: dict[int, Any] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        # Beside the tensors, so that those can be gone through quickly: one name each, or a list's and its length.
        self.tensor_names: list[tuple[Name, int | None]] = []
        self.modules: list[tuple[Name, nn.Module]] = []
        self.generators: list[Any] = []
        self.codes: list[types.CodeType] = []
        # By id, and held, so that no other object takes the id.
        self.visited: dict[int, Any] = {} if visited is None else visited

    def is_empty(self) -> bool:
        """True if nothing was found that a region might read."""
        return not (self.tensors or self.modules or self.generators)


def each_name(names: list[tuple[Name, int | None]]) -> Iterator[Name]:
    """Return the names of all tensors that were reached, in their order."""
    for name, length in names:
        if length is None:
            yield name
        else:
            yield from ((name, key) for key in range(length))


def name_text(name: Name) -> str:
    """Return a name as Python code would spell it."""
    return name if isinstance(name, str) else f"{name_text(name[0])}[{name[1]!r}]"


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
    if issubclass(cls, (list, tuple, dict, set, collections.deque)):
        return CONTAINER
    return OBJECT if issubclass(cls, (type, types.SimpleNamespace)) or is_users_class(cls) else NOTHING


def kind_of(value: Any) -> int:
    """Return what a value is to us; remembered per type."""
    cls = type(value)
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _kind_of(cls)
    return kind


def reach(function: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Reached:
    """Return what a function can reach, by itself or from arguments.

    Tensors among the arguments themselves are left out: they are looked after elsewhere.
    """
    found = Reached()
    todo: Todo = []
    if type(function) is types.FunctionType:
        _look_into_function(function, found, todo)
    else:
        _look_into_callable("", function, found, todo)
    for position, value in enumerate(args):
        kind = _kinds.get(type(value))
        if kind != TENSOR and kind != NOTHING and kind_of(value) != TENSOR:
            _meet(f"argument {position}", value, found, todo)
    if kwargs:
        for name, value in kwargs.items():
            if kind_of(value) != TENSOR:
                _meet(f"argument {name}", value, found, todo)
    if todo:
        _finish(todo, found)
    return found


Todo = list[tuple[Name, Any, int]]  # objects still to be looked into, with their kinds


def _finish(todo: Todo, found: Reached, *, until_found: bool = False) -> None:
    """Look into all that is left, nearest first, within the limit; or only until there is anything."""
    index = 0
    while index < len(todo) and len(found.visited) < _MAX_VISITS:
        if until_found and not found.is_empty():
            return
        name, value, kind = todo[index]
        index += 1
        if kind == CALLABLE:
            _look_into_callable(name, value, found, todo)
        elif kind == MODULE:
            _look_into_module(value, found, todo)
        elif kind == CONTAINER:
            _look_into_container(name, value, found, todo)
        else:
            _look_into_object(value, found, todo)


def _meet(name: Name, value: Any, found: Reached, todo: Todo) -> None:
    """Note a value that was found, and what is to be looked into."""
    kind = _kinds.get(type(value))
    if kind is None:
        kind = kind_of(value)
    if kind == NOTHING:
        return
    if kind == TENSOR:
        found.tensors.append(value)
        found.tensor_names.append((name, None))
    elif kind == GENERATOR:
        found.generators.append(value)
    elif type(value) is list and len(value) <= _MAX_ITEMS and _PLAIN_TENSORS.issuperset(map(type, value)):
        found.tensors += value  # weights, say: in one go
        found.tensor_names.append((name, len(value)))
    elif id(value) not in found.visited:
        found.visited[id(value)] = value
        if kind == MODULE:
            found.modules.append((name, value))
        todo.append((name, value, kind))


def _look_into_container(name: Name, value: Any, found: Reached, todo: Todo) -> None:
    if len(value) > _MAX_ITEMS:
        return
    for key, item in list(value.items()) if isinstance(value, dict) else enumerate(tuple(value)):
        _meet((name, key), item, found, todo)


def _look_into_callable(name: Name, function: Any, found: Reached, todo: Todo) -> None:
    cls = type(function)
    if cls is types.FunctionType:
        _look_into_function(function, found, todo)
    elif cls is types.MethodType:
        owner = function.__self__
        _meet("self", owner, found, todo)
        if kind_of(owner) == NOTHING:
            _look_into_object(owner, found, todo)
        _look_into_callable(name, function.__func__, found, todo)
    elif cls is types.BuiltinFunctionType:
        if kind_of(function.__self__) == GENERATOR:  # `generator.random`, say
            _meet(name, function.__self__, found, todo)
    elif isinstance(function, nn.Module):
        _meet(name, function, found, todo)
    elif isinstance(function, functools.partial):
        _meet(name, function.func, found, todo)
        _meet("partial argument", function.args, found, todo)
        _meet("partial argument", function.keywords, found, todo)
    else:
        _look_into_object(function, found, todo)


def _look_into_object(obj: Any, found: Reached, todo: Todo) -> None:
    """Look at the attributes of an object or class of the user's, and at what its class's functions name."""
    if isinstance(obj, type):
        for name in _state_of_class(obj):
            _meet(name, getattr(obj, name, None), found, todo)
        return
    for name, value in list(getattr(obj, "__dict__", {}).items()):
        _meet(name, value, found, todo)
    for name in _slots_of_class(type(obj)):
        _meet(name, getattr(obj, name, None), found, todo)
    if callable(obj) and type(type(obj).__call__) is types.FunctionType:
        _meet("__call__", type(obj).__call__, found, todo)


_slots_of_classes: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _slots_of_class(cls: type) -> list[str]:
    """Return the names of the attributes that a class keeps in slots."""
    names = _slots_of_classes.get(cls)
    if names is None:
        members = [(n, v) for base in cls.__mro__ if is_users_class(base) for n, v in vars(base).items()]
        names = _slots_of_classes[cls] = [n for n, v in members if isinstance(v, types.MemberDescriptorType)]
    return names


_states_of_classes: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _state_of_class(cls: type) -> list[str]:
    """Return the names of a class's attributes that are state; remembered, for there are many classes in globals."""
    names = _states_of_classes.get(cls)
    if names is None:
        is_users = is_users_class(cls)
        state = (TENSOR, MODULE, GENERATOR)
        names = [n for n, v in vars(cls).items() if kind_of(v) in state] if is_users else []
        _states_of_classes[cls] = names
    return names


def _look_into_module(module: nn.Module, found: Reached, todo: Todo) -> None:
    """Look at what is beside the parameters and buffers of a module and of those below it."""
    tree = module_tree(module)
    for reference, name in tree.attributes:
        owner = reference()
        if owner is not None:
            _meet(name, owner.__dict__.get(name), found, todo)
    for variables, name in tree.variables:
        _meet(name, variables.get(name), found, todo)


def _look_into_function(function: types.FunctionType, found: Reached, todo: Todo) -> None:
    code = function.__code__
    found.codes.append(code)
    facts = facts_of_codes.get(id(code)) or look_at_code(code)
    if function.__closure__ is not None:
        for name, cell in zip(facts.free_names, function.__closure__):  # noqa: B905 (as many as there are cells)
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if _kinds.get(type(value)) != NOTHING:
                _meet(name, value, found, todo)
    if function.__defaults__:
        _meet("default argument", function.__defaults__, found, todo)
    if function.__kwdefaults__:
        _meet("default argument", function.__kwdefaults__, found, todo)
    if facts.global_names and is_users_function(function):  # torch's own globals hold no user state
        variables = function.__globals__
        inert = facts.inert
        if inert is None or not all(map(operator.is_, map(variables.get, inert.names), inert.values)):
            inert = facts.inert = find_inert(facts.global_names, variables)
        for name in inert.other_names:
            _meet_global(name, variables, found, todo)


def _meet_global(name: str, variables: dict[str, Any], found: Reached, todo: Todo) -> None:
    value = variables.get(name)
    if value is None:
        return
    kind = kind_of(value)
    if kind == CALLABLE:
        for other_variables, other_name in _variables_behind(value):
            _meet(other_name, other_variables.get(other_name), found, todo)
    elif kind != NOTHING:
        _meet(name, value, found, todo)


Variables = tuple[
    tuple[dict[str, Any], str], ...
]  # globals that lead to state: where they are looked up, and their names

_variables_behind_functions: weakref.WeakKeyDictionary[Any, Variables] = weakref.WeakKeyDictionary()


def _variables_behind(function: Any) -> Variables:
    """Return the globals with state that a global function leads to, by way of others; found once per function."""
    if not is_users_function(function):
        return ()
    if type(function) is not types.FunctionType or function.__closure__:
        return _own_state(function)
    variables = _variables_behind_functions.get(function)
    if variables is None:
        _variables_behind_functions[function] = ()  # it may be recursive
        variables = _variables_behind_functions[function] = _find_variables([function])
    return variables


def _own_state(function: Any) -> Variables:
    """Return a global that is itself to be looked into each time: a closure, a bound method, a partial."""
    return (({"": function}, ""),)


def _find_variables(functions: Iterable[Any]) -> Variables:
    """Return the globals that lead to state, of functions and of the global functions these call."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    seen: set[int] = set()
    todo = list(functions)
    while todo and len(seen) < _MAX_VISITS:
        function = todo.pop()
        if type(function) is not types.FunctionType or id(function) in seen or not is_users_function(function):
            continue
        seen.add(id(function))
        variables = function.__globals__
        for name in global_names(function.__code__):
            value = variables.get(name)
            if type(value) is types.FunctionType and not value.__closure__:
                todo.append(value)
            elif value is not None and (id(variables), name) not in found and _leads_to_state(value):
                found[id(variables), name] = (variables, name)
    return tuple(found.values())


class _BeingAsked(threading.local):
    """Values that are being looked into, by id: some lead to themselves, as two functions that call each other do."""

    def __init__(self) -> None:
        self.ids: set[int] = set()


_being_asked = _BeingAsked()


def _leads_to_state(value: Any) -> bool:
    """True if tensors, modules or generators are found from a value on."""
    if id(value) in _being_asked.ids:
        return False
    _being_asked.ids.add(id(value))
    try:
        return _finds_state(value, Reached())
    finally:
        _being_asked.ids.discard(id(value))


def _finds_state(value: Any, found: Reached) -> bool:
    """True if looking into a value adds state to what has been found."""
    todo: Todo = []
    _meet("", value, found, todo)
    _finish(todo, found, until_found=True)
    return not found.is_empty()


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The parameter dictionaries of a module tree, its modules that own buffers, and what else holds state.

    Modules are held weakly: the tree is remembered under its root and must not keep that alive.
    """

    num_children: int
    parameters: tuple[tuple[str, dict[str, Any]], ...]
    with_buffers: tuple[tuple[str, weakref.ref[nn.Module]], ...]
    with_generators: tuple[tuple[weakref.ref[nn.Module], str], ...]
    attributes: tuple[tuple[weakref.ref[nn.Module], str], ...]
    variables: Variables
    embeddings: tuple[weakref.ref[nn.Module], ...]

    def living_embeddings(self) -> list[Any]:
        """Return the embeddings, which may change their weights in place."""
        return [module for reference in self.embeddings if (module := reference()) is not None]

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
    below = {id(m): m for _, m in named}
    own = [(m, name, v) for _, m in named for name, v in m.__dict__.items() if name not in _DICTIONARIES]
    return ModuleTree(
        num_children=len(module._modules),
        parameters=tuple((name, child._parameters) for name, child in named if child._parameters),
        with_buffers=tuple((name, weakref.ref(child)) for name, child in named if child._buffers),
        with_generators=tuple((weakref.ref(m), name) for m, name, v in own if kind_of(v) == GENERATOR),
        attributes=tuple((weakref.ref(m), name) for m, name, v in own if _holds_other_state(v, below)),
        variables=_find_variables(_functions_of_classes({type(m): None for _, m in named})),
        embeddings=tuple(weakref.ref(m) for _, m in named if isinstance(m, (nn.Embedding, nn.EmbeddingBag))),
    )


# What torch keeps a module's parameters, buffers, children and hooks in.
_DICTIONARIES = frozenset(nn.Module().__dict__)


def _holds_other_state(value: Any, below: dict[int, nn.Module]) -> bool:
    """True if an attribute of a module leads to state that is not that of the modules below it."""
    if kind_of(value) in (NOTHING, GENERATOR):
        return False
    return _finds_state(value, Reached(visited=dict(below)))


def _functions_of_classes(classes: Iterable[type]) -> list[Any]:
    """Return the methods of the user's classes among these and their bases."""
    bases = {base: None for cls in classes for base in cls.__mro__}
    users = [base for base in bases if is_users_class(base)]
    return [function for base in users for function in vars(base).values()]


def generators_of(reached: Reached) -> list[Any]:
    """Return every explicit generator that was reached, those of the modules included."""
    found = reached.generators
    for _, module in reached.modules:
        tree = module_tree(module)
        if tree.with_generators:
            found = [*found, *tree.generators()]
    return found
