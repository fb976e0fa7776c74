"""Whether a recomputation saved what its forward saved: the checks, and the error that says where they part.

A check maps a saved tensor to something comparable, noted in forward and compared in recompute. "default" looks at
shape, dtype and device; "none" at nothing; others can be registered.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType
from typing import Any

import torch

from ..types import Differs

Metadata = Any
MetadataFunction = Callable[[torch.Tensor], Metadata]


def default_metadata(tensor: torch.Tensor) -> Metadata:
    """Return shape, dtype and device; True stands for the CPU, since asking for a device makes an object each time."""
    try:
        shape = tensor.shape
    except RuntimeError:  # nested, and not jagged: what has a shape are its parts
        shape = tuple(tuple(part) for part in tensor._nested_tensor_size().tolist())  # type: ignore[assignment]
    return shape, tensor.dtype, tensor.is_cpu or tensor.device


def noted(check: MetadataFunction | None, tensor: torch.Tensor) -> Metadata:
    """Return what a check notes of a tensor; its function may be anybody's."""
    if check is None:
        return None
    with torch.no_grad():
        return check(tensor)


def _device(noted: Any) -> torch.device:
    return _CPU if noted is True else noted


_CPU = torch.device("cpu")


# None stands for "look at nothing", which the engine turns into no call at all.
_checks: dict[str, MetadataFunction | None] = {"default": default_metadata, "none": None}


def register_determinism_check(name: str, metadata: MetadataFunction) -> None:
    """Add a check: `determinism_check=name` then compares `metadata(tensor)` of forward and recompute."""
    if name in ("default", "none"):
        raise ValueError(f"the determinism check {name!r} is built in; register yours under another name")
    _checks[name] = metadata


def find_determinism_check(name: str) -> MetadataFunction | None:
    """Return the metadata function of a check by its name."""
    try:
        return _checks[name]
    except KeyError:
        raise ValueError(
            f"determinism_check should be one of {list(_checks)}, but got {name}. "
            "Add others with remat.eager.register_determinism_check."
        ) from None


@dataclass(frozen=True, slots=True)
class SavePoint:
    """Where in the program a tensor was saved for backward."""

    code: CodeType
    instruction: int

    def __str__(self) -> str:
        line = _line_of(self.code, self.instruction)
        name = getattr(self.code, "co_qualname", self.code.co_name)  # new in Python 3.11
        source = _source_of(self.code, self.instruction, line)
        return f"{self.code.co_filename}:{line} in {name}" + (f": `{source}`" if source else "")


def _line_of(code: CodeType, instruction: int) -> int:
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return line
    return code.co_firstlineno


def _source_of(code: CodeType, instruction: int, line: int) -> str:
    """Return the expression that an instruction belongs to, or its line where Python does not say which part."""
    text = linecache.getline(code.co_filename, line).rstrip("\n")
    positions = getattr(code, "co_positions", None)  # new in Python 3.11
    found = next(islice(positions(), instruction // 2, None), None) if positions is not None else None
    if found is not None and found[0] == found[1] == line and found[2] is not None and found[3] is not None:
        text = text.encode()[found[2] : found[3]].decode(errors="replace")
    return text.strip()


def describe_metadata(metadata: Metadata) -> str:
    """Print what a check noted; the default's triple as a dictionary."""
    if _is_default(metadata):
        shape, dtype, device = metadata
        return str({"shape": shape, "dtype": dtype, "device": _device(device)})
    return str(metadata)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A saved tensor whose recomputed value looks different."""

    index: int
    forward: Metadata
    recompute: Metadata


_TIP = (
    "Tip: to see every op of the forward and of the recomputation, pass `debug=True` to "
    "`torch.utils.checkpoint.checkpoint(...)` (or to remat's), or wrap the call in "
    "`with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):`.\n"
    "If the region holds code compiled with automatic_dynamic_shapes, the recomputation may have picked "
    "another "
    "compiled graph than the forward.\n"
    "  - Use torch._dynamo.mark_dynamic() to explicitly mark varying dimensions, so that there is one "
    "graph; or\n"
    "  - Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache reordering of the "
    "graphs."
)


def metadata_error(mismatches: Sequence[Mismatch], first: str, causes: str) -> Differs:
    """Return the error for tensors that were recomputed with other metadata."""
    listed = "".join(
        f"tensor at position {m.index}:\nsaved metadata: {describe_metadata(m.forward)}\n"
        f"recomputed metadata: {describe_metadata(m.recompute)}\n"
        for m in mismatches
    )
    return Differs(
        "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than "
        f"during the forward pass.\n{listed}{first}{causes}\n{_TIP}"
    )


def fewer_error(num_forward: int, num_recompute: int, first: str, causes: str) -> Differs:
    """Return the error for a recomputation that saved fewer tensors."""
    return Differs(
        "torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
        f"recomputation.\nNumber of tensors saved during forward: {num_forward}\n"
        f"Number of tensors saved during recomputation: {num_recompute}.\n{first}{causes}\n{_TIP}"
    )


def more_error(first: str, causes: str) -> Differs:
    """Return the error for a recomputation that saved more tensors."""
    return Differs(
        "torch.utils.checkpoint: trying to save more tensors during recomputation than during the original "
        f"forward pass.\n{first}{causes}\n{_TIP}"
    )


def likely_causes(
    mismatch: Mismatch | None, was_training: Sequence[tuple[str, bool, bool]], counts_differ: bool
) -> str:
    """Guess from what is known why forward and recompute differ; one line per cause."""
    causes = [
        f"`{name or 'the module'}` was in {_mode(before)} mode in forward and is in {_mode(now)} mode now"
        for name, before, now in was_training
        if before != now
    ]
    if mismatch is not None and _is_default(mismatch.forward) and _is_default(mismatch.recompute):
        causes += _causes_of(mismatch)
    if counts_differ:
        causes.append("control flow that depends on data, on a global or on how often the function was called")
    if not causes:
        return ""
    return "Likely cause: " + "; or ".join(causes) + ".\n"


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _is_default(metadata: Metadata) -> bool:
    return isinstance(metadata, tuple) and len(metadata) == 3 and isinstance(metadata[0], torch.Size)


def _causes_of(mismatch: Mismatch) -> list[str]:
    (shape, dtype, device), (new_shape, new_dtype, new_device) = mismatch.forward, mismatch.recompute
    causes = []
    if dtype != new_dtype:
        causes.append(
            f"the dtype changed from {dtype} to {new_dtype}: autocast that is entered in only one of the "
            f"two runs, "
            "or a module or argument converted in between (.half(), .to(dtype))"
        )
    if device != new_device:
        causes.append(
            f"the device changed from {_device(device)} to {_device(new_device)}: something was moved in between"
        )
    if _grew_in_one_dimension(shape, new_shape):
        causes.append(
            f"one dimension grew from {tuple(shape)} to {tuple(new_shape)}: a cache (a key/value cache, a "
            f"list) that "
            "the forward grew and the recomputation grew again"
        )
    elif shape != new_shape:
        causes.append("control flow or sizes that depend on data, on a global or on how often the function was called")
    return causes


def _grew_in_one_dimension(before: torch.Size, after: torch.Size) -> bool:
    if len(before) != len(after):
        return False
    changed = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
    return len(changed) == 1 and changed[0][1] > changed[0][0]
