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

import torch
import torch.distributed as dist

GROUP_SECONDS = 20.0
"""How long a collective waits for the other ranks, unless a test says otherwise."""
ANSWER_SECONDS = 180.0
"""How long a rank may take for one test function before the group is given up."""


@dataclass(frozen=True)
class Failure:
    """What came back from a rank instead of a value."""

    kind: str
    text: str

    @property
    def is_death(self) -> bool:
        """The process ended instead of answering."""
        return self.kind == "Death"


class Ranks:
    """A group of processes, each of which runs what the others run."""

    def __init__(self, num_ranks: int, group_seconds: float = GROUP_SECONDS) -> None:
        self.num_ranks, self.group_seconds = num_ranks, group_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="remat-ranks-")
        self._num_runs = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "remat"])
        self._links, self._processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, theirs, dict(os.environ)), daemon=True)
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
        file = str(Path(self._folder.name) / f"group{self._num_runs}")
        request = pickle.dumps((function, args, kwargs, file, self.group_seconds))
        for link in self._links:
            with contextlib.suppress(BrokenPipeError):
                link.send_bytes(request)
        deadline = time.monotonic() + ANSWER_SECONDS
        return [self._answer(rank, deadline) for rank in range(self.num_ranks)]

    def _answer(self, rank: int, deadline: float) -> Any:
        try:
            if self._links[rank].poll(max(0.0, deadline - time.monotonic())):
                return pickle.loads(self._links[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return Failure("Death", f"died with exit code {self._processes[rank].exitcode}")
        self.close()
        raise AssertionError(f"rank {rank} gave no answer within {ANSWER_SECONDS:.0f} s: the ranks hang")

    def close(self) -> None:
        """End the processes."""
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextlib.contextmanager
def ranks_for(num_ranks: int, group_seconds: float = GROUP_SECONDS) -> Iterator[Ranks]:
    """Start ranks for one block."""
    ranks = Ranks(num_ranks, group_seconds)
    try:
        yield ranks
    finally:
        ranks.close()


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
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
