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


def duration(seconds: float) -> str:
    """Seconds for people: `1.25 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        if seconds * factor >= 1 or unit == "ns":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError
