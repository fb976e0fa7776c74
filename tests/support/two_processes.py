"""A script in two processes that share a cache folder, and what the caches answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lookup:
    """What AOTAutograd's cache answered for one compilation."""

    num_hits: int
    num_misses: int
    num_bypasses: int


HIT, MISS = Lookup(1, 0, 0), Lookup(0, 1, 0)


def run_in_two_processes(script: str, folder: Path) -> Mapping[str, Mapping[str, Lookup]]:
    """Run a script in two processes that share a cache folder; each step checks its gradients by itself."""
    (folder / "train.py").write_text(script)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "XDG_CACHE_HOME": str(folder / "home"),  # the machine's measured constants are part of the key
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    # Other hash seeds: a key that follows the order of a set would differ.
    return {
        name: _run(folder, name, {**environment, "PYTHONHASHSEED": str(seed)})
        for seed, name in enumerate(("first", "second"))
    }


def _run(folder: Path, name: str, environment: Mapping[str, str]) -> Mapping[str, Lookup]:
    command = [sys.executable, str(folder / "train.py"), name, str(folder / "dumps")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: Lookup(*counts) for name, *counts in rows}
