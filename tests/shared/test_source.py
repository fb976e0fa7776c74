"""The line of a program that a node is said to come from."""

from __future__ import annotations

from pathlib import Path

import torch

import remat
import remat.passes
from remat.passes.shared.source import source_line

TORCHS = f'File "{Path(torch.__file__).parent / "nn" / "functional.py"}", line 7, in f\n'
OURS = f'File "{Path(remat.__file__).parent / "region.py"}", line 5, in __call__\n'
OF_PASSES = f'File "{Path(remat.passes.__file__).parent / "plan.py"}", line 6, in g\n'
USERS = 'File "/srv/train.py", line 3, in step\n  File "/srv/model.py", line 4, in forward\n'


def test_it_is_the_innermost_line_that_is_neither_torchs_nor_remats() -> None:
    assert source_line(USERS + OURS + OF_PASSES + TORCHS) == "/srv/model.py:4"


def test_it_is_torchs_where_no_line_is_the_users() -> None:
    assert source_line(OURS + TORCHS + OF_PASSES).endswith("functional.py:7")


def test_it_is_nothing_where_all_are_remats() -> None:
    assert source_line(OURS + OF_PASSES) == source_line("") == ""


def test_user_of_a_folder_that_starts_like_remats_is_a_user() -> None:
    file = f"{Path(remat.__file__).parent}_experiments/train.py"
    assert source_line(f'File "{file}", line 9, in step\n') == f"{file}:9"
