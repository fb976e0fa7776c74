"""Let activations wait on disk between forward and backward, and see what that does to the process's memory.

    python examples/disk_offload.py --folder /path/on/a/disk

Linux only, where resident memory is read from /proc.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault(
    "MALLOC_MMAP_THRESHOLD_", "65536"
)  # freed tensors go back to the system at once, so that it shows

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from remat.wrappers import offload_wrapper

MIB = 2**20


def main() -> None:
    """Run one step with activations in memory, and one with activations on disk."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on a disk (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="layers, which save 32 MiB each (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    batch = torch.randn(32768, 256)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(arguments.layers)))
    gradients = {}
    for name in ("on disk", "in memory"):
        model = offload_wrapper(plain, offload="disk", offload_folder=arguments.folder) if name == "on disk" else plain
        before, start = resident_bytes(), time.perf_counter()
        loss = model(batch).square().mean()
        held = resident_bytes() - before
        loss.backward()
        seconds = time.perf_counter() - start
        gradients[name] = [parameter.grad for parameter in plain.parameters()]
        plain.zero_grad()
        print(f"activations {name:10} {held / MIB:7.0f} MiB more resident memory after forward, step {seconds:.1f} s")
    same = all(torch.equal(a, b) for a, b in zip(*gradients.values(), strict=True))
    print(
        f"gradients are {'bitwise the same' if same else 'DIFFERENT'}; files left behind: {num_files(arguments.folder)}"
    )


def resident_bytes() -> int:
    """What the process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def num_files(folder: str) -> int:
    """How many files of ours a folder shows: none, not even while they are in use."""
    return len(list(Path(folder).glob("remat_*")))


if __name__ == "__main__":
    main()
