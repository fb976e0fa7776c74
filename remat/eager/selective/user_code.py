"""Which line of the user's program is running: the first one on the stack that is neither torch's nor ours."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any


def is_user_code(code: CodeType) -> bool:
    """True if a piece of code is neither torch's nor remat's."""
    return "/torch/" not in code.co_filename and "/remat/" not in code.co_filename


def nearest_user_line() -> str:
    """Say where the user's code is that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code):
        frame = frame.f_back
    return "on an unknown line" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
