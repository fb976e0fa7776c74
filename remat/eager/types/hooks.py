"""Tell the ops of a region's forward from those that FSDP runs in its hooks, in between.

FSDP gathers parameters before a module's forward and frees them after it. Inside a region it does so in recomputation
as well, but not always for the same modules (some are there already, others were fetched ahead), so its ops are no
part of what forward and recomputation must have in common: policies do not see them, and nothing of them is kept.
"""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

import torch.distributed

from remat.passes.torch_private import MODULE_CALL_CODES

from ...passes.shared import folders_of

# By identity: the hash of a code object is computed from all of it.
_MODULE_CALLS = {id(code) for code in MODULE_CALL_CODES}
_FSDP_FOLDERS = tuple(os.path.join(folder, "distributed", "fsdp", "") for folder in folders_of(torch))
_ends = set(_MODULE_CALLS)


def ends_search(code: CodeType) -> None:
    """Say that what is called from this code is the region's own, so that nobody looks further up."""
    _ends.add(id(code))


def is_fsdp_loaded() -> bool:
    """True if a module of this process may be sharded."""
    return "torch.distributed.fsdp" in sys.modules


def may_be_sharded() -> bool:
    """True if FSDP may have put other parameters into a module's place."""
    return is_fsdp_loaded() and torch.distributed.is_initialized()


def is_called_by_fsdp() -> bool:
    """True if the op that is running was called by a hook of FSDP's, and not by the forward of a module."""
    frame: Any = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in _ends:
        if frame.f_code.co_filename.startswith(_FSDP_FOLDERS):
            return True
        frame = frame.f_back
    return False


def calling_module() -> int:
    """Identify the module inside the running region that the op belongs to, by its forward or its hooks; 0 if none."""
    frame: Any = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in _ends:
        frame = frame.f_back
    return id(frame.f_locals.get("self")) if frame is not None and id(frame.f_code) in _MODULE_CALLS else 0
