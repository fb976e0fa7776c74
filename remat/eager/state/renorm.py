"""Embeddings with `max_norm`, which shorten rows of their weight in place, in forward, before they look them up.

A recomputation finds the rows as the forward left them, so it must not shorten them again: rounding may shorten a row
once more that has just been shortened. It looks the rows up as they are, provided that nothing has changed them since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from remat.passes.torch_private import set_versions, tree_leaves

from ..types import RENORM, SAC_IGNORED_OPS, CheckpointError, EngineMode, op_facts, storage_id, support_compiled_code


class RenormReplay(EngineMode):  # type: ignore[no-untyped-call]
    """Leave weights alone that the forward has shortened, and raise if an op reads one that it would have shortened.

    What an op reads is right only after as many calls as there were in the whole forward: each may change rows.
    """

    def __init__(self, renormed: Iterable[tuple[str, torch.Tensor, int]], describe: Callable[[str], str]) -> None:
        super().__init__()
        support_compiled_code()
        renormed = list(renormed)
        self._weights = [weight for _, weight, _ in renormed]
        self._versions = [weight._version for weight in self._weights]
        self._names = {storage_id(weight): name for name, weight, _ in renormed}
        self._num_left = {storage_id(weight): num_writes for _, weight, num_writes in renormed}
        self._num_skipped = dict.fromkeys(self._num_left, 0)
        self._describe = describe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skip an op that shortens rows; look at what others read, and run them."""
        kwargs = kwargs or {}
        self._uncount()  # before autograd saves the weight with a version that it will not have at the end
        if func is RENORM and storage_id(args[0]) in self._num_left:
            self._num_left[storage_id(args[0])] -= 1
            self._num_skipped[storage_id(args[0])] += 1
            return args[0]
        if func not in SAC_IGNORED_OPS and not op_facts(func).is_view:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and self._num_left.get(storage_id(leaf), 0) != 0:
                    raise CheckpointError(self._describe(f"`{self._names[storage_id(leaf)]}`, read by {func},"))
        return func(*args, **kwargs)

    def __exit__(self, *exception: object) -> None:
        """Leave the weights with the versions that they had."""
        super().__exit__(*exception)
        self._uncount()

    def _uncount(self) -> None:
        """Take back the counting of writes that were none: torch counts them when the mode has returned."""
        for weight, version in zip(self._weights, self._versions, strict=True):
            num_skipped = self._num_skipped[storage_id(weight)]
            if num_skipped and weight._version == version + num_skipped:
                set_versions((weight,), (version,))
                self._num_skipped[storage_id(weight)] = 0


def renormed_twice(what: str) -> str:
    """Return the message for a weight that was changed by the forward after the op that reads it now."""
    return (
        f"{what} was changed in place by the forward of the region, more than once or by other means than `max_norm` "
        "of an embedding, so a recomputation does not find what the op read. Look up all rows by one call of the "
        "embedding, or take it out of the region."
    )
