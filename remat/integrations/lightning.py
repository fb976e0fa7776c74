"""Lightning: a callback that marks parts of a LightningModule as regions while it is fitted.

    Trainer(callbacks=[RematCallback("model.layers.*", policy=remat.policies.save_matmuls())])

To compile with a budget, compile the network inside of the LightningModule in its `configure_model`:
`self.model.compile(backend="remat", options={"memory_budget": "40%"})`.
"""

from __future__ import annotations

from typing import Any

import remat

from ..regions import Applied, Target, region_options

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the same library under its older name
    from pytorch_lightning import Callback


class RematCallback(Callback):  # type: ignore[misc] # unknown to a type checker
    """Mark submodules as regions when fitting starts, and undo it when it ends.

    `target` and options are those of `remat.apply`: a pattern, a class or a predicate, and `policy`, `memory_budget`
    and so on.
    """

    def __init__(self, target: Target, **options: Any) -> None:
        super().__init__()
        region_options("RematCallback", {key: value for key, value in options.items() if key != "name"})
        self._target, self._options = target, options
        self.applied: Applied | None = None
        """Which modules are regions; None when nothing is being fitted."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Mark the regions."""
        if stage == "fit":
            self.applied = remat.apply(pl_module, self._target, **self._options)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Undo what `setup` did."""
        if stage == "fit" and self.applied is not None:
            for name in self.applied.names:
                remat.remove(pl_module, name)
            self.applied = None
