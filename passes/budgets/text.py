"""What a user may say as `memory_budget`: a fraction, bytes, or text such as "2GiB" or "35%"."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from ..shared import OptionError
from .budget import SMALLEST_BYTES, Budget

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}

ALLOWED = (
    "None (as fast as possible); a float above 0.0 and up to 1.0 (a fraction of the activation peak without "
    'recompute); an int from 1024 (bytes); or text such as "2GiB", "500MB" or "35%"'
)

_TEXT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>%|[A-Za-z]+)\s*")


def parse_budget(value: Any, on_infeasible: Any = "error") -> Budget | None:
    """Turn what the user said into a budget, or say what is allowed."""
    if on_infeasible not in ("error", "minimum"):
        raise OptionError(f"on_infeasible={on_infeasible!r}: expected 'error' or 'minimum'")
    take_minimum = on_infeasible == "minimum"
    if value is None:
        return None
    if isinstance(value, str):
        fraction, num_bytes = _from_text(value)
    elif isinstance(value, bool):
        raise _wrong(value)
    elif isinstance(value, numbers.Integral):  # NumPy's, too
        fraction, num_bytes = None, _checked_bytes(int(value), value)
    elif isinstance(value, numbers.Real):
        fraction, num_bytes = _checked_fraction(float(value), value), None
    else:
        raise _wrong(value)
    return Budget(text=repr(value), fraction=fraction, num_bytes=num_bytes, take_minimum=take_minimum)


def _from_text(text: str) -> tuple[float | None, int | None]:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise _wrong(text)
    number, unit = float(match["number"]), match["unit"]
    if math.isinf(number):
        raise _wrong(text)
    if unit == "%":
        return _checked_fraction(number / 100, text), None
    factors = {name.upper(): factor for name, factor in UNITS.items()}
    if unit.upper() not in factors:
        raise _wrong(text, _unit_hint(match["number"], unit))
    return None, _checked_bytes(round(number * factors[unit.upper()]), text)


def _unit_hint(number: str, unit: str) -> str:
    """What may have been meant by an unknown unit: `2G` is 2GiB to one and 2GB to another."""
    meant = [name for name in UNITS if len(name) > 1 and name[0] == unit[0].upper()]
    if unit.upper() not in {name.upper().removesuffix("B") for name in meant}:
        return f"; units are %, {', '.join(UNITS)}"
    return f"; write {' or '.join(f'{number}{name}' for name in reversed(meant))}"


def _checked_fraction(fraction: float, value: Any) -> float:
    if not math.isfinite(fraction) or not 0.0 < fraction <= 1.0:
        raise _wrong(value)
    return fraction


def _checked_bytes(num_bytes: int, value: Any) -> int:
    if num_bytes < SMALLEST_BYTES:
        hint = "; for a fraction write 1.0, for bytes a whole number from 1024" if value == 1 else ""
        raise _wrong(value, hint)
    return num_bytes


def _wrong(value: Any, hint: str = "") -> OptionError:
    return OptionError(f"memory_budget={value!r}: expected {ALLOWED}{hint}")
