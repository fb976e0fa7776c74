"""What the ranks of a test run: small models under DDP, FSDP2, tensor parallelism and pipelines, with and without.

Every program builds the same model twice from the same weights, marks one of the two, trains both for two steps with
the same random numbers, and compares losses and gradients: bit for bit, but for inductor's kernels, which round
differently when they are fused differently.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import remat

HIDDEN, BATCH = 16, 8
REGIONS = ("none", "bare", "policy", "checkpoint", "around")
"""None; layers as regions, without and with a policy; calls of layers, hooks and all, by `checkpoint` and a region."""


class Layer(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(hidden), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.1, num_layers: int = 2, has_unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(HIDDEN, dropout) for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, 4)
        if has_unused:
            self.unused = nn.Linear(HIDDEN, HIDDEN)
        self.call = call_plainly

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


def call_plainly(layer, x):
    return layer(x)


def call_checkpointed(layer, x):
    return remat.checkpoint(layer, x, use_reentrant=False)


@remat.checkpoint_region
def call_as_region(layer, x):
    return layer(x)


def mark(model: nn.Module, region: str, layers: str = "layers.*") -> nn.Module:
    """Mark a model's layers as regions in one of the ways that are tested."""
    if region in ("bare", "policy"):
        remat.apply(model, layers, policy=remat.policies.save_matmuls() if region == "policy" else None)
    elif region == "budget":
        remat.apply(model, layers, memory_budget=0.9)
    elif region != "none":
        model.call = {"checkpoint": call_checkpointed, "around": call_as_region}[region]
    return model


@dataclass(frozen=True)
class Setting:
    """How a program is run: by which engine, with which regions."""

    engine: str = "eager"
    region: str = "bare"

    def __str__(self) -> str:
        return f"{self.engine}-{self.region}"

    def compile(self, module: Any, *, with_remat: bool) -> Any:
        """Compile a module by the engine, with remat's partitioner or with torch's."""
        if self.engine == "eager":
            return module
        if not with_remat:
            return torch.compile(module, backend=self.engine)
        return torch.compile(module, backend="remat", options={"inner": self.engine})

    def compare(self, found: Any, expected: Any, what: str) -> None:
        """Raise unless results are equal, as far as the engine promises that."""
        if self.engine == "inductor":
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")
        elif expected is None or found is None:
            assert found is expected, what
        else:
            assert torch.equal(found, expected), f"{what}: off by {(found - expected).abs().max()}"


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return all of a tensor of which this rank may have only a shard."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def rows_of_rank(x: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    return x.chunk(num_ranks)[rank]


@dataclass(frozen=True)
class Trained:
    """A model whose calls are parallel, or compiled, or both."""

    module: nn.Module
    call: Callable[[torch.Tensor], torch.Tensor]

    def step(self, x: torch.Tensor, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """Run forward and backward; return the loss and whole gradients."""
        self.module.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        loss = self.call(x).square().mean()
        torch.rand(3)  # shifts the generator: a replay from the wrong place is then seen
        loss.backward()
        return loss.detach(), {name: whole(p.grad) for name, p in self.module.named_parameters()}

    def learn(self) -> None:
        """Take one step of plain gradient descent."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


def train_both(
    setting: Setting, model: nn.Module, wrap: Callable[[nn.Module], Any], x: torch.Tensor, *, seed: int, marked=None
) -> None:
    """Train a model and its marked copy side by side, and compare every step."""
    pair = []
    for with_remat in (False, True):
        module = copy.deepcopy(model)
        if with_remat:
            (marked or mark)(module, setting.region)
        pair.append(Trained(module, setting.compile(wrap(module), with_remat=with_remat)))
    for number in range(2):
        (loss, gradients), (our_loss, our_gradients) = (each.step(x, seed + number) for each in pair)
        setting.compare(our_loss, loss, f"loss of step {number}")
        assert list(our_gradients) == list(gradients), "regions change no names"
        for name, gradient in gradients.items():
            setting.compare(our_gradients[name], gradient, f"gradient of {name} in step {number}")
        for each in pair:
            each.learn()


def check_against_one_process(setting: Setting, wrap: Callable[[nn.Module], Any], x: torch.Tensor, rows: Any) -> None:
    """Compare gradients of all ranks together with those of one process that has the whole batch."""
    torch.manual_seed(0)
    reference = Model(dropout=0.0)
    module = copy.deepcopy(reference)
    call = setting.compile(wrap(mark(module, setting.region)), with_remat=True)
    _, expected = Trained(reference, reference).step(x, 0)
    _, found = Trained(module, call).step(rows, 0)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# -------------------------------------------------------------------------------------------------- data parallel


def ddp(setting: Setting, *, static_graph: bool = False, find_unused: bool = False) -> None:
    wrap = functools.partial(
        DistributedDataParallel, static_graph=static_graph, find_unused_parameters=find_unused, bucket_cap_mb=1
    )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(BATCH, HIDDEN)
    rows = rows_of_rank(x, rank, num_ranks)
    train_both(setting, Model(has_unused=find_unused), wrap, rows, seed=10 * rank)
    check_against_one_process(setting, wrap, x, rows)


def budgeted_regions(strategy: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap = {
        "ddp": DistributedDataParallel,
        "fsdp2": shard,
        "tensor parallel": functools.partial(split_products, mesh=mesh),
    }[strategy]
    seed = 0 if strategy == "tensor parallel" else dist.get_rank()
    train_both(Setting("eager", "budget"), Model(num_layers=1), wrap, torch.randn(4, HIDDEN), seed=seed)


def shard(model: nn.Module, *, reshard: bool = True, inner: bool = False, mesh: Any = None) -> nn.Module:
    """Shard every layer, or the two products inside of each, and the rest."""
    for layer in model.layers:
        for part in (layer.up, layer.down) if inner else (layer,):
            fully_shard(part, reshard_after_forward=reshard, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(setting: Setting, *, reshard: bool = True, inner: bool = False) -> None:
    wrap = functools.partial(shard, reshard=reshard, inner=inner)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(BATCH, HIDDEN)
    rows = rows_of_rank(x, rank, num_ranks)
    train_both(setting, Model(), wrap, rows, seed=10 * rank)
    check_against_one_process(setting, wrap, x, rows)


def small_fsdp(setting: Setting) -> None:
    """One layer only, for compilers that take long."""
    train_both(setting, Model(num_layers=1), shard, torch.randn(4, HIDDEN), seed=dist.get_rank())


# -------------------------------------------------------------------------------------------------- tensor parallel


def split_products(model: nn.Module, mesh: Any) -> nn.Module:
    """Split the two products of each layer over ranks."""
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel(setting: Setting) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrap = functools.partial(split_products, mesh=mesh)
    x = torch.randn(BATCH, HIDDEN)
    train_both(setting, Model(), wrap, x, seed=0)
    check_against_one_process(setting, wrap, x, x)


def fsdp_and_tensor_parallel(setting: Setting) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))

    def wrap(model: nn.Module) -> nn.Module:
        return shard(split_products(model, mesh["tensor"]), mesh=mesh["data"])

    row = mesh["data"].get_local_rank()
    x = torch.randn(BATCH, HIDDEN)
    rows = rows_of_rank(x, row, 2)
    train_both(setting, Model(), wrap, rows, seed=10 * row)
    check_against_one_process(setting, wrap, x, rows)


# -------------------------------------------------------------------------------------------------- pipelines


class Stage(nn.Module):
    """Some of the layers of a model."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.call = layers, call_plainly

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def squared_error(output, target):
    return (output - target).square().sum()


def pipeline(setting: Setting, *, schedule: str) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole_model = Model(num_layers=2 * num_ranks)
    x, target = torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN)
    results = []
    for with_remat in (False, True):
        stage = Stage(copy.deepcopy(whole_model.layers[2 * rank : 2 * rank + 2]))
        if with_remat:
            mark(stage, setting.region)
        call = setting.compile(stage, with_remat=with_remat)
        results.append([_run_pipeline(stage, call, schedule, x, target, seed) for seed in (rank, rank + 50)])
    for number, ((loss, gradients), (our_loss, our_gradients)) in enumerate(zip(*results, strict=True)):
        setting.compare(our_loss, loss, f"loss of step {number}")
        for name, gradient in gradients.items():
            setting.compare(our_gradients[name], gradient, f"gradient of {name} in step {number}")


def _run_pipeline(module, call, schedule, x, target, seed):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module.zero_grad(set_to_none=True)
    stage = pipelining.PipelineStage(call, rank, num_ranks, torch.device("cpu"))
    runner = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=squared_error)
    torch.manual_seed(seed)
    losses: list[torch.Tensor] = []
    inputs = (x,) if rank == 0 else ()
    runner.step(*inputs, **({"target": target, "losses": losses} if rank == num_ranks - 1 else {}))
    loss = torch.stack(losses).detach() if losses else torch.zeros(1)
    return loss, {name: p.grad.clone() for name, p in module.named_parameters()}


# -------------------------------------------------------------------------------------------------- routing


def mixtral(setting: Setting, *, strategy: str) -> None:
    """A mixture of experts, whose routing is discrete and different on every rank."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=16,
        attention_dropout=0.1,
        router_jitter_noise=0.1,
        output_router_logits=True,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).train()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    tokens = torch.randint(32, (2, 8))

    def wrap(module: nn.Module) -> Any:
        if strategy == "ddp":
            return _TokensOnly(DistributedDataParallel(module))
        for layer in module.model.layers:
            fully_shard(layer)
        return _TokensOnly(fully_shard(module))

    marked = functools.partial(mark, layers="model.layers.*")
    train_both(setting, model, wrap, tokens, seed=10 * rank, marked=lambda module, region: marked(module, region))


class _TokensOnly(nn.Module):
    """Calls a language model with tokens, and returns its logits and its loss of routing in one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens):
        out = self.model(input_ids=tokens, labels=tokens)
        return out.logits.mean() + out.loss
