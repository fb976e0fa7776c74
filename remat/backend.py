"""The `torch.compile` backend, where torch looks for it: `torch.compile(model, backend="remat")`."""

from .wiring import backend as remat

__all__ = ["remat"]
