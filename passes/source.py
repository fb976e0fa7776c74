"""Where in the user's program a node comes from."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

import torch

_TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """The innermost line of a stack trace that is not torch's own, `file:line`."""
    frames = _FRAME.findall(stack_trace)
    users = [frame for frame in frames if not frame[0].startswith(_TORCH_FOLDER)] or frames
    return f"{users[-1][0]}:{users[-1][1]}" if users else ""
