"""Where in the user's program a node comes from."""

from __future__ import annotations

import re
from functools import lru_cache

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """The innermost line of a stack trace, `file:line`."""
    frames = _FRAME.findall(stack_trace)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
