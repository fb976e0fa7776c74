"""Whose code a file is, wherever people keep theirs."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import remat
import remat.passes
from remat.eager.types.errors import CheckpointError
from remat.passes.shared.whose import Whose, folders_of, is_users_module, whose

CLONE = Path(__file__).parents[2]

PROGRAM = '''
"""A program, kept where its path speaks of torch and of remat."""
import torch

import remat


def step(x):
    return (x.sin() * x).exp().sum()


def policy(ctx, op, *args, **kwargs):
    raise KeyError("no opinion")


def region(x):
    return remat.checkpoint_region(policy=policy)(torch.tanh)(x)


def debugged(x):
    seen = []

    def function(x):
        seen.append(x)
        return x.sin() if len(seen) == 1 else x.sin().exp()

    return remat.compat.checkpoint(function, x, use_reentrant=False, debug=True, early_stop=False)
'''
FOLDERS = ["torch/remat", "remat/torch", "site-packages/remat_torch", "torch/distributed/fsdp"]


def line_of(text: str) -> int:
    return PROGRAM.splitlines().index(text) + 1


@pytest.fixture(params=FOLDERS)
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    path = tmp_path / request.param / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(0.1, 1, 1000, requires_grad=True)


def test_program_observes_its_own_lines(program: Any, x: torch.Tensor) -> None:
    seen = remat.observe(program.step, x)
    assert {value.source for value in seen.alive if value.source} == {
        f"{program.__file__}:{line_of('    return (x.sin() * x).exp().sum()')}"
    }


def test_plan_names_its_lines(program: Any, x: torch.Tensor) -> None:
    sources = {row.source for row in remat.explain(program.step, x).plans[0].decisions if row.source}
    assert sources == {f"{program.__file__}:{line_of('    return (x.sin() * x).exp().sum()')}"}


def test_error_of_a_region_names_its_line(program: Any, x: torch.Tensor) -> None:
    line = line_of("    return remat.checkpoint_region(policy=policy)(torch.tanh)(x)")
    with pytest.raises(remat.RematError, match=f"at {program.__file__}:{line}"):
        program.region(x)


def test_debugging_lists_its_lines(program: Any, x: torch.Tensor) -> None:
    out = program.debugged(x)
    with pytest.raises(CheckpointError) as error:
        out.sum().backward()
    line = line_of("        return x.sin() if len(seen) == 1 else x.sin().exp()")
    assert f"{program.__file__}:{line}:function" in str(error.value)


def test_what_it_computes_inside_a_region_is_its_own(
    program: Any, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not FSDP's, whose hooks lie in a folder of torch's."""
    monkeypatch.setattr("remat.eager.types.hooks.is_fsdp_loaded", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(remat.RematError, match="raised KeyError"):
        remat.checkpoint_region(policy=program.policy)(program.step)(x)


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (torch.nn.functional.__file__, Whose.TORCHS),
        (remat.__file__, Whose.REMATS),
        (remat.passes.__file__, Whose.REMATS),
        (str(Path(remat.passes.__file__).resolve()), Whose.REMATS),
        (str(CLONE / "passes" / "pipeline.py"), Whose.REMATS),
        (str(CLONE / "remat" / "passes" / "pipeline.py"), Whose.REMATS),
        (str(CLONE / "remat_experiments" / "train.py"), Whose.USERS),
        (str(CLONE / "examples" / "train_llama.py"), Whose.USERS),
        (random.__file__, Whose.PYTHONS),
        (np.__file__, Whose.USERS),
        ("<eval_with_key>.3", Whose.NOBODYS),
        ("<frozen importlib._bootstrap>", Whose.NOBODYS),
        ("<stdin>", Whose.USERS),
        ("/srv/me/torch/remat/train.py", Whose.USERS),
    ],
)
def test_folders_of_packages_decide(file: str, owner: Whose) -> None:
    assert whose(file) is owner


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    module = type(sys)("module")
    module.__file__ = str(tmp_path / "link" / "__init__.py")
    assert folders_of(module) == (f"{tmp_path / 'link'}/", f"{tmp_path / 'real'}/")


@pytest.mark.parametrize("name", ["torch.nn.functional", "torch._C._nn", "remat.passes.shared", "random", "builtins"])
def test_modules_of_libraries_are_not_the_users(name: str) -> None:
    assert not is_users_module(name)


@pytest.mark.parametrize("name", ["__main__", "numpy", "support.eager_testing", "train"])
def test_other_modules_are(name: str) -> None:
    assert is_users_module(name)


def test_module_that_takes_the_name_of_one_of_pythons_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its global buffer is put back for a recomputation, as any of a user's is."""
    name = "this"  # nothing else imports that one
    (tmp_path / f"{name}.py").write_text(
        "import torch\n\nnorm = torch.nn.BatchNorm1d(4)\n\n\ndef block(x):\n    return norm(x).sin().exp()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    try:
        is_users_module.cache_clear()
        x = torch.randn(8, 4, requires_grad=True)
        remat.checkpoint(module.block, x, use_reentrant=False).sum().backward()
        norm: nn.BatchNorm1d = module.norm
        assert norm.num_batches_tracked == 1
    finally:
        del sys.modules[name]
        is_users_module.cache_clear()
