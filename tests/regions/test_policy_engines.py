"""Ready-made policies, names and `remat.apply` do the same in eager and compiled code: gradients, and ops run again."""

from __future__ import annotations

import copy

import pytest
import torch
from support.eager_testing import OpCounter
from torch import nn

import remat
from remat.policies import (
    by_module,
    bytes_above,
    every_nth,
    first_of,
    flops_above,
    offload_names,
    recompute_all,
    save_all,
    save_all_but_names,
    save_matmuls,
    save_names,
)

aten = torch.ops.aten
_COUNTED = ("addmm", "mm", "gelu", "_scaled_dot_product_flash_attention_for_cpu", "native_layer_norm")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return self.out(remat.name(y, "attn_out"))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(16), Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        h = remat.name(self.mlp[0](x), "mlp_in")
        return x + self.mlp[2](self.mlp[1](h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model, run):
    """Return the gradients, and how often backward ran the counted ops."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = run(torch.randn(2, 5, 16)).square().mean()
    with OpCounter() as counter:
        loss.backward()
    # What nobody reads any more may be written over, by the overload that takes the memory for its result.
    runs = {op: counter[f"{op}.default"] + counter[f"{op}.out"] for op in _COUNTED}
    return [p.grad.clone() for p in model.parameters()], runs


@pytest.mark.parametrize(
    "policy",
    [
        None,
        save_all(),
        recompute_all(),
        save_matmuls(),
        save_names("attn_out"),
        save_names("mlp_in"),
        save_all_but_names("mlp_in"),
        save_all_but_names("attn_out"),
        offload_names("mlp_in"),
        by_module({"*.attn": save_all()}),
        by_module({"layers.0.mlp.*": save_all(), "attn": save_matmuls()}),
        every_nth([aten.addmm], 2),
        first_of(save_names("mlp_in"), by_module({"attn": save_matmuls()})),
        bytes_above(1000),
        flops_above(10000),
    ],
    ids=repr,
)
def test_both_engines_run_the_same_ops_again(policy):
    torch.manual_seed(0)
    model = Net()
    expected, _ = gradients(model, model)
    marked = copy.deepcopy(model)
    remat.apply(marked, "layers.*", policy=policy)
    found, counts = gradients(marked, marked)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    compiled = torch.compile(marked, backend="remat", options={"inner": "aot_eager"}, fullgraph=True)
    found, compiled_counts = gradients(marked, compiled)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert compiled_counts == counts
