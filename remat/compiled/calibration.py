"""How fast this machine is: measured in a fraction of a second, rounded, remembered on disk.

A plan depends on the balance of arithmetic and bandwidth. Constants are rounded to a few significant steps so that
measuring again seldom changes a plan, and kept in a file so that all processes use the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..passes.ops import Kind
from ..passes.prices import ARITHMETIC, DEFAULT_MACHINE, Machine, OpCall, Roofline
from ..passes.sizes import TensorSpec
from ..passes.torch_private import without_modes


def machines() -> dict[str, Machine]:
    """The constants of the CPU, and of the accelerator if this process has started to use it."""
    devices = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and _is_in_use(accelerator.type):
        devices.append(accelerator.type)
    return {device: _machine(device, torch.get_num_threads()) for device in devices}


def _is_in_use(device: str) -> bool:
    """True once the device has a context: planning for the CPU must not start one."""
    is_initialized = getattr(torch.get_device_module(device), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())


@cache
def _machine(device: str, num_threads: int) -> Machine:
    path = _cache_file(device, num_threads)
    remembered = _read(path)
    if remembered is not None:
        return remembered
    try:
        machine = measure(device)
    except RuntimeError:  # the device is full, or does not do what is measured
        return DEFAULT_MACHINE
    _write(path, machine)
    # Of processes that start together the first to write wins, and all use its figures.
    return _read(path) or machine


STEPS_PER_DOUBLING = 4
"""How finely constants are told apart: steps of 19 %. With whole powers of two, products were a third too dear on one
machine, and a Llama's plan for the peak of checkpointing recomputed a quarter too much."""

LARGE, SMALL = 1024, 512
"""Rows and columns of the matrices multiplied: an accelerator needs the larger ones to be busy, and of the smaller ones
some run undisturbed on a machine that does other things, too."""


def measure(device: str) -> Machine:
    """Time matrix products in single and half precision, and a copy that is too large for the caches."""
    like: Any = {"device": device, "dtype": torch.float32}
    with without_modes(), torch.no_grad(), torch.autocast(device, enabled=False):
        matrix = torch.full((LARGE, LARGE), 0.5, **like)
        small = torch.full((SMALL, SMALL), 0.5, **like)
        half = small.to(torch.bfloat16)
        large, other = (torch.full((2**24,), 0.5, **like) for _ in range(2))
        product = _seconds(lambda: matrix @ matrix, device)
        # As a layer multiplies: libraries without half-precision kernels take ten times as long for other layouts.
        small_product = _seconds(lambda: small @ small.t(), device)
        half_product = _seconds(lambda: half @ half.t(), device)
        copy = _seconds(lambda: other.copy_(large), device)
    return Machine(
        flops_per_second=_rounded(max(2 * LARGE**3 / product, 2 * SMALL**3 / small_product)),
        bytes_per_second=_rounded(2 * large.numel() * large.element_size() / copy),
        half_speed=_rounded(small_product / half_product),
    )


def _seconds(run: Callable[[], object], device: str, repeats: int = 15) -> float:
    """The best of a few runs."""
    # What runs in this thread alone takes the time that the thread has, whatever else the machine does.
    is_alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter
    run()
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = clock()
        run()
        _synchronize(device)
        times.append(clock() - start)
    return min(times)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _rounded(value: float) -> float:
    return float(2.0 ** (round(STEPS_PER_DOUBLING * math.log2(value)) / STEPS_PER_DOUBLING))


# -------------------------------------------------------------------------------------------------- the file


def _cache_file(device: str, num_threads: int) -> Path:
    machine = f"{device} {_device_name(device)} {platform.node()} {os.cpu_count()} {num_threads}"
    about = f"{STEPS_PER_DOUBLING} {machine} {torch.__version__}"
    return _cache_folder() / f"machine-{hashlib.sha256(about.encode()).hexdigest()[:12]}.json"


def _device_name(device: str) -> str:
    if device == "cpu":
        return platform.processor() or platform.machine()
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name()) if name is not None else device


def _cache_folder() -> Path:
    """The user's cache folder; a user without a home has the system's temporary one."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "remat"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "remat"


def _read(path: Path) -> Machine | None:
    try:
        stored = json.loads(path.read_text())
        machine = Machine(**stored)
    except (OSError, ValueError, TypeError):
        return None  # not there, or not ours: measure again
    # Another release's file may lack what this one measures.
    is_sound = stored.keys() == asdict(machine).keys() and all(isinstance(v, float) and v > 0 for v in stored.values())
    return machine if is_sound else None


def _write(path: Path, machine: Machine) -> None:
    """Make the file in one step, unless a sound one is there; without a writable folder each process measures."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            json.dump(asdict(machine), file)
            file.flush()
            if _read(path) is None:
                path.unlink(missing_ok=True)
            os.link(file.name, path)
    except OSError:
        return


# -------------------------------------------------------------------------------------------------- profiling


@dataclass(frozen=True, slots=True)
class Profile(Roofline):
    """Time each distinct call that is not fused once; price what will be fused, or cannot run alone, as roofline does.

    Measured times vary, so plans may differ from one process to the next; a cached plan is as good as a new one.
    """

    measures: ClassVar[bool] = True
    """Asking it about other sizes runs ops at those sizes."""

    def recompute_seconds(self, call: OpCall) -> float:
        """The measured time of the call."""
        measured = None if self._is_priced(call) else measured_seconds(call)
        return Roofline.recompute_seconds(self, call) if measured is None else measured

    def is_formula(self, call: OpCall) -> bool:
        """What is measured is known at the sizes of the example alone."""
        return self._is_priced(call)

    def _is_priced(self, call: OpCall) -> bool:
        """True for what is not timed: it costs nothing, or will be part of another kernel."""
        return call.facts.kind in ARITHMETIC if self.fuses else call.facts.kind is Kind.FREE


@cache
def measured_seconds(call: OpCall) -> float | None:
    """Run a call on real tensors and time it; None if it does not run on made-up data."""
    # An op of the user's own may do anything when it is run on made-up data.
    is_torchs = getattr(call.target, "namespace", None) in ("aten", "prims")
    if not is_torchs or not call.facts.is_pure:
        return None
    with without_modes(), torch.no_grad():
        try:
            args = [_real(a) for a in call.args]
            kwargs = {name: _real(value) for name, value in call.kwargs}
            return _seconds(lambda: call.target(*args, **kwargs), call.device, repeats=3)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            return None


def _real(arg: Any) -> Any:
    """A tensor like the one described: ones, or zeros where values are indices."""
    if isinstance(arg, TensorSpec):
        tensor = torch.empty_strided(arg.shape, arg.stride, dtype=arg.dtype, device=arg.device)
        return tensor.fill_(1) if arg.dtype.is_floating_point or arg.dtype.is_complex else tensor.zero_()
    if isinstance(arg, tuple):
        return [_real(a) for a in arg]
    return arg
