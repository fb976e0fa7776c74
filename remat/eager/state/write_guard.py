"""The guard of a region's first recomputation: it meets state that the region changes and nobody knew of.

State that is found by looking (`reach`) is given its entry value back while a forward is replayed. Looking
misses some: an object held by C++ code, say. The first recomputation of each region therefore runs under a mode that
raises before an op updates a tensor that was there before, in place: it would be updated twice. Ops that only
overwrite are let through, since a second time writes the same. The same mode raises for a random op with a
`torch.Generator` of its own that looking has missed, too: it draws other numbers now than in forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from remat.eager.state.reach import Reached
from remat.eager.state.rng import RngSnapshot
from remat.passes.torch_private import tree_leaves

from ...passes.shared import running_line
from ..types import CheckpointError, EngineMode, support_compiled_code

# In-place ops whose result does not depend on what they overwrite.
_OVERWRITING_NAMES = """
    copy_ fill_ zero_ set_ resize_ resize_as_ index_copy_ index_fill_ index_put_ _index_put_impl_ scatter_ masked_fill_
    masked_scatter_ put_ fill_diagonal_ _foreach_copy_ _foreach_zero_ normal_ uniform_ bernoulli_ random_ exponential_
    cauchy_ log_normal_ geometric_ detach_ requires_grad_ _resize_output_ as_strided_ squeeze_ unsqueeze_ transpose_
    t_ swapaxes_ swapdims_
"""
_OVERWRITING = frozenset(_OVERWRITING_NAMES.split())
# Those of them that leave nothing of what a tensor held before.
_RENEWING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
# In-place ops that change nothing when they are run once more.
_REPEATABLE_NAMES = """
    clamp_ clamp_min_ clamp_max_ hardtanh_ relu_ abs_ sign_ round_ floor_ ceil_ trunc_ nan_to_num_ tril_ triu_
"""
_REPEATABLE = frozenset(_REPEATABLE_NAMES.split())
# Kernels that update running statistics, in train mode, though their schemas do not say so.
_UPDATES_STATISTICS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS, _IS_TRAINING = slice(3, 5), 5  # positions of their arguments

_cleared: set[tuple[int, ...]] = set()
_kept_codes: dict[int, CodeType] = {}  # so that no other code takes the number of one that is in `_cleared`
_cleared_modules: weakref.WeakKeyDictionary[nn.Module, set[tuple[int, ...]]] = weakref.WeakKeyDictionary()


class Clearance:
    """Whether a region, known by the functions and modules it leads to, was once recomputed under guard."""

    __slots__ = ("_held_codes", "_modules", "codes")

    def __init__(self, reached: Reached) -> None:
        self.codes = tuple(map(id, reached.codes))
        self._held_codes = reached.codes
        self._modules = [weakref.ref(module) for _, module in reached.modules] if reached.modules else None

    def is_given(self) -> bool:
        """True if this region needs no guard."""
        if self._modules is None:
            return self.codes in _cleared
        modules = [reference() for reference in self._modules]
        return all(module is None or self.codes in _cleared_modules.get(module, ()) for module in modules)

    def give(self) -> None:
        """Remember that the region changes nothing that it should not."""
        self.keep_codes()
        if self._modules is None:
            _cleared.add(self.codes)
            return
        for reference in self._modules:
            module = reference()
            if module is not None:
                _cleared_modules.setdefault(module, set()).add(self.codes)

    def keep_codes(self) -> None:
        """Keep the functions alive by whose numbers something is remembered."""
        for code in self._held_codes:
            _kept_codes[id(code)] = code


class WriteGuard(EngineMode):  # type: ignore[no-untyped-call]
    """Raise before an op updates, in place, a tensor from before the recomputation."""

    def __init__(
        self,
        describe: Callable[[str], str],
        random_state: RngSnapshot | None,
        label: str,
        outliving: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        support_compiled_code()
        self._describe = describe
        self._random_state = random_state
        self._label = label
        self._own: dict[int, Any] = {}  # storages made or first written here, by address; weak
        # Storages that were there before, as far as is known: an alias made by `.data` counts versions from zero. Held,
        # so that nothing made here takes the address of one; other threads' copies of buffers may be among them.
        self._held = [tensor.untyped_storage() for tensor in outliving if _has_storage(tensor)]
        self._outliving = {storage._cdata for storage in self._held}

    def allow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let some tensors be written to, whose versions may be counted with those of others."""
        for tensor in tensors:
            if _has_storage(tensor):
                self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what an op writes to, run it, and note what it made."""
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None and self._random_state is not None:
            self._check_generator(func, kwargs["generator"], self._random_state)
        written = _written(func, args)
        for tensor in written:
            if tensor._version == 0 and tensor.untyped_storage()._cdata not in self._outliving:
                self._note(tensor)  # nobody has ever written to it, so the forward has not either
            elif not self._is_own(tensor):
                self._check_write(func, tensor)
        out = func(*args, **kwargs)
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note_made(leaf, args)
        return out

    def _check_write(self, func: Any, tensor: torch.Tensor) -> None:
        """Raise if an op writes something else to a tensor from before than the forward did."""
        if _only_overwrites(func):
            if func._opname in _RENEWING and tensor.nbytes == tensor.untyped_storage().nbytes():
                self._note(tensor)  # from here on it is as in forward
        elif tensor._version != 0 or func._opname not in _REPEATABLE:
            raise CheckpointError(self._describe(f"{func} {running_line()}"))

    def _check_generator(self, func: Any, generator: Any, random_state: RngSnapshot) -> None:
        if not random_state.covers(generator):
            raise CheckpointError(drawn_anew(self._label, f"{func} {running_line()}"))

    def _is_own(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        reference = self._own.get(storage._cdata)
        return reference is not None and reference() is not None

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._own[storage._cdata] = weakref.ref(storage)

    def _note_made(self, tensor: torch.Tensor, args: Any) -> None:
        """Note an op's output, unless it is a view of something that was there before."""
        if not _has_storage(tensor):
            return
        address = tensor.untyped_storage()._cdata
        given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and _has_storage(x)]
        if all(x.untyped_storage()._cdata != address for x in given):
            self._note(tensor)


def _only_overwrites(func: Any) -> bool:
    """True if what an op writes does not depend on what was there."""
    return func._opname in _OVERWRITING or "out" in func._overloadname


def _written(func: Any, args: Any) -> list[torch.Tensor]:
    """Return the tensors that an op writes to."""
    if getattr(func, "namespace", None) != "aten":  # a higher-order operator, or somebody's own op: anything goes
        return []
    name = func._opname
    if name in _UPDATES_STATISTICS:
        values = args[_STATISTICS] if args[_IS_TRAINING] else ()
    elif not func._schema.is_mutable:
        return []
    else:
        named = zip(func._schema.arguments, args, strict=False)
        values = [v for a, v in named if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor) and _has_storage(t) and not t.is_inference()]


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided


def changed_twice(label: str, what: str) -> str:
    """Return the message for state that a recomputation would change once more."""
    return (
        f"{label} changes a tensor that outlives it, in place ({what}), and its recomputation in backward would change "
        "it once more. Make it a buffer of a module that the region's function is, closes over or is given, so that it "
        "can be put back for the recomputation, or change it outside of the region."
    )


def drawn_anew(label: str, what: str) -> str:
    """Return the message for a generator whose state the forward did not keep."""
    return (
        f"{label} draws from a torch.Generator ({what}) that is not found through its function, closure, globals, "
        "arguments or modules, so its recomputation in backward draws other numbers than its forward did. Hand the "
        "generator to the region as an argument or make it an attribute of its module; or pass "
        "preserve_rng_state=False if other numbers will do."
    )
