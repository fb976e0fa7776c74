"""Bytes and times for people."""

from __future__ import annotations


def size(num_bytes: int) -> str:
    """Bytes for people, in the largest unit that leaves a whole part: `1.25 MiB`."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"


def exact_size(num_bytes: int) -> str:
    """The same with the number of bytes, by which sizes can be told apart that look the same."""
    return f"{size(num_bytes)} ({num_bytes} bytes)"


def size_unit(num_bytes: int) -> tuple[str, float]:
    """The largest unit that leaves bytes a whole part, and how many bytes it is."""
    unit = size(num_bytes).split()[1]
    return unit, 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)


def duration(seconds: float, digits: int = 3) -> str:
    """Seconds for people: `1.25 ms`."""
    unit, factor = time_unit(seconds)
    return f"{seconds / factor:.{digits}g} {unit}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The largest unit that leaves seconds a whole part, or nanoseconds, and how many seconds it is."""
    for unit, per_second in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * per_second >= 1:
            return unit, 1 / per_second
    return "ns", 1e-9
