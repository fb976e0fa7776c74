"""Which op of a selective region made a value, so that a name given to it later can change what is kept.

A value is found by its memory: views of it lead to the op that allocated it, or that wrote to it last. Values are
known weakly, so that looking costs no memory, with one exception: an op with several results can be kept only whole,
and its other results are held for as long as the first one lives.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from remat.eager.selective.saved import map_tensors, tensors_of
from remat.passes.torch_private import alias_of

from ..state import version_of
from ..types import OpFacts, OpKey


@dataclass(slots=True)
class Made:
    """The call of an op that made a value."""

    key: OpKey
    facts: OpFacts
    memory: weakref.ref[Any]
    first: weakref.ref[torch.Tensor]
    layout: tuple[Any, ...]
    version: int
    others: Any = None
    """The results of an op with several, as aliases, with None in place of the first tensor."""
    other_versions: tuple[int, ...] = ()
    must_be_saved: bool = False
    """Whether the policy said MUST_SAVE of the op."""

    def output(self, value: torch.Tensor) -> Any:
        """Return what the op returned, given a value over the same memory; None if that is gone."""
        first = self.first() if self.memory() is not _memory(value) else self._first(value)
        if first is None or self.others is None:
            return first
        if version_of(first) != self.version:
            return None
        if tuple(version_of(t) for t in tensors_of(self.others)) != self.other_versions:
            return None
        parts = [first if part is None else part for part in self.others]
        return parts if isinstance(self.others, list) else tuple(parts)

    def is_shown_whole_by(self, value: torch.Tensor) -> bool:
        """True if a value over the same memory has every element that the op wrote there."""
        if self.others is not None and self.memory() is not _memory(value):
            return any(t.numel() == value.numel() for t in tensors_of(self.others) if _memory(t) is _memory(value))
        return not self.layout or (value.numel() == self.layout[0].numel() and value.dtype == self.layout[-1])

    def _first(self, value: torch.Tensor) -> torch.Tensor | None:
        first = self.first()
        if first is not None:
            return first
        shape, stride, offset, dtype = self.layout
        is_plain = type(value) is torch.Tensor and value.dtype == dtype and not (value.is_conj() or value.is_neg())
        return alias_of(value).as_strided(shape, stride, offset) if is_plain else None


class Makers:
    """Every value of a running forward that is still alive, with the op that made it."""

    __slots__ = ("_made", "_made_besides")

    def __init__(self) -> None:
        self._made: dict[int, Made] = {}  # by the memory of an op's first result
        self._made_besides: dict[int, Made] = {}  # by that of its other results, for as long as the first one lives

    def note(self, key: OpKey, facts: OpFacts, out: Any, must_be_saved: bool = False) -> None:
        """Remember who made an op's results."""
        if facts.is_view or (facts.mutates and not facts.updates_in_place):
            return  # a view leads to what it views; several places written at once cannot be given back
        if isinstance(out, torch.Tensor):
            self._add(Made(key, facts, *_identify(out), version_of(out) + bool(facts.mutates)))
            return
        if not isinstance(out, (tuple, list)) or not all(isinstance(x, torch.Tensor) or x is None for x in out):
            return
        tensors = [x for x in out if x is not None]
        if tensors and not facts.mutates and tensors[0] is out[0]:
            others: Any = [None, *(map_tensors(alias_of, x) for x in out[1:])]
            others = others if isinstance(out, list) else tuple(others)
            versions = tuple(version_of(t) for t in tensors[1:])
            self._add(Made(key, facts, *_identify(tensors[0]), version_of(tensors[0]), others, versions, must_be_saved))

    def _add(self, made: Made) -> None:
        memory = made.memory()
        identity = id(memory)
        table, besides = self._made, self._made_besides
        others = [id(_memory(tensor)) for tensor in tensors_of(made.others)] if made.others is not None else []

        def forget(reference: weakref.ref[Any]) -> None:
            known = table.get(identity)
            if known is not None and known.memory is reference:
                del table[identity]
                for other in others:
                    besides.pop(other, None)

        made.memory = weakref.ref(memory, forget)
        table[identity] = made
        besides.update(dict.fromkeys(others, made))

    def find(self, value: torch.Tensor) -> Made | None:
        """Return the op that made a value, unless the value was changed since by something unseen."""
        memory = _memory(value)
        made = self._made.get(id(memory))
        if made is None:
            return self._made_besides.get(id(memory))  # whose memory it holds, and looks at its versions itself
        if made.memory() is not memory or version_of(value) != made.version:
            return None
        return made


def _memory(tensor: torch.Tensor) -> Any:
    """Return the object that stands for a tensor's memory; a wrapper or sparse tensor, which has none, for itself."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return tensor
    if tensor.layout is not torch.strided:
        return tensor
    return tensor.untyped_storage()


def _identify(tensor: torch.Tensor) -> tuple[weakref.ref[Any], weakref.ref[torch.Tensor], tuple[Any, ...]]:
    memory = _memory(tensor)
    is_wrapper = memory is tensor
    layout = () if is_wrapper else (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return weakref.ref(memory), weakref.ref(tensor), layout
