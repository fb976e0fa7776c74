"""Processes that run test functions together as the ranks of one job, over gloo.

Starting a process and importing torch takes seconds, so a group of them is started once and serves many tests; each run
gets a process group of its own, on a file of its own, so that groups of several test runs never meet. A rank that
does not answer in time is killed, with all others: a test that hangs is a test that fails.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

GROUP_SECONDS = 20.0
"""How long a collective waits for the other ranks, unless a test says otherwise."""
ANSWER_SECONDS = 180.0
"""How long a rank may take for one test function before the group is given up."""

PRELOADED = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "remat",
)
"""What ranks need that takes seconds to import: imported once, before they are forked."""


@dataclass(frozen=True)
class Failure:
    """What came back from a rank instead of a value."""

    kind: str
    text: str

    @property
    def is_death(self) -> bool:
        """The process ended instead of answering."""
        return self.kind == "Death"


class NotJoined(Exception):
    """A rank could not join its process group."""


class Ranks:
    """A group of processes, each of which runs what the others run."""

    def __init__(self, num_ranks: int, group_seconds: float = GROUP_SECONDS) -> None:
        self.num_ranks, self.group_seconds = num_ranks, group_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="remat-ranks-")
        self._num_runs = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._links, self._processes = [], []
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.num_ranks, theirs, _environment()), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every rank; return its results, or raise what went wrong where."""
        outcomes = self.attempt(function, *args, **kwargs)
        failures = [(rank, found) for rank, found in enumerate(outcomes) if isinstance(found, Failure)]
        if failures:
            raise AssertionError("\n".join(f"--- rank {rank}: {found.text}" for rank, found in failures))
        return outcomes

    def attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every rank; return its result or a `Failure` for each."""
        self._num_runs += 1
        if not self._processes:  # given up after a test that hung
            self._start()
        file = str(Path(self._folder.name) / f"group{self._num_runs}")
        request = pickle.dumps((function, args, kwargs, file, self.group_seconds))
        for link in self._links:
            with contextlib.suppress(BrokenPipeError):
                link.send_bytes(request)
        deadline = time.monotonic() + ANSWER_SECONDS
        outcomes = [self._answer(rank, deadline) for rank in range(self.num_ranks)]
        if any(isinstance(found, Failure) and found.kind == NotJoined.__name__ for found in outcomes):
            self._end()  # torch counts its groups, and ranks that count differently never meet again
        return outcomes

    def _answer(self, rank: int, deadline: float) -> Any:
        try:
            if self._links[rank].poll(max(0.0, deadline - time.monotonic())):
                return pickle.loads(self._links[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return Failure("Death", f"died with exit code {self._processes[rank].exitcode}")
        self._end()
        raise AssertionError(f"rank {rank} gave no answer within {ANSWER_SECONDS:.0f} s: the ranks hang")

    def close(self) -> None:
        """End the processes for good."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self._links, self._processes = [], []


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks that serve all tests."""
    with ranks_for(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks that serve all tests."""
    with ranks_for(4) as ranks:
        yield ranks


@contextlib.contextmanager
def ranks_for(num_ranks: int, group_seconds: float = GROUP_SECONDS) -> Iterator[Ranks]:
    """Start ranks for one block."""
    ranks = Ranks(num_ranks, group_seconds)
    try:
        yield ranks
    finally:
        ranks.close()


def _environment() -> dict[str, str]:
    """The environment of a rank: as `fresh_compiler` of conftest.py, in words."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }


def _serve(rank: int, num_ranks: int, link: Any, environment: dict[str, str]) -> None:
    """Run what is asked for until the other end is closed."""
    os.environ.update(environment)  # a server of forks has that of whoever started it
    torch.set_num_threads(1)
    while True:
        try:
            function, args, kwargs, file, seconds = pickle.loads(link.recv_bytes())
        except EOFError:
            return
        try:
            answer = _run(rank, num_ranks, file, seconds, lambda: function(*args, **kwargs))  # noqa: B023
        except BaseException as error:  # noqa: BLE001 (whatever it is, the test is told)
            answer = Failure(type(error).__name__, traceback.format_exc())
        link.send_bytes(pickle.dumps(answer))


def _run(rank: int, num_ranks: int, file: str, seconds: float, call: Callable[[], Any]) -> Any:
    with joined(rank, num_ranks, file, seconds):
        torch._dynamo.reset()
        torch.manual_seed(0)
        return call()


@contextlib.contextmanager
def joined(rank: int, num_ranks: int, file: str, seconds: float = GROUP_SECONDS) -> Iterator[None]:
    """Belong to a process group for a while."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{file}",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=seconds),
        )
        dist.barrier()  # whoever leaves before the others are connected would break their connections
    except RuntimeError as error:
        raise NotJoined(f"rank {rank} of {num_ranks}") from error
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
