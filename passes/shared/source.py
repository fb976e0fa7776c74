"""Where in the user's program a node comes from."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from pathlib import Path

import torch

_REMAT = sys.modules[__name__.partition(".")[0]]
_TORCHS_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"
_OWN_FOLDERS = tuple(f"{Path(file).parent}{os.sep}" for file in (_REMAT.__file__, __file__) if file is not None)
"""Two where remat is installed for development: this file is not below the package then."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@lru_cache(maxsize=4096)
def source_line(stack_trace: str) -> str:
    """The innermost line of a stack trace that is the user's, or else torch's, as `file:line`; nothing without any."""
    frames = [frame for frame in _FRAME.findall(stack_trace) if not frame[0].startswith(_OWN_FOLDERS)]
    users = [frame for frame in frames if not frame[0].startswith(_TORCHS_FOLDER)] or frames
    return f"{users[-1][0]}:{users[-1][1]}" if users else ""
