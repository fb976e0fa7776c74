"""Accelerate: an `Accelerator` that compiles what it prepares with `backend="remat"`.

    accelerator = Accelerator(dynamo_plugin=dynamo_plugin(memory_budget="2GiB"))
    model, optimizer = accelerator.prepare(model, optimizer)

Regions need nothing: mark them (`remat.apply`, `remat.wrappers`) before the model is prepared.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import TorchDynamoPlugin

from ..compiled import Options


class RematDynamoPlugin(TorchDynamoPlugin):  # type: ignore[misc] # unknown to a type checker
    """Accelerate's plugin for torch.compile. The backends it may name are a closed list, so the last word is here."""

    def to_kwargs(self) -> dict[str, Any]:
        """What the accelerator calls torch.compile with."""
        shared = {key: value for key, value in super().to_kwargs().items() if key in ("dynamic", "fullgraph")}
        return {**shared, "backend": "remat", "options": dict(self.options or {})}


def dynamo_plugin(
    *, dynamic: bool | None = None, fullgraph: bool = False, use_regional_compilation: bool = False, **options: Any
) -> RematDynamoPlugin:
    """Make the `dynamo_plugin` of an Accelerator; keywords are the options of `backend="remat"`."""
    Options.parse(options, None)  # what is wrong with them is said now, not at the first step
    return RematDynamoPlugin(
        backend="inductor",
        dynamic=dynamic,
        fullgraph=fullgraph,
        use_regional_compilation=use_regional_compilation,
        options=options,
    )
