"""Measure what a training step really costs: the bytes it holds at its worst moment, and its time.

**Memory** is counted by `remat.report.observed.counting`, which says what counts.

**Time.** Only ratios of steps interleaved in one process mean anything on a shared machine: every round runs every
step once, in rotating order, so that a slow moment hits all of them.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from remat.report.observed.counting import (
    MemoryEvent,
    MemoryLog,
    Peak,
    activation_peak,
    clear_gradients,
    gc_disabled,
    summarise,
)

__all__ = [
    "MemoryEvent",
    "MemoryLog",
    "Peak",
    "Timings",
    "activation_peak",
    "clear_gradients",
    "fixed_threads",
    "geometric_mean",
    "interleaved_times",
    "summarise",
]


@dataclass(frozen=True)
class Timings:
    """Seconds of interleaved steps: ``wall[name][round]`` and ``cpu[name][round]``."""

    wall: Mapping[str, tuple[float, ...]]
    cpu: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Give the median wall seconds of one step."""
        return statistics.median(self.wall[name])

    def ratio_of_medians(self, name: str, base: str) -> float:
        """Divide the median wall time of one step by another's."""
        return self.median(name) / self.median(base)

    def median_of_ratios(self, name: str, base: str) -> float:
        """Give the median over rounds of the wall time ratio within a round."""
        return _median_ratio(self.wall[name], self.wall[base])

    def cpu_median_of_ratios(self, name: str, base: str) -> float:
        """Do the same with processor time, which other processes disturb less."""
        return self.cpu_median_of_all([name], [base])

    def cpu_median_of_all(self, names: Iterable[str], bases: Sequence[str]) -> float:
        """Do the same where several steps are one program, compiled several times."""
        pairs = [(self.cpu[name], self.cpu[base]) for name in names for base in bases]
        return statistics.median(a / b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


# --- time -----------------------------------------------------------------------------------------------------------


def interleaved_times(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 2,
    threads: int | None = None,
    on_round: Callable[[int], None] = lambda _: None,
) -> Timings:
    """Time steps in turns: every round runs each of them once, starting with another one each time."""
    if rounds < 1:
        raise ValueError(f"interleaved_times needs at least one round, got rounds={rounds}.")
    names = list(steps)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    with fixed_threads(threads):
        for name in names * warm_up:
            steps[name]()
        gc.collect()
        with gc_disabled():
            for round_index in range(rounds):
                first = round_index % len(names)
                for name in names[first:] + names[:first]:
                    wall_seconds, cpu_seconds = _time_once(steps[name])
                    wall[name].append(wall_seconds)
                    cpu[name].append(cpu_seconds)
                on_round(round_index + 1)
    return Timings({n: tuple(wall[n]) for n in names}, {n: tuple(cpu[n]) for n in names})


@contextlib.contextmanager
def fixed_threads(threads: int | None) -> Iterator[None]:
    """Run with a fixed number of intra-op threads, then restore it; None leaves it alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if threads is None else threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def geometric_mean(ratios: Iterable[float]) -> float:
    """Average ratios the way ratios average."""
    return statistics.geometric_mean(ratios)


def _time_once(step: Callable[[], object]) -> tuple[float, float]:
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall_start, time.process_time() - cpu_start


def _median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
