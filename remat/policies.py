"""Ready-made policies for regions; each also works when handed to torch's own selective checkpointing."""

from .regions import (
    by_module,
    bytes_above,
    bytes_below,
    every_nth,
    first_of,
    flops_above,
    offload_all,
    offload_names,
    recompute_all,
    save_all,
    save_all_but_names,
    save_matmuls,
    save_names,
    save_ops,
)

__all__ = [
    "by_module",
    "bytes_above",
    "bytes_below",
    "every_nth",
    "first_of",
    "flops_above",
    "offload_all",
    "offload_names",
    "recompute_all",
    "save_all",
    "save_all_but_names",
    "save_matmuls",
    "save_names",
    "save_ops",
]
