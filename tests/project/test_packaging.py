"""What is shipped, and which module may import which: the layering is checked on the source itself."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSES = sorted((ROOT / "passes").rglob("*.py"))
USER_SIDE = sorted((ROOT / "remat").rglob("*.py"))
FLOW_SOLVERS = {"networkx", "scipy"}

every_pass = pytest.mark.parametrize("path", PASSES, ids=lambda path: path.name)
every_module = pytest.mark.parametrize("path", [*PASSES, *USER_SIDE], ids=lambda path: str(path.relative_to(ROOT)))


# --- the wheel ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that the build leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_only_top_level_name_of_the_wheel_is_remat(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"remat"}


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in USER_SIDE}
    expected |= {f"remat/{path.relative_to(ROOT).as_posix()}" for path in PASSES}
    data = {
        "remat/py.typed",
        "remat/report/data/schema.json",
        "remat/report/forms/page.css",
        "remat/report/forms/page.js",
    }
    assert expected | data <= names


def test_wheel_imports_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import remat, remat.backend, remat.passes.pipeline
for module in (remat, remat.backend, remat.passes.pipeline):
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- who imports what --------------------------------------------------------------------------------------------


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Every module or name that the source imports, absolute, relative ones with their leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            separator = "" if base.endswith(".") else "."
            yield from (f"{base}{separator}{alias.name}" for alias in node.names)


def module_aliases(tree: ast.AST) -> dict[str, str]:
    """Names that stand for a torch module in this source."""
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: target for name, target in aliases.items() if target.split(".")[0] == "torch"}


def attribute_chains(tree: ast.AST) -> Iterator[str]:
    """Dotted names that start at a torch module or at something imported from one."""
    aliases = module_aliases(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in aliases:
            yield ".".join([aliases[node.id], *reversed(names)])


def private_torch_names(source: str) -> set[str]:
    """Every dotted name in the source that goes through a private part of torch.

    What stands under `torch.ops` is the name of an operator, which may begin with an underscore.
    """
    tree = ast.parse(source)
    used = [*imported_modules(tree), *attribute_chains(tree)]
    return {name for name in used if re.match(r"torch\b(?!\.ops\.)", name) and re.search(r"\._(?!_)", name)}


@every_pass
def test_passes_never_import_the_user_side(path: Path) -> None:
    depth = len(path.relative_to(ROOT / "passes").parts)  # how many leading dots stay inside the package
    imported = list(imported_modules(ast.parse(path.read_text())))
    assert [name for name in imported if name.startswith("." * (depth + 1))] == []
    assert [n for n in imported if n.split(".")[0] == "remat" and not n.startswith("remat.passes")] == []


@every_module
def test_only_min_cut_knows_the_flow_solvers(path: Path) -> None:
    imported = {name.split(".")[0] for name in imported_modules(ast.parse(path.read_text()))}
    assert path.name == "min_cut.py" or not imported & FLOW_SOLVERS


@every_module
def test_only_torch_private_touches_private_torch(path: Path) -> None:
    assert "torch_private" in (path.stem, path.parent.name) or private_torch_names(path.read_text()) == set()


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch import _ops",
        "from torch._ops import OpOverload",
        "from torch.fx import _lazy_graph_module",
        "import torch\ntorch._ops.OpOverload",
        "import torch.fx as fx\nfx._symbolic_trace.Tracer",
        "def f():\n    import torch._inductor.config",
    ],
)
def test_check_of_private_torch_sees_every_way_to_get_at_it(source: str) -> None:
    assert private_torch_names(source)


def test_check_of_private_torch_lets_public_and_special_names_pass() -> None:
    source = "import torch\ntorch.fx.Node.__name__\ntorch.__version__\nself._torch\ntorch.ops.aten._to_copy.default"
    assert private_torch_names(source) == set()


# --- the text ----------------------------------------------------------------------------------------------------


def project_files() -> list[Path]:
    """Every text file of the project."""
    skipped = re.compile(r"(^|/)(\.(?!ci|gitignore)[^/]*|build|dist|__pycache__|[^/]*\.egg-info)(/|$)")
    files = [path for path in ROOT.rglob("*") if path.is_file() and not skipped.search(str(path.relative_to(ROOT)))]
    return sorted(path for path in files if b"\0" not in path.read_bytes())


def test_no_file_mentions_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w.<>~$}])/(?:work|home|root|tmp|Users|mnt|opt)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in project_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if machine_path.search(line)
    ]
    assert found == []
