"""Transformers: the layers that `activation_checkpointing_enable` checkpoints, as regions.

enable(model, policy=remat.policies.save_matmuls())      # instead of model.activation_checkpointing_enable()
Trainer(..., callbacks=[RematCallback(compile={"memory_budget": "40%"})])
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from ..passes.shared import RematError
from ..regions import RegionCall, region_options

_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"


def enable(model: PreTrainedModel, *, every_n_layers: int = 1, **options: Any) -> tuple[str, ...]:
    """Switch gradient checkpointing on, with regions in place of torch's checkpoints; return their names.

    Options are those of `checkpoint_region`: `policy`, `memory_budget`, `offload` and so on. The model's own rules
    hold: which modules are checkpointed, in training only, without a cache. `model.activation_checkpointing_disable()`
    undoes it (`gradient_checkpointing_disable()` in releases before 5.23).
    """
    checked = region_options(type(model).__name__, options)
    keywords = {} if every_n_layers == 1 else {"every_n_layers": every_n_layers}
    # Transformers gave it another name, and is about to forget the old one.
    switch_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch_on({"use_reentrant": False}, **keywords)
    modules = [(path, module) for path, module in model.named_modules() if getattr(module, _FLAG, False)]
    if not all(hasattr(module, _FUNCTION) for _, module in modules):
        raise RematError(
            f"{type(model).__name__} has its own way of gradient checkpointing, which does not take a function to do "
            'it with. Mark its layers instead: remat.apply(model, "...layers.*", ...).'
        )
    for path, module in modules:
        setattr(module, _FUNCTION, RegionCall(region_options(path or checked.name, options)))
    return tuple(path for path, _ in modules)


class RematCallback(TrainerCallback):  # type: ignore[misc] # unknown to a type checker
    """Train with regions, with a compiled step, or with both; a region's options go by keyword.

    `compile` holds options of `backend="remat"`, a memory budget say; `None` compiles nothing. Without options of
    regions a compiled step has none.
    """

    def __init__(self, *, compile: dict[str, Any] | None = None, every_n_layers: int = 1, **options: Any) -> None:
        region_options("RematCallback", options)  # what is wrong with them is said now
        self._compile, self._every_n_layers, self._options = compile, every_n_layers, options

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:  # noqa: ARG002
        """Mark and compile the model before its first step."""
        assert model is not None, "Trainer hands its model to every callback"
        if self._options or self._compile is None:
            enable(model, every_n_layers=self._every_n_layers, **self._options)
        if self._compile is not None:
            model.compile(backend="remat", options=self._compile)  # in place: Trainer keeps the model it has
