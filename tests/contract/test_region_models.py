"""Real models with each decoder layer as a region: the same gradients, and the same saved and run in both engines."""

from __future__ import annotations

import functools
import gc
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.harness import recompute_is_ruinous
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import remat
from remat.passes.graph.constraints import Reason

pytestmark = [
    # Dynamo says so of a check of the torch version inside transformers, which is as constant as its cache assumes.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


POLICIES = {
    "save_matmuls": remat.policies.save_matmuls(),
    "save_names": remat.policies.save_names("attn_out"),
    "recompute_all": remat.policies.recompute_all(),
}


class Watcher(TorchDispatchMode):
    """Note what runs and what is allocated."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.given: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self.storages or self.storages[storage._cdata][0].expired():
                self.given.add(storage._cdata)
                self.storages.pop(storage._cdata, None)
        out = func(*args, **(kwargs or {}))
        self.counts[str(getattr(func, "overloadpacket", func)).split(".")[-1].rstrip("_")] += 1
        for storage in _storages(out):
            if storage._cdata not in self.given:
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def live_bytes(self) -> int:
        gc.collect()
        return sum(num_bytes for reference, num_bytes in self.storages.values() if not reference.expired())


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()


@dataclass(frozen=True)
class Step:
    """What one training step computed, kept and ran."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    saved_bytes: int
    discrete_bytes: int
    """Of these, what compiled code keeps because it is a choice among elements."""
    forward: Counter[str]
    backward: Counter[str]


@functools.cache
def take_step(name: str, engine: str, policy: str | None) -> Step:
    torch._dynamo.reset()
    built = zoo.get(name).build("tiny")
    for module in built.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # random numbers cost each engine other bytes
    built.model.config.output_router_logits = False  # whose loss knows no mask of this form
    if policy is not None:
        for layer in built.model.model.layers:
            layer.self_attn.register_forward_hook(_name_output)
        remat.apply(built.model, "model.layers.*", policy=POLICIES[policy])
    model = built.model
    folder = Path(tempfile.mkdtemp())
    if engine != "eager":
        options = {"inner": engine, "cost_model": recompute_is_ruinous, "dump": str(folder)}
        model = torch.compile(model, backend="remat", options=options, fullgraph=True)
    batch = _with_mask(built.make_batch(0), next(built.model.parameters()).dtype)
    built.loss_fn(model, batch)  # compiles
    gc.collect()
    with Watcher() as forward:
        loss = built.loss_fn(model, batch)
    saved_bytes = forward.live_bytes()
    with Watcher() as backward:
        loss.backward()
    gradients = {n: p.grad for n, p in built.model.named_parameters() if p.grad is not None}
    plans = [remat.Plan.from_json(file.read_text()) for file in folder.glob("*.json")]
    discrete_bytes = sum(d.num_bytes for plan in plans for d in plan.saved if d.reason is Reason.DISCRETE)
    return Step(loss.detach(), gradients, saved_bytes, discrete_bytes, forward.counts, backward.counts)


def _name_output(module: Any, args: Any, out: Any) -> Any:
    return (remat.name(out[0], "attn_out"), *out[1:])


def _with_mask(batch: Any, dtype: torch.dtype) -> Any:
    """Give mask and positions: left to itself, transformers makes the mask in compiled code and does without in eager.

    The positions go into every layer, which reads them only without rotary embeddings given. Eager keeps what a region
    is called with, read or not, compiled code what is read; as an input they count for neither.
    """
    batch_size, length = batch["input_ids"].shape
    mask = torch.full((length, length), -torch.inf, dtype=dtype).triu(1).expand(batch_size, 1, -1, -1)
    positions = torch.arange(length).expand(batch_size, -1).contiguous()
    return {**batch, "attention_mask": mask.contiguous(), "position_ids": positions}


every_model = pytest.mark.parametrize("name", ["llama", "mixtral"])
every_policy = pytest.mark.parametrize("policy", list(POLICIES))
every_engine = pytest.mark.parametrize("engine", ["eager", "aot_eager"])

BOOKKEEPING = frozenset(["detach", "view", "as_strided", "alias", "clone", "add", "zeros"])
"""Views, copies for layout, and the sums of gradients: autograd and AOTAutograd write them differently."""


@every_engine
@every_policy
@every_model
def test_gradients_are_those_without_regions(name: str, policy: str, engine: str) -> None:
    marked, plain = take_step(name, engine, policy), take_step(name, engine, None)
    assert torch.equal(marked.loss, plain.loss)
    torch.testing.assert_close(marked.gradients, plain.gradients, rtol=0, atol=0)


@every_policy
@every_model
def test_both_engines_save_the_same_bytes(name: str, policy: str) -> None:
    eager, compiled = take_step(name, "eager", policy), take_step(name, "aot_eager", policy)
    assert compiled.saved_bytes - compiled.discrete_bytes == eager.saved_bytes
    assert (compiled.discrete_bytes > 0) == (name == "mixtral"), "only a router chooses"


@every_policy
@every_model
def test_both_engines_run_the_same_ops(name: str, policy: str) -> None:
    eager, compiled = take_step(name, "eager", policy), take_step(name, "aot_eager", policy)
    assert _compute(eager.forward) == _compute(compiled.forward)
    # What compiled code keeps of the router's choices, and what leads from its input to them, is not run again.
    kept = Counter({"topk": 2, "sort": 2, "histc": 2, "mul": 2, "_to_copy": 2}) if name == "mixtral" else Counter()
    assert _compute(eager.backward) == _compute(compiled.backward) + kept


def test_saving_matmuls_runs_none_again() -> None:
    plain, saved, named, dropped = (take_step("llama", "aot_eager", policy) for policy in (None, *POLICIES))
    assert saved.backward["mm"] == plain.backward["mm"] < named.backward["mm"] < dropped.backward["mm"]
    assert plain.saved_bytes > saved.saved_bytes > named.saved_bytes > dropped.saved_bytes


def _compute(counts: Counter[str]) -> Counter[str]:
    return Counter({op: runs for op, runs in counts.items() if op not in BOOKKEEPING})
