"""torchtitan: its settings of activation checkpointing, read from any object that has them, and carried out by regions.

    apply_ac(model, job_config.activation_checkpoint)

| `mode` | class, since 0.3 | what is done with each block below `model.layers` |
|---|---|---|
| "none" | None | nothing |
| "full" | FullAC | a region that recomputes everything |
| "selective" | SelectiveAC | `selective_ac_option` "op" (or none): keep attention and every second product of |
| | | matrices; a number n: every n-th block is recomputed |
| "memory_budget" | MemoryBudgetAC | a region with `memory_budget`, a fraction of what it takes without recomputation |

Releases before 0.3 name a mode; later ones choose by the class of the settings, `FullAC.Config` and so on. Blocks stay
what they are, so that names of parameters do not change. torchtitan itself is not imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import remat
from remat.regions import policies

from ..passes.shared import CheckpointPolicy, OptionError, PolicyFunction
from ..regions import Applied

_MODES = ("none", "full", "selective", "memory_budget")
_MODE_OF_CLASS = {
    "FullAC.Config": "full",
    "SelectiveAC.Config": "selective",
    "MemoryBudgetAC.Config": "memory_budget",
}
_SHARED = ("preserve_rng_state", "determinism_check", "early_stop", "debug")
_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_KEPT = tuple(
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
        "max",  # scales of low precision come from it
    )
)


def apply_ac(model: nn.Module, config: Any, *, layers: str = "layers") -> Applied:
    """Mark the blocks of a model as torchtitan's settings say, and return which ones."""
    mode = _mode_of(config)
    options = {name: getattr(config, name) for name in _SHARED if hasattr(config, name)}
    blocks = [f"{layers}.{name}" for name, _ in model.get_submodule(layers).named_children()]
    if mode == "none":
        blocks = []
    elif mode == "memory_budget":
        options = {"memory_budget": float(config.memory_budget)}
    elif mode == "selective":
        option = str(getattr(config, "selective_ac_option", "op"))
        if option == "op":
            options["policy"] = selective_ops(model, [part for name in _FORCED for part in getattr(config, name, ())])
        elif option.isdigit() and int(option) > 0:
            blocks = blocks[int(option) - 1 :: int(option)]
        else:
            raise OptionError(f"selective_ac_option={option!r}: expected 'op', or n for every n-th block")
    found = [remat.apply(model, block, **options) for block in blocks]
    return Applied(sum((f.names for f in found), ()), sum((f.classes for f in found), ()))


_FORCED = ("per_op_sac_force_recompute_mm_shapes_by_fqns", "force_recompute_mm_shapes_by_fqns")
"""What releases before and since 0.3 call the layers whose products are recomputed."""


def _mode_of(config: Any) -> str:
    """What the settings ask for, by name or by class."""
    if config is None:
        return "none"
    by_class = (
        _MODE_OF_CLASS[kind.__qualname__] for kind in type(config).__mro__ if kind.__qualname__ in _MODE_OF_CLASS
    )
    mode = getattr(config, "mode", None) or next(by_class, None)
    if mode not in _MODES:
        asked = repr(mode) if mode else f"in {type(config).__qualname__}"
        raise OptionError(f"activation checkpointing has no mode {asked}; it has {', '.join(map(repr, _MODES))}")
    return str(mode)


def selective_ops(model: nn.Module, forced: Any = ()) -> PolicyFunction:
    """The policy of mode "selective": attention, and every second product except for those of `forced` linear layers.

    A product counts as that of a layer, named by a part of its path, if its weight has the layer's shape.
    """
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    shapes = frozenset(
        (module.in_features, module.out_features) for name, module in named if any(part in name for part in forced)
    )

    def recompute_forced(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        if op in _PRODUCTS and shapes and tuple(args[1 + (op is _PRODUCTS[1])].shape) in shapes:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return None

    kept = policies.first_of(policies.save_ops(_KEPT), policies.every_nth(_PRODUCTS, 2))
    return policies.first_of(recompute_forced, kept) if shapes else kept
