"""remat as a partition function: what AOTAutograd and inductor call with a joint graph."""

from __future__ import annotations

import hashlib
import itertools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from . import calibration
from .options import Options
from .passes.cost import Callback, CostModel, Flops, Roofline
from .passes.partition import partition
from .passes.plan import Plan
from .passes.torch_private import CustomPartitionerFn
from .version import __version__


class Partitioner(CustomPartitionerFn):
    """Splits joint graphs by remat's plan; picklable, with a key that says all it depends on."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cost_model = cost_model_of(options)
        self._key = _cache_key(options, self.cost_model)

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],  # noqa: ARG002 (part of the protocol; shapes are on the graph)
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph into forward and backward."""
        num_fwd_outputs = kwargs["num_fwd_outputs"]
        split = partition(gm, num_fwd_outputs=num_fwd_outputs, cost_model=self.cost_model, key=self._key)
        if self.options.dump is not None:
            dump(split.plan, Path(self.options.dump))
        return split.forward, split.backward

    def uuid(self) -> str:
        """What compile caches use beside the graph: the same text means the same plan."""
        return self._key

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        # Compile caches pickle the object into their key; only the key's text may count.
        return (str, (self._key,))


def partitioner(**options: Any) -> Partitioner:
    """Make a partition function for `aot_autograd(partition_fn=...)` or inductor's `custom_partitioner_fn`.

    Takes remat's own options; what compiles the graphs is the caller's business, so `inner` and inductor's options
    are not accepted.
    """
    return Partitioner(Options.parse_own(options))


def cost_model_of(options: Options) -> CostModel:
    """Build the cost model that the options ask for."""
    machines = calibration.machines()
    if callable(options.cost_model):
        return Callback(machines, function=options.cost_model)
    models: Mapping[str, Callable[..., CostModel]] = {
        "roofline": Roofline,
        "flops": Flops,
        "profile": calibration.Profile,
    }
    return models[options.cost_model](machines)


def _cache_key(options: Options, cost_model: CostModel) -> str:
    """Everything a plan depends on beside its graph. A dump must be written each time, so it never hits a cache."""
    nonce = uuid.uuid4().hex if options.dump is not None else ""
    text = f"remat {__version__} {source_digest()} torch {torch.__version__} {cost_model.cache_key()} {nonce}"
    return f"remat-{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


@cache
def source_digest() -> str:
    """A digest of remat's own code, so that a changed installation never hits an old entry."""
    from . import passes

    folders = [Path(__file__).parent, *(Path(p) for p in passes.__path__)]
    files = sorted({file.resolve() for folder in folders for file in folder.rglob("*.py")}, key=lambda f: f.name)
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


_numbers = itertools.count()


def dump(plan: Plan, folder: Path) -> None:
    """Write a plan as JSON and as text."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"graph-{os.getpid()}-{next(_numbers):03}"
    (folder / f"{stem}.json").write_text(plan.to_json())
    (folder / f"{stem}.txt").write_text(plan.summary() + "\n")
