"""The rooms of both packages: who may import whom is read from the rooms themselves, and every import is looked at.

A room is a package. The last line of its docstring says which rooms it imports, `Imports: shared, graph`; what others
may use of it is in its `__all__`. Imports inside functions and under TYPE_CHECKING count like all others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = "remat.passes.pipeline"
PUBLIC_USERS = ("remat.integrations", "remat.cli")
"""Rooms that use remat by its public names, as anybody does."""

MOST_MODULES, MOST_LEVELS, MOST_CLASS_LINES, MOST_FUNCTION_LINES = 12, 5, 200, 50


class Import(NamedTuple):
    """One name that a module imports from another module of the project."""

    module: str
    source: str
    name: str
    line: int


@cache
def modules() -> Mapping[str, Path]:
    """Every module of both packages, by its dotted name."""
    files = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "remat").rglob("*.py")]
    found = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[:2] != ("remat", "passes"):  # a link to the folder beside it
            name = ".".join(("remat", *parts) if parts[0] == "passes" else parts)
            found[name.removesuffix(".__init__")] = file
    return found


def is_package(module: str) -> bool:
    return modules()[module].name == "__init__.py"


def declared_of(source: str) -> tuple[str, ...] | None:
    """The rooms that a docstring says are imported; None if it says nothing."""
    found = re.search(r"^Imports: (.*)\n?\Z", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE)
    return None if found is None else tuple(name.strip() for name in found[1].split(","))


@cache
def rooms() -> Mapping[str, tuple[str, ...]]:
    """Every room, with the rooms that it says it imports, in full."""
    found = {}
    for module in modules():
        if is_package(module) and module not in ("remat", "remat.passes"):
            declared = declared_of(modules()[module].read_text())
            start = "remat.passes" if module.startswith("remat.passes.") else "remat"
            found[module] = tuple(f"{start}.{name}" for name in declared or ())
    return found


def room_of(module: str) -> str:
    """The innermost room that a module is in; nothing for what stands above all rooms and puts them together."""
    while module and module not in rooms():
        module = module.rpartition(".")[0]
    return module


def imports_of(module: str) -> Iterator[Import]:
    package = module if is_package(module) else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            if source.split(".")[0] == "remat":
                yield from (Import(module, source, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "remat":
                    yield Import(module, alias.name, "", node.lineno)


def target_of(found: Import) -> str:
    """The module that is imported, or imported from."""
    whole = f"{found.source}.{found.name}"
    return whole if whole in modules() else found.source


def complaint(found: Import) -> str | None:
    """What is wrong with an import, if anything is."""
    own, other = room_of(found.module), room_of(target_of(found))
    if found.source == "remat" and own in PUBLIC_USERS:
        return None
    if target_of(found) == PIPELINE:  # above all rooms of passes, and below those of remat
        other = "remat.passes"
    where = f"{found.module}:{found.line} imports {found.name} from {found.source}"
    if not own or not other or own == other or own.startswith(f"{other}."):
        return None if other or not own or found.source == "remat.version" else f"{where}, which puts rooms together"
    if other.startswith(f"{own}."):
        return None  # a room puts together what is in the rooms inside it
    allowed = rooms()[own]
    if not any(other == room or other.startswith(f"{room}.") for room in allowed):
        return f"{where}: {own} says it imports {', '.join(allowed) or 'nothing'}"
    return None


def exported_by(room: str) -> set[str]:
    for node in ast.parse(modules()[room].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def gate_of(found: Import) -> str | None:
    """The room through which a module has to reach another one: the outermost that it is not in itself."""
    own, room, gate = room_of(found.module), room_of(target_of(found)), None
    if found.source == "remat" and own in PUBLIC_USERS:
        return None
    while room in rooms():
        if not (own == room or own.startswith(f"{room}.")):
            gate = room
        room = room.rpartition(".")[0]
    return gate


every_room = pytest.mark.parametrize("room", sorted(rooms()))
every_module = pytest.mark.parametrize("module", sorted(modules()))


@every_room
def test_room_says_what_it_imports(room: str) -> None:
    assert declared_of(modules()[room].read_text()) is not None or room == "remat.passes.torch_private"
    assert set(rooms()[room]) <= {*rooms(), "remat.passes"}


@every_module
def test_imports_are_those_that_the_room_declares(module: str) -> None:
    assert [text for found in imports_of(module) if (text := complaint(found))] == []


@every_module
def test_other_rooms_are_reached_by_what_they_export(module: str) -> None:
    if not room_of(module):
        return  # shells and wiring put rooms together
    wrong = [
        found
        for found in imports_of(module)
        if (gate := gate_of(found)) is not None
        and not (found.source == gate and found.name in exported_by(gate))
        and f"{found.source}.{found.name}" != gate
    ]
    assert wrong == []


@every_room
def test_no_room_imports_a_room_that_imports_it(room: str) -> None:
    reached: set[str] = set()
    stack = list(rooms()[room])
    while stack:
        other = stack.pop()
        if other not in reached:
            reached.add(other)
            stack += rooms().get(other, ())
    assert room not in reached


def inside(room: str) -> dict[str, set[str]]:
    """The modules of a room, each with those of the same room that it imports."""
    own = [module for module in modules() if room_of(module) == room and not is_package(module)]
    return {module: {target_of(found) for found in imports_of(module)} & set(own) for module in own}


def levels(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """How deep each module stands, those that import nothing at 1; raises for a cycle."""
    known: dict[str, int] = {}

    def level(module: str, above: tuple[str, ...]) -> int:
        assert module not in above, f"a cycle of imports: {' -> '.join((*above, module))}"
        if module not in known:
            known[module] = 1 + max((level(other, (*above, module)) for other in graph[module]), default=0)
        return known[module]

    return {module: level(module, ()) for module in graph}


@every_room
def test_room_is_small_and_shallow_and_has_no_cycle(room: str) -> None:
    graph = inside(room)
    assert len(graph) <= MOST_MODULES
    assert max(levels(graph).values(), default=0) <= MOST_LEVELS


@every_module
def test_classes_and_functions_are_short(module: str) -> None:
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            most = MOST_CLASS_LINES if isinstance(node, ast.ClassDef) else MOST_FUNCTION_LINES
            assert node.end_lineno - node.lineno < most, f"{module}:{node.lineno} {node.name}"


def test_wrong_imports_are_complained_of() -> None:
    """The check itself: a room further down, a shell from inside a room, and a lazy import are all seen."""
    down = Import("remat.passes.graph.joint_graph", "remat.passes.memory", "simulate", 1)
    up = Import("remat.passes.memory.simulate", "remat.passes.graph", "JointGraph", 1)
    shell = Import("remat.regions.region", "remat.wiring", "backend", 1)
    users_side = Import("remat.passes.pipeline", "remat.regions", "Region", 1)
    assert complaint(down) is not None
    assert complaint(up) is None
    assert complaint(shell) is not None
    assert room_of("remat.passes.pipeline") == "" and users_side.source.startswith("remat.regions")
    with pytest.raises(AssertionError, match="a cycle"):
        levels({"a": {"b"}, "b": {"a"}})
    lazy = "def f():\n    from .memory import x\n"
    assert any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(lazy)))
