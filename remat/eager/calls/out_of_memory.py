"""What to say when memory runs out inside a region: the error stays what it is, and tells what remat could do."""

from __future__ import annotations

from typing import Any

from ...passes.shared import add_advice, is_out_of_memory, policy_name, size
from ..recompute import Forward
from ..selective import Entry, tensors_of


def advise(error: BaseException, forward: Forward, phase: str) -> None:
    """Add to an error what could be done about it, if it says that memory ran out in a forward."""
    if is_out_of_memory(error):
        add_advice(error, f"out of memory in the {phase} of {forward.label}{_remedy(forward)}")


def _remedy(forward: Forward) -> str:
    if forward.policy is None:
        return (
            ", which recomputes everything already; running it takes room for all its activations at once. Cheaper: "
            "smaller regions inside it (remat.apply on its submodules), memory_budget=0.5 on the region, or its inputs "
            "in host memory or on disk (remat.wrappers.offload_wrapper around it)."
        )
    return (
        f", whose policy {_shown(forward.policy)} keeps {_kept_text(forward)} of this call. Cheaper: no policy "
        "(nothing is kept but inputs), a policy that offloads (remat.policies.offload_all(), to disk with "
        'offload="disk"), or memory_budget=0.5 on the region.'
    )


def _shown(policy: Any) -> str:
    return repr(policy) if hasattr(policy, "opinion") else policy_name(policy)


def _kept_text(forward: Forward) -> str:
    entries = [reference() for reference in forward.store.entries.values()] if forward.store is not None else []
    tensors = [tensor for entry in entries if isinstance(entry, Entry) for tensor in tensors_of(entry.val)]
    return size(sum(tensor.nbytes for tensor in tensors))
