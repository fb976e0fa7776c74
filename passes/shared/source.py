"""Lines of the user's program: the one that a node comes from, the one that is running."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any

from .whose import Whose, is_users, whose

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """The innermost line of a stack trace that is the user's, or else torch's, as `file:line`; nothing without any."""
    frames = [frame for frame in _FRAME.findall(stack_trace) if whose(frame[0]) is not Whose.REMATS]
    users = [frame for frame in frames if is_users(frame[0])] or frames
    return f"{users[-1][0]}:{users[-1][1]}" if users else ""


def running_line() -> str:
    """Say for a message which line of the user's code is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "on an unknown line" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
