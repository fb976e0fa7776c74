"""Programs with regions, and what each op of them is expected to do: run in forward, run again in backward.

A program is a function of `mark`, which is `checkpoint_region`, or its stand-in without effect. It returns what is
run and the arguments. The expectation counts the watched compute ops, "op forward+backward", and holds for every
engine: ops that are not named do not run at all. Backward formulas use other ops than these, so each run in backward
is a recomputation.

Three differences between the engines are inherent, and the programs keep clear of them or say so:

- Eager replays a region from its start to the last value that backward needs, needed or not on the way. Compiled code
  runs what is needed. `only_needed` is the program that shows it.
- Two equal computations are one in compiled code (`x.sin()` twice in one region).
- Discrete choices are kept in compiled code and replayed by the same kernels in eager. `routing` shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import remat

MUST_SAVE = remat.CheckpointPolicy.MUST_SAVE
PREFER_SAVE = remat.CheckpointPolicy.PREFER_SAVE
MUST_RECOMPUTE = remat.CheckpointPolicy.MUST_RECOMPUTE
PREFER_RECOMPUTE = remat.CheckpointPolicy.PREFER_RECOMPUTE
MUST_CPU_OFFLOAD = remat.CheckpointPolicy.MUST_CPU_OFFLOAD

Mark = Callable[..., Any]
aten = torch.ops.aten

SAME_COUNTS = ""
"""Stands for: the eager engine runs what the compiled ones run."""


@dataclass(frozen=True)
class Program:
    """A program and its expected counts."""

    make: Callable[[Mark], tuple[Callable[..., Any], tuple[Any, ...]]]
    counts: str
    eager_counts: str = SAME_COUNTS
    in_bfloat16: bool = False
    is_quick_in_inductor: bool = False

    def expected(self, is_eager: bool) -> dict[str, tuple[int, int]]:
        """Runs in forward and in backward, by op."""
        text = self.eager_counts if is_eager and self.eager_counts != SAME_COUNTS else self.counts
        rows = [item.rsplit(" ", 1) for item in text.split(", ") if item]
        return {op: tuple(int(n) for n in runs.split("+")) for op, runs in rows}  # type: ignore[misc]


PROGRAMS: dict[str, Program] = {}


def program(counts: str, **options: Any) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        PROGRAMS[make.__name__] = Program(make, counts, **options)
        return make

    return add


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# ------------------------------------------------------------------------------------------------- policies


def save_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_SAVE


def save_linear(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.addmm.default


def prefer_linear(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return PREFER_SAVE if op is aten.addmm.default else PREFER_RECOMPUTE


def insist_on_recomputing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_RECOMPUTE


def offload_linear(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return MUST_CPU_OFFLOAD if op is aten.addmm.default else PREFER_RECOMPUTE


def save_small(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return isinstance(ctx.op_output, torch.Tensor) and ctx.op_output.numel() < 20


def save_wide_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.addmm.default and 2 * args[1].numel() * args[2].shape[1] >= 1000


# ------------------------------------------------------------------------------------------------- ways to mark


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x)).sin()


@program("addmm 1+1, gelu 1+1, sin 1+0", is_quick_in_inductor=True)
def function(mark: Mark) -> Any:
    block = Block()
    return mark(lambda x: block(x)), (x_of(4, 8),)


@program("addmm 2+2, gelu 2+2, sin 2+0")
def method(mark: Mark) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @mark
        def part(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.linear(x)).sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(self.part(x))

    return Model(), (x_of(4, 8),)


@program("exp 1+1, sin 1+0")
def closure_over_tensors(mark: Mark) -> Any:
    weight = x_of(8)
    return mark(lambda x: (x * weight.exp()).sin()), (x_of(4, 8),)


@program("addmm 3+3, gelu 3+3, sin 3+0")
def modules(mark: Mark) -> Any:
    return nn.Sequential(*(mark(Block()) for _ in range(3))), (x_of(4, 8),)


@program("addmm 1+1, gelu 1+1, sin 1+0")
def module_with_hooks(mark: Mark) -> Any:
    block = mark(Block())
    block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    block.register_forward_hook(lambda module, args, out: out + 1)
    return nn.Sequential(block), (x_of(4, 8),)


@program("addmm 2+2, gelu 2+2, sin 2+0")
def module_called_twice(mark: Mark) -> Any:
    shared = mark(Block())
    return nn.Sequential(shared, nn.Identity(), shared), (x_of(4, 8),)


@program("exp 1+1, sin 1+0, sigmoid 1+1")
def pytrees_and_defaults(mark: Mark) -> Any:
    @mark(name="tree")
    def region(data: Any, factors: Any, *rest: Any, scale: float = 2.0, wanted: bool = True, extra: Any = None) -> Any:
        y = data["a"].exp() * factors[0] + data["b"][0] * scale
        z = y.sigmoid()
        return {"y": y.sin(), "z": [z, 3, None], "text": "none"} if wanted else y

    def run(x: torch.Tensor) -> Any:
        out = region({"a": x, "b": (x * 2,)}, [3, 4], 7, extra=x)
        assert out["text"] == "none" and out["z"][1] == 3 and out["z"][2] is None
        return out["y"], out["z"][0]

    return run, (x_of(4, 8),)


@program("addmm 1+1, gelu 1+1, sin 1+0")
def marked_inside_the_program(mark: Mark) -> Any:
    block = Block()
    return (lambda x: mark(name="inner")(lambda y: block(y))(x)), (x_of(4, 8),)


@program("addmm 1+0, gelu 1+1, sin 1+0")
def marked_inside_the_program_with_a_policy(mark: Mark) -> Any:
    block = Block()
    return (lambda x: mark(policy=save_linear)(lambda y: block(y))(x)), (x_of(4, 8),)


@program("sin 4+3, exp 4+4")
def recursive(mark: Mark) -> Any:
    @mark
    def region(x: torch.Tensor, depth: int) -> torch.Tensor:
        y = x.exp().sin()
        return region(y, depth - 1) if depth else y

    return (lambda x: region(x, 3)), (x_of(4, 8),)


@program("addmm 3+3, gelu 3+3, sin 3+0", is_quick_in_inductor=True)
def in_a_chain(mark: Mark) -> Any:
    block = Block()
    region = mark(lambda x: block(x))
    return (lambda x: region(region(region(x)))), (x_of(4, 8),)


@program("exp 1+1, sin 1+0, sigmoid 1+0")
def output_that_the_outside_needs(mark: Mark) -> Any:
    region = mark(lambda x: (x * 2).exp().sin())
    return (lambda x: region(x).sigmoid()), (x_of(4, 8),)


@program("exp 1+1, sin 1+1, sigmoid 1+0")
def output_that_both_sides_need(mark: Mark) -> Any:
    region = mark(lambda x: x.sin().exp())
    return (lambda x: region(x).sigmoid() * 2), (x_of(4, 8),)


# ------------------------------------------------------------------------------------------------- what is inside


@program("exp 1+1, relu 1+1, sigmoid 1+1, sin 1+0")
def in_place(mark: Mark) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(8))

        @mark
        def part(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1.0)
            y = x.exp() * 2
            y.add_(1.0)
            y = y * y
            F.relu_(y)
            return y.sigmoid().sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    return Model(), (x_of(4, 8),)


@program("addmm 1+1, batch_norm 1+1, gelu 1+0", is_quick_in_inductor=True)
def batch_norm(mark: Mark) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        @mark
        def part(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.norm(self.linear(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    return Model(), (x_of(4, 8),)


@program("bernoulli 1+1, gelu 1+1, sin 1+0")
def dropout(mark: Mark) -> Any:
    return mark(lambda x: F.dropout(F.gelu(x), 0.5, True).sin()), (x_of(4, 8),)


@program("addmm 1+1, gelu 1+1, sin 1+0", in_bfloat16=True)
def autocast_inside(mark: Mark) -> Any:
    block = Block()

    @mark
    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x)

    return (lambda x: region(x).float()), (x_of(4, 8),)


@program("addmm 1+1, gelu 1+1, sin 1+0", in_bfloat16=True)
def autocast_around(mark: Mark) -> Any:
    block = Block()
    region = mark(lambda x: block(x))

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return region(x).float()

    return run, (x_of(4, 8),)


@program("sigmoid 1+1, exp 1+1, sin 1+0")
def no_grad_inside(mark: Mark) -> Any:
    @mark
    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = x.sigmoid()
        return (x.exp() * weight).sin()

    return region, (x_of(4, 8),)


@program("addmm 1+1, attention 1+1, sin 1+0")
def attention(mark: Mark) -> Any:
    linear = nn.Linear(8, 8)

    @mark
    def region(x: torch.Tensor) -> torch.Tensor:
        h = linear(x.reshape(16, 8)).reshape(1, 2, 8, 8)
        return F.scaled_dot_product_attention(h, h, h, is_causal=True).sin()

    return region, (x_of(16, 8),)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@program("exp 1+1, sin 1+0")
def autograd_function(mark: Mark) -> Any:
    return mark(lambda x: Square.apply(x.exp()).sin()), (x_of(4, 8),)


@torch.library.custom_op("remat_test_regions::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, grad: grad * 2)


@program("twice 1+1, exp 1+1, sin 1+0")
def custom_op(mark: Mark) -> Any:
    return mark(lambda x: twice(x.exp()).sin()), (x_of(4, 8),)


@program("sin 1+0, exp 1+0")
def views_of_inputs_as_outputs(mark: Mark) -> Any:
    region = mark(lambda x: (x, x.view(-1), x.sin()))
    return (lambda x: [out * 2 for out in region(x.exp())]), (x_of(4, 8),)


@program("sin 1+1, exp 1+1")
def side_effects_in_python(mark: Mark) -> Any:
    seen: list[torch.Tensor] = []
    calls: list[int] = []

    @mark
    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if not remat.is_recomputing():
            seen.append(y)
            calls.append(len(calls))
        return y.exp()

    def run(x: torch.Tensor) -> Any:
        seen.clear()
        out = region(x)
        return out, seen[0] * 2, len(seen)

    return run, (x_of(4, 8),)


@program("layer_norm 1+1, addmm 2+1, gelu 1+1, softmax 1+1, sin 1+0")
def several_ops(mark: Mark) -> Any:
    norm, first, second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    @mark
    def region(x: torch.Tensor) -> torch.Tensor:
        return second(F.gelu(first(norm(x))).softmax(-1)) + x

    return (lambda x: region(x).sin()), (x_of(4, 8),)


@program("sigmoid 1+0, exp 1+1, sin 1+0", eager_counts="sigmoid 1+1, exp 1+1, sin 1+0")
def only_needed(mark: Mark) -> Any:
    return mark(lambda x: x.sigmoid().detach() + x.exp().sin()), (x_of(4, 8),)


@program("topk 1+0, exp 1+1, sin 1+0", eager_counts="topk 1+1, exp 1+1, sin 1+0")
def routing(mark: Mark) -> Any:
    @mark
    def region(x: torch.Tensor) -> torch.Tensor:
        values, _ = x.exp().topk(2)
        return values.sin()

    return region, (x_of(4, 8),)


# ------------------------------------------------------------------------------------------------- policies


def two_linears(mark: Mark, policy: Any) -> Any:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    return mark(policy=policy)(lambda x: F.gelu(second(F.gelu(first(x)))).sin()), (x_of(4, 8),)


@program("addmm 2+0, gelu 2+2, sin 1+0", is_quick_in_inductor=True)
def save_listed_ops(mark: Mark) -> Any:
    return two_linears(mark, [aten.addmm.default])


@program("addmm 2+0, gelu 2+2, sin 1+0")
def save_listed_packets(mark: Mark) -> Any:
    return two_linears(mark, [aten.addmm])


@program("addmm 2+0, gelu 2+2, sin 1+0")
def answer_with_bools(mark: Mark) -> Any:
    return two_linears(mark, save_linear)


@program("addmm 2+0, gelu 2+2, sin 1+0")
def prefer_to_save(mark: Mark) -> Any:
    return two_linears(mark, prefer_linear)


@program("addmm 2+2, gelu 2+2, sin 1+0")
def must_recompute(mark: Mark) -> Any:
    return two_linears(mark, insist_on_recomputing)


@program("addmm 2+0, gelu 2+0, sin 1+0")
def save_everything(mark: Mark) -> Any:
    return two_linears(mark, save_all)


@program("addmm 2+0, gelu 2+2, sin 1+0", is_quick_in_inductor=True)
def offload(mark: Mark) -> Any:
    return two_linears(mark, offload_linear)


@program("addmm 2+1, gelu 1+1, sin 1+0")
def save_by_size(mark: Mark) -> Any:
    wide, narrow = nn.Linear(8, 8), nn.Linear(8, 4)
    return mark(policy=save_small)(lambda x: narrow(F.gelu(wide(x))).sin()), (x_of(4, 8),)


@program("addmm 2+1, gelu 1+1, sin 1+0")
def save_by_work(mark: Mark) -> Any:
    wide, narrow = nn.Linear(8, 32), nn.Linear(32, 2)
    return mark(policy=save_wide_products)(lambda x: narrow(F.gelu(wide(x))).sin()), (x_of(4, 8),)


@program("addmm 4+2, gelu 4+4, sin 1+0")
def save_every_second_product(mark: Mark) -> Any:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        if op is not aten.addmm.default:
            return False
        ctx.state["products"] = ctx.state.get("products", 0) + 1
        return ctx.state["products"] % 2 == 0

    @mark(policy=policy)
    def region(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = F.gelu(layer(x))
        return x.sin()

    return region, (x_of(4, 8),)


# ------------------------------------------------------------------------------------------------- nesting


@program("sin 2+2, exp 2+2, sigmoid 1+1, gelu 1+0")
def nested(mark: Mark) -> Any:
    inner = mark(name="inner")(lambda x: x.sin().exp())
    outer = mark(name="outer")(lambda x: F.gelu(inner(inner(x * 2) + 1).sigmoid()))
    return outer, (x_of(4, 8),)


@program("addmm 2+1, gelu 2+1, sin 1+0")
def block_saved_inside(mark: Mark) -> Any:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    block = mark(name="kept", policy=save_all)(lambda x: F.gelu(first(x)))
    return mark(lambda x: F.gelu(second(block(x))).sin()), (x_of(4, 8),)


@program("addmm 2+1, gelu 2+1, sin 1+0")
def block_recomputed_inside(mark: Mark) -> Any:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    block = mark(name="dropped")(lambda x: F.gelu(first(x)))
    return mark(policy=save_all)(lambda x: F.gelu(second(block(x))).sin()), (x_of(4, 8),)


@program("addmm 3+2, gelu 3+3, sin 1+0")
def policies_at_three_levels(mark: Mark) -> Any:
    a, b, c = (nn.Linear(8, 8) for _ in range(3))
    inner = mark(name="inner")(lambda x: F.gelu(a(x)))
    middle = mark(name="middle", policy=save_linear)(lambda x: F.gelu(b(inner(x))))
    return mark(name="outer")(lambda x: F.gelu(c(middle(x))).sin()), (x_of(4, 8),)


# ------------------------------------------------------------------------------------------------- names


def save_named(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return args[1:] == ("kept",) and str(op).startswith("remat.")


@program("addmm 2+1, gelu 2+2, sin 1+0")
def named_value(mark: Mark) -> Any:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    @mark(policy=save_named)
    def region(x: torch.Tensor) -> torch.Tensor:
        h = remat.name(first(x), "kept")
        return F.gelu(remat.name(second(F.gelu(h)), "other")).sin()

    return region, (x_of(4, 8),)
