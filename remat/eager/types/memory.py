"""Which memory a tensor has."""

from __future__ import annotations

import torch


def storage_id(tensor: torch.Tensor) -> int:
    """Identify the memory behind a tensor."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):  # wrapper subclasses own no storage
        return id(tensor)
