"""What backward would not have to run, or get from forward, if one more value were kept.

A reader reads the latest copy of a value, so it is a run that has readers, not a node: of a value that is recomputed
twice, one run may be for what is kept and the other for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Freed:
    """Something that nobody reads any more: a run of a node in backward, or a value that forward hands over."""

    node: int
    is_run: bool


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of backward in order, and who reads whose results."""

    nodes: tuple[int, ...]
    """Per run, the node."""
    reads: tuple[tuple[int, ...], ...]
    """Per run, what it reads: earlier runs, or the values that forward hands over as numbers below zero."""
    num_readers: dict[int, int]
    runs_of: dict[int, tuple[int, ...]]
    """The runs that may be left out, per node: those of forward's values."""

    @staticmethod
    def of(
        events: Sequence[int],
        inputs: Callable[[int], Iterable[int]],
        base_of: Callable[[int], int | None],
        results: Iterable[int],
    ) -> Runs:
        """Find who reads whose results; `base_of` is None for what backward has anyway, or computes itself."""
        latest: dict[int, int] = {}
        reads: list[tuple[int, ...]] = []
        num_readers: dict[int, int] = {}
        runs_of: dict[int, tuple[int, ...]] = {}

        def source(node: int) -> int | None:
            base = base_of(node)
            return latest.get(node, None if base is None else -1 - base)

        for run, node in enumerate(events):
            found = dict.fromkeys(source(j) for j in inputs(node))
            reads.append(tuple(r for r in found if r is not None))
            latest[node] = run
            if base_of(node) is not None:
                runs_of[node] = (*runs_of.get(node, ()), run)
        returned = tuple(r for r in dict.fromkeys(map(source, results)) if r is not None)
        for read in (*reads, returned):
            for r in read:
                num_readers[r] = num_readers.get(r, 0) + 1
        return Runs(tuple(events), tuple(reads), num_readers, runs_of)

    def freed_by_keeping(self, node: int) -> Iterator[Freed]:
        """What is left out if a value that is recomputed were kept: its runs, and what is there for nothing else."""
        readers_left: dict[int, int] = {}
        stack = list(self.runs_of.get(node, ()))
        own: Container[int] = frozenset(stack)
        while stack:
            found = stack.pop()
            if found < 0:
                yield Freed(-1 - found, is_run=False)
                continue
            yield Freed(self.nodes[found], is_run=True)
            for r in self.reads[found]:
                left = readers_left[r] = readers_left.get(r, self.num_readers[r]) - 1
                if not left and r not in own:
                    stack.append(r)
