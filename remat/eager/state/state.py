"""State that outlives a region: read by it, changed by it, or changed behind its back.

Three promises. A tensor that a recomputation reads is the one its forward read: versions are noted at entry, and a
recomputation that finds one moved runs under a guard that raises if an op reads it. A buffer that the forward changed
(running statistics, counters) has its entry value back while the forward is replayed. And the replay leaves the
buffer itself alone, so that module state moves once per call.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from remat.eager.state import swap
from remat.eager.state.reach import Name, Reached, each_name, module_tree, name_text
from remat.passes.torch_private import DisableTorchDispatch, TorchDispatchMode, tree_leaves

from ...passes.ops import copied_alike
from ..types import CheckpointError, may_be_sharded, storage_id

_GONE = -2  # the version of a tensor that is no more
_RESTING_MAX_BYTES = 1 << 16  # the copy of a larger buffer is not kept on, if a region's first call leaves it alone


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter, or -1 where it keeps none."""
    try:
        return tensor._version
    except (RuntimeError, AttributeError):  # inference tensors, some wrapper subclasses
        return -1


read_version = operator.attrgetter("_version")


def _versions_of(tensors: list[torch.Tensor]) -> list[int]:
    try:
        return list(map(read_version, tensors))
    except (RuntimeError, AttributeError):
        return list(map(version_of, tensors))


Stamp = tuple[int, int, int]
"""Identity, version and memory of a buffer: `buffer.data = other` changes the memory alone."""


def _stamp(buffer: torch.Tensor) -> Stamp:
    return id(buffer), version_of(buffer), storage_id(buffer)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a buffer unseen by dispatch modes: to the policy of a region around, this is no op of the user's."""
    if type(tensor) is not torch.Tensor:
        return copied_alike(tensor.detach())
    with DisableTorchDispatch():
        return copied_alike(tensor.detach())


def _are_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if type(left) is not torch.Tensor:
        return torch.equal(left.detach(), right)
    with DisableTorchDispatch():
        return torch.equal(left.detach(), right)


@dataclass(slots=True)
class BufferFacts:
    """Which buffers of one module its regions change, and in which settings that was looked for."""

    changed: set[str] = field(default_factory=set)
    looked_in: set[tuple[Any, bool]] = field(default_factory=set)
    resting: dict[str, tuple[Stamp, torch.Tensor]] = field(default_factory=dict)
    """Copies of small buffers that nobody has changed so far, with the stamps of what they are copies of.

    One region may run different parts of a model from call to call: the first call says nothing about the others.
    """

    steady: set[str] = field(default_factory=set)
    """Larger buffers that were once looked at before and after a call, and had been left alone by it."""

    def look_for_changes(self, module: nn.Module) -> None:
        """Have resting buffers copied in every call from now on if somebody has changed one of them.

        All of them, since kernels of batch norm change statistics without counting that. The copies stay: calls that
        have begun before the change know the version that they are of.
        """
        values = ((of, module._buffers.get(name)) for name, (of, _) in self.resting.items())
        if any(value is None or of != _stamp(value) for of, value in values):
            self.changed.update(self.resting)


_buffer_facts: weakref.WeakKeyDictionary[nn.Module, BufferFacts] = weakref.WeakKeyDictionary()


class BufferState:
    """The buffers that a region can reach: entry values of those it changes, versions of the others."""

    __slots__ = ("_entry", "_key", "_learning", "_lost", "_modules", "_versions")

    def __init__(self, modules: list[tuple[str, nn.Module]], region_key: Any) -> None:
        self._modules = modules
        self._entry: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._learning: set[tuple[int, str]] = set()
        self._lost: list[tuple[str, torch.Tensor]] = []  # changed by the forward, and no copy from before it
        self._key = region_key
        swap.begin_forward(module for _, module in modules)
        try:
            for _, module in modules:
                self._snapshot(module)
            self._versions = self._read_versions()
        except BaseException:  # no memory left for copies, say
            self.end_forward()
            raise

    def _named(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        for label, module in self._modules:
            for name, value in module._buffers.items():
                if value is not None:
                    yield f"{label}.{name}".lstrip("."), module, name, value

    def _read_versions(self) -> dict[tuple[int, str], Stamp]:
        return {(id(m), name): _stamp(value) for _, m, name, value in self._named()}

    def _snapshot(self, module: nn.Module) -> None:
        """Copy the buffers of one module that a region changes; on its first call, all of them."""
        facts = _buffer_facts.get(module)
        if facts is None:
            facts = _buffer_facts[module] = BufferFacts()
        if not facts.changed.issuperset(facts.resting):
            facts.look_for_changes(module)
        learning = (self._key, module.training) not in facts.looked_in
        for name, value in module._buffers.items():
            if value is not None and (name in facts.changed or (learning and type(value) is torch.Tensor)):
                self._entry.append((module, name, _copy_of(value)))
                if name not in facts.changed:
                    self._learning.add((id(module), name))

    def seal(self) -> None:
        """Look, after the forward, which buffers it changed, and keep the entry values of those only."""
        if self._learning:
            self._entry = [entry for entry in self._entry if self._is_changed(*entry)]
            self._learning = set()
        for _, module in self._modules:  # only now: other threads may be in their own first call
            _buffer_facts[module].looked_in.add((self._key, module.training))
        now = self._read_versions()
        if now == self._versions:
            return
        kept = {(id(module), name) for module, name, _ in self._entry}
        moved = {key[0] for key, version in now.items() if self._versions.get(key) != version}
        for label, module, name, value in self._named():
            key = (id(module), name)
            if key[0] in moved and key not in kept and key in self._versions:
                self._find_entry(label, module, name, value, is_moved=self._versions[key] != now[key])
        self._versions = now

    def _find_entry(self, label: str, module: nn.Module, name: str, value: torch.Tensor, *, is_moved: bool) -> None:
        """Find the entry value of a buffer that was not copied in this call, though the forward changed its module."""
        facts = _buffer_facts[module]
        of, copy = facts.resting.get(name, (None, None))
        is_copy_of_entry = of == self._versions[id(module), name]
        if copy is not None and is_copy_of_entry and not is_moved and _are_equal(value, copy):
            return  # kernels of batch norm change statistics without counting that
        if copy is None and not is_moved and name in facts.steady:
            return  # statistics are never that large
        facts.changed.add(name)
        if copy is not None and is_copy_of_entry:
            self._entry.append((module, name, copy))
        elif is_moved:
            self._lost.append((label, value))

    def _is_changed(self, module: nn.Module, name: str, entry: torch.Tensor) -> bool:
        if (id(module), name) not in self._learning or name in _buffer_facts[module].changed:
            return True
        value, facts = module._buffers.get(name), _buffer_facts[module]
        if value is not None and value.shape == entry.shape and _are_equal(value, entry):
            if entry.nbytes <= _RESTING_MAX_BYTES:
                facts.resting[name] = self._versions[id(module), name], entry
            else:
                facts.steady.add(name)
            return False
        facts.changed.add(name)
        return True

    def moved(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers that are not what the forward read, and that cannot be given back to it."""
        now = self._read_versions()
        if now == self._versions:
            return self._lost
        kept = {(id(module), name) for module, name, _ in self._entry}
        moved = list(self._lost)
        for label, module, name, value in self._named():
            key = (id(module), name)
            before = self._versions.get(key)
            if key not in kept and before is not None and before[0] == id(value) and before != now[key]:
                moved.append((label, value))
        return moved

    def end_forward(self) -> None:
        """Say that the forward is over, whatever came of it."""
        swap.end_forward(module for _, module in self._modules)

    def copies(self) -> swap.Copies:
        """Return the entry values of the buffers that the forward changed, for a replay that changes them again."""
        return [(module, name, _copy_of(entry)) for module, name, entry in self._entry]


class WatchedState:
    """What a region's forward could read besides its arguments, as it was at entry."""

    __slots__ = ("_embeddings", "_identities", "_names", "_parameters", "_tensors", "_versions", "buffers", "renormed")

    def __init__(self, reached: Reached, region_key: Any) -> None:
        # Weakly: what an object of the user's holds may lead to former steps by its history.
        self._tensors = list(map(weakref.ref, reached.tensors))
        self._names = reached.tensor_names
        self._parameters: list[tuple[tuple[Name, str], dict[str, Any]]] = []
        self._identities: list[int] = []
        self._embeddings: list[Any] = []  # whose weights the forward may shorten
        self.buffers: BufferState | None = None
        self.renormed: Sequence[tuple[str, torch.Tensor, int]] = ()
        """Weights of embeddings that the forward has changed, with how often it wrote to them."""
        if reached.modules:
            self._look_into_modules(reached.modules, region_key)
            self._identities = self._read_identities()
            self._versions = self._read_versions()
        else:
            self._versions = _versions_of(reached.tensors)

    def _look_into_modules(self, modules: list[tuple[Name, nn.Module]], region_key: Any) -> None:
        with_buffers: list[tuple[str, nn.Module]] = []
        for root, module in modules:
            tree = module_tree(module)
            self._parameters += [((root, name), values) for name, values in tree.parameters]
            self._embeddings += [e for e in tree.living_embeddings() if e.max_norm is not None]
            for name, reference in tree.with_buffers:
                child = reference()
                if child is not None:
                    with_buffers.append((_join(root, name), child))
        if with_buffers:
            self.buffers = BufferState(with_buffers, region_key)

    def _named(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, reference in zip(each_name(self._names), self._tensors, strict=True):
            yield name_text(name), reference()
        for label, parameters in self._parameters:
            for name, value in parameters.items():
                if value is not None:
                    yield f"{_join(*label)}.{name}".lstrip("."), value

    def tensors(self) -> list[torch.Tensor]:
        """Return all that is watched and still there."""
        buffers = [value for *_, value in self.buffers._named()] if self.buffers is not None else []
        return buffers + [tensor for _, tensor in self._named() if tensor is not None]

    def _read_versions(self) -> list[int]:
        try:
            versions = [reference()._version for reference in self._tensors]  # type: ignore[union-attr]
            for _, parameters in self._parameters:
                versions += [value._version for value in parameters.values() if value is not None]
        except (RuntimeError, AttributeError):
            return [_GONE if tensor is None else version_of(tensor) for _, tensor in self._named()]
        return versions

    def _read_identities(self) -> list[int]:
        """Tell which tensors the parameters are."""
        return [id(value) for _, values in self._parameters for value in values.values() if value is not None]

    def seal(self) -> None:
        """Finish the notes after the forward."""
        try:
            if self.buffers is not None:
                self.buffers.seal()
            if self._embeddings:
                self._note_renormed({id(embedding.weight) for embedding in self._embeddings})
                self._embeddings = []
        finally:
            self.end_forward()

    def end_forward(self) -> None:
        """Say that the forward is over, whatever came of it."""
        if self.buffers is not None:
            self.buffers.end_forward()

    def _note_renormed(self, weights: set[int]) -> None:
        """Take the weights of embeddings for what the forward made of them."""
        now = self._read_versions()
        rows = list(zip(self._named(), self._versions, now, strict=True))
        self.renormed = [
            (n, w, after - v) for (n, w), v, after in rows if id(w) in weights and w is not None and v != after
        ]
        self._versions = [after if id(w) in weights else before for (_, w), before, after in rows]

    def replaced(self) -> str | None:
        """Name a parameter in whose place the forward had another tensor; None if all are what they were.

        FSDP's gathered and sharded parameters take each other's place, and so do those that a hook fetches from
        elsewhere, which are on `meta` until then.
        """
        if not self._parameters:
            return None
        now = self._read_identities()
        if now == self._identities or len(now) != len(self._identities) or may_be_sharded():
            return None
        parameters = list(self._named())[len(self._tensors) :]
        rows = ((name, value, before) for (name, value), before in zip(parameters, self._identities, strict=True))
        return next(
            (n for n, value, before in rows if value is not None and id(value) != before and not value.is_meta), None
        )

    def moved(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that changed since the forward read them, with their names."""
        moved = self.buffers.moved() if self.buffers is not None else []
        now = self._read_versions()
        if now == self._versions or len(now) != len(self._versions):
            return moved  # a different length: parameters came or went, and positions no longer tell
        # Versions of another tensor in the same place have nothing to do with those of the one before.
        identities = [*(None for _ in self._tensors), *self._identities]
        rows = zip(self._named(), self._versions, now, identities, strict=True)
        changed = [item for item, before, after, known in rows if before != after and known in (None, id(item[1]))]
        return moved + [(name, tensor) for name, tensor in changed if tensor is not None]


def _join(root: Name, name: str) -> str:
    root = name_text(root)
    return f"{root}.{name}" if root and name else root or name


class ReadGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise if an op reads a tensor that was changed since the region's forward."""

    def __init__(self, moved: list[tuple[str, torch.Tensor]], describe: Callable[[str], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {storage_id(tensor): name for name, tensor in moved}
        self._held = moved  # so that nothing made here takes the address of one
        self._describe = describe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the tensors an op is given, then run it."""
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and storage_id(leaf) in self._names:
                raise CheckpointError(self._describe(f"`{self._names[storage_id(leaf)]}`, read by {func},"))
        return func(*args, **kwargs)

    def check_saved(self, tensor: torch.Tensor) -> None:
        """Raise if a tensor that backward is about to be given was changed, though no op read it here."""
        if storage_id(tensor) in self._names:
            raise CheckpointError(self._describe(f"`{self._names[storage_id(tensor)]}`, saved for backward,"))
