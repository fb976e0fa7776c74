"""The `torch.compile` backend, where torch looks for it: `torch.compile(model, backend="remat")`."""

from .compiled.backend import remat

__all__ = ["remat"]
