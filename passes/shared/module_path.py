"""Which module an op is called in, as a path like `layers.3.attn`: what `ctx.module` says to a policy, and plans to us.

Nothing is tracked: a running forward is found on Python's own stack, where each module's call is a frame, and a graph
that is being traced carries the path with its nodes. That is right in forward and in recompute, on any thread, and
costs nothing where nobody asks.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch.fx as fx
from torch import nn

from ..torch_private import MODULE_CALL_CODE, fx_current_meta, is_tracing

_WORD = re.compile(r"\w+")
# Where Dynamo's name for a module leaves plain attributes: what comes before is how the module was found.
_DETOURS = frozenset({"cell_contents", "__self__", "__func__", "__closure__", "__wrapped__", "_orig_mod"})
# How a module is found from the `forward` that stands in for its own, and in dictionaries.
_OWN_DETOURS = re.compile(r"\.forward\.(module\(\)|__self__)|\.__dict__")

_names_below: weakref.WeakKeyDictionary[nn.Module, dict[int, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def current_module_path() -> str:
    """Return the path of the innermost module whose forward is running, from the outermost one; "" outside of both."""
    stack = fx_current_meta().get("nn_module_stack") if is_tracing() else None
    return path_of_stack(stack) if stack else _path_of_modules(_running_modules())


def path_of_stack(stack: Mapping[Any, tuple[str, Any]]) -> str:
    """Return the path of the innermost module of an FX node's `nn_module_stack`."""
    if not stack:
        return ""
    text = _OWN_DETOURS.sub("", list(stack.values())[-1][0])
    words = _WORD.findall(text)
    if re.match(r"[LG]\[", text):
        words = words[2:]  # the variable that holds the root
    detours = [i for i, word in enumerate(words) if word in _DETOURS]
    if detours:
        words = words[detours[-1] + 1 :]
    return ".".join(word for word in words if word != "_modules")


def path_of_node(node: fx.Node) -> str:
    """Return the path of the innermost module that a node of a joint graph belongs to."""
    return path_of_stack(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {})


def _running_modules() -> list[nn.Module]:
    """Return the modules whose forward is running on this thread, outermost first."""
    found: list[nn.Module] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_CALL_CODE:
            module = frame.f_locals["self"]
            if not found or found[-1] is not module:
                found.append(module)
        frame = frame.f_back
    found.reverse()
    return found


def _path_of_modules(modules: list[nn.Module]) -> str:
    parts: list[str] = []
    for outer, inner in pairwise(modules):
        below = _path_below(outer, inner)
        # A module that is no part of the one that calls it starts a path of its own.
        parts = [] if below is None else [*parts, *below]
    return ".".join(parts)


def _path_below(outer: nn.Module, inner: nn.Module) -> tuple[str, ...] | None:
    known = _names_below.get(outer)
    path = known.get(id(inner)) if known is not None else None
    if path is None or not _is_at(outer, path, inner):
        known = _names_below[outer] = {id(m): tuple(name.split(".")) for name, m in outer.named_modules() if name}
        path = known.get(id(inner))
    return path


def _is_at(module: nn.Module, path: tuple[str, ...], wanted: nn.Module) -> bool:
    found: nn.Module | None = module
    for part in path:
        found = found._modules.get(part) if found is not None else None
    return found is wanted


def matches(pattern: str, path: str) -> bool:
    """True if a pattern matches a whole path: `*` stands for one name or a part of one, `**` for any number of names.

    >>> matches("layers.*.mlp", "layers.3.mlp"), matches("layers.*", "layers.3.mlp"), matches("**.mlp", "layers.3.mlp")
    (True, False, True)
    """
    return _compiled(pattern).fullmatch(_dotted(path)) is not None


def ends_match(pattern: str, path: str) -> bool:
    """True if a pattern matches the end of a path, or of a module's path around it.

    >>> ends_match("*.attn", "layers.3.attn.q_proj"), ends_match("mlp", "layers.3.mlp"), ends_match("mlp", "my_mlp")
    (True, True, False)
    """
    if pattern in ("*", "**"):
        return True
    return _compiled(f"**.{pattern}.**").fullmatch(_dotted(path)) is not None


def _dotted(path: str) -> str:
    """Return a path in which every name, the last one too, ends in a dot."""
    return f"{path}." if path else ""


_patterns: dict[str, re.Pattern[str]] = {}


def _compiled(pattern: str) -> re.Pattern[str]:
    known = _patterns.get(pattern)
    if known is None:
        text = "".join(_segment(part) for part in pattern.split(".")) if pattern else ""
        known = _patterns[pattern] = re.compile(text)
    return known


def _segment(part: str) -> str:
    if part == "**":
        return r"(?:[^.]+\.)*"
    text = "".join(r"[^.]*" if c == "*" else r"[^.]" if c == "?" else re.escape(c) for c in part)
    return rf"{text}\."
