"""What dumps say of regions: path, policy and name of every decision, and one call per region in Dynamo's graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from support.harness import recompute_is_ruinous
from torch import nn

import remat

Golden = Callable[[str, str], None]
MUST_SAVE, PREFER_RECOMPUTE = remat.CheckpointPolicy.MUST_SAVE, remat.CheckpointPolicy.PREFER_RECOMPUTE


def save_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_SAVE


def save_attn_out(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_SAVE if args[1:] == ("attn_out",) else PREFER_RECOMPUTE


class Model(nn.Module):
    """Three levels: two decoders, each with attention and two MLPs, each of these with a norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    @remat.checkpoint_region(name="norm", policy=save_all)
    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    @remat.checkpoint_region(name="mlp")
    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.mlp(self.normed(x)))

    @remat.checkpoint_region(name="decoder", policy=save_attn_out)
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = x + remat.name(self.attention(x.sin()), "attn_out")
        return self.feed_forward(self.feed_forward(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.decode(x)).cos()


def plan_of(model: Any, x: torch.Tensor, folder: Path) -> remat.Plan:
    """Compile and return the plan, as it was dumped."""
    options = {"inner": "aot_eager", "cost_model": recompute_is_ruinous, "dump": str(folder)}
    torch.compile(model, backend="remat", options=options, fullgraph=True)(x).sum().backward()
    (file,) = folder.glob("*.json")
    return remat.Plan.from_json(file.read_text())


def test_decisions_name_region_policy_and_value(golden: Golden, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plan = plan_of(Model(), torch.randn(4, 8, requires_grad=True), tmp_path)
    rows = [
        f"{d.value:24} {d.action.name:9} {d.region or '-':18} {d.policy or '-':16} {d.name or '-':8} {d.reason.value}"
        for d in plan.decisions
    ]
    golden("nested_regions.txt", "\n".join(rows) + "\n")


def test_region_fields_survive_json(tmp_path: Path) -> None:
    plan = plan_of(Model(), torch.randn(4, 8, requires_grad=True), tmp_path)
    assert remat.Plan.from_json(plan.to_json()) == plan
    assert any(d.region == "decoder#2/mlp#2/norm" and d.policy == "MUST_SAVE" for d in plan.decisions)
    assert {d.name for d in plan.decisions} == {"", "attn_out"}


def test_paths_do_not_depend_on_what_was_compiled_before(tmp_path: Path) -> None:
    paths = []
    for run in ("first", "second"):
        torch._dynamo.reset()
        plan = plan_of(Model(), torch.randn(4, 8, requires_grad=True), tmp_path / run)
        paths.append([d.region for d in plan.decisions])
    assert paths[0] == paths[1]


def captured(function: Any, *args: Any) -> fx.GraphModule:
    """The graph that Dynamo hands to a backend."""
    seen: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(gm)
        return gm

    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (gm,) = seen
    return gm


def outline(gm: fx.GraphModule, indent: str = "") -> list[str]:
    """The calls of a graph, bodies of regions indented below the call."""
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method") and "getitem" not in str(node.target):
            name = getattr(node.target, "__name__", str(node.target))
            lines.append(indent + re.sub(r"_[0-9a-f]{16}$", "", name))
            bodies = [getattr(gm, str(a.target)) for a in node.all_input_nodes if a.op == "get_attr"]
            lines += [line for body in bodies for line in outline(body, indent + "    ")]
    return lines


def test_graph_of_dynamo_shows_one_call_per_region_call(golden: Golden) -> None:
    gm = captured(Model(), torch.randn(4, 8, requires_grad=True))
    golden("captured_regions.txt", "\n".join(outline(gm)) + "\n")
    assert gm.print_readable(print_output=False).count("torch.ops.higher_order.remat_decoder") == 2


@pytest.mark.parametrize("label", ["", 3, None])
def test_name_must_be_a_text(label: Any) -> None:
    with pytest.raises(remat.OptionError, match="a name is a text that is not empty"):
        remat.name(torch.ones(2), label)


def test_name_is_for_tensors() -> None:
    with pytest.raises(remat.OptionError, match="names a tensor, not list"):
        remat.name([1, 2], "numbers")  # type: ignore[type-var]


def test_naming_adds_no_op_to_the_graphs() -> None:
    graphs: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    def run(x: torch.Tensor) -> torch.Tensor:
        return remat.name(x.sin(), "inner").exp()

    x = torch.randn(4, requires_grad=True)
    torch.compile(run, backend="remat", options={"inner": inner}, fullgraph=True)(x).sum().backward()
    named = [[str(n.target) for n in gm.graph.nodes if n.op == "call_function"] for gm in graphs]
    assert named[0] == ["aten.sin.default", "aten.exp.default"]
    assert not any("alias" in op or "remat" in op for ops in named for op in ops)
