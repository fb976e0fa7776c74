"""What is said where a recomputation parts from its forward: the first tensor in which they differ, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from remat.eager.recompute.determinism import (
    Mismatch,
    SavePoint,
    default_metadata,
    describe_metadata,
    fewer_error,
    likely_causes,
    metadata_error,
    more_error,
)
from remat.eager.recompute.forward import Forward
from remat.eager.recompute.holders import Save

from ...passes.shared import current_module_path
from ..types import CheckpointError


def too_many(forward: Forward, tensor: torch.Tensor, where: str) -> CheckpointError:
    """Return the error for a tensor that the forward did not save."""
    first = (
        f"First tensor too many, in {forward.label}:\n"
        f"  recompute: {describe_metadata(default_metadata(tensor))}, saved {where}\n"
    )
    return more_error(first, likely_causes(None, forward.training_then_and_now(), counts_differ=True))


def too_few(forward: Forward, num_saved: int) -> CheckpointError:
    """Return the error for a recomputation that ended before it had saved all."""
    missing = forward.saves[num_saved]
    seen = f"{describe_metadata(missing[3])}, " if missing[3] is not None else ""
    first = (
        f"First tensor that is missing, number {num_saved} in {forward.label}:\n"
        f"  forward:   {seen}saved at {_save_point_of(missing)}\n"
        f"  recompute: ended before it{_last_seen(forward, num_saved)}\n"
    )
    causes = likely_causes(None, forward.training_then_and_now(), counts_differ=True)
    return fewer_error(len(forward.saves), num_saved, first, causes)


def different(forward: Forward, mismatches: Sequence[tuple[Mismatch, str]]) -> CheckpointError:
    """Return the error for tensors that look otherwise than in forward; each comes with where it was saved again."""
    mismatch, where = mismatches[0]
    first = (
        f"First difference, in {forward.label}:\n"
        f"  forward:   {describe_metadata(mismatch.forward)}, "
        f"saved at {_save_point_of(forward.saves[mismatch.index])}\n"
        f"  recompute: {describe_metadata(mismatch.recompute)}, saved {where}\n"
    )
    causes = likely_causes(mismatch, forward.training_then_and_now(), counts_differ=False)
    return metadata_error([m for m, _ in mismatches], first, causes)


def where_is(caller: Any) -> str:
    """Say which line, function and modules a Python frame belongs to, innermost first."""
    path, names = current_module_path(), []
    frame = caller
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, torch.nn.Module):
            names.append(type(module).__name__)
        frame = frame.f_back
    inside = f" in module {f'{path}: ' if path else ''}{' in '.join(names)}" if names else ""
    return f"at {SavePoint(caller.f_code, caller.f_lasti)}{inside}"


def _last_seen(forward: Forward, num_saved: int) -> str:
    if num_saved == 0:
        return ", without saving any"
    return f"; the last one that both saved was at {_save_point_of(forward.saves[num_saved - 1])}"


def _save_point_of(save: Save) -> SavePoint:
    return SavePoint(save[1], save[2])
