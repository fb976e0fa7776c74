"""Regions in compilers other than remat's, across graph breaks, and with policies that go wrong."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from support.harness import count_backward_ops, recompute_is_ruinous
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode

import remat
from remat.passes.shared.policy import PolicyError

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    # torch's own: Dynamo looks at `.grad` of what it passes from graph to graph, and takes modules apart for export.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes? .* assigned during export:UserWarning"),
]

aten = torch.ops.aten
MUST_SAVE = remat.CheckpointPolicy.MUST_SAVE
MUST_RECOMPUTE = remat.CheckpointPolicy.MUST_RECOMPUTE
PREFER_RECOMPUTE = remat.CheckpointPolicy.PREFER_RECOMPUTE

every_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "remat"])


class Model(nn.Module):
    def __init__(self, policy: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.region = remat.checkpoint_region(name="part", policy=policy)(self.part)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(remat.name(self.linear(x), "product")).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region(x) * 2


def compile_with_remat(function: Any, **options: Any) -> Any:
    options = {"inner": "aot_eager", "cost_model": recompute_is_ruinous, **options}
    return torch.compile(function, backend="remat", options=options)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# ------------------------------------------------------------------------------------------------- other compilers


@every_backend
def test_gradients_with_every_backend(backend: str) -> None:
    model, x = Model([aten.addmm]), x_of(4, 8)
    (expected,) = torch.autograd.grad((F.gelu(model.linear(x)).sin() * 2).sum(), x)
    (grad,) = torch.autograd.grad(torch.compile(model, backend=backend, fullgraph=True)(x).sum(), x)
    torch.testing.assert_close(grad, expected)


@every_backend
@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients(backend: str, without_grad: Any) -> None:
    model, x = Model(), torch.randn(4, 8)
    with without_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))


RANDOM = {
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
    "in_place": lambda x: x.sin().uniform_() * x,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "attention_without_dropout": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "nested": lambda x: remat.checkpoint_region(lambda y: torch.rand_like(y) * y)(x.sin()),
}


def unmarked(function: Any = None, **_: Any) -> Any:
    """Stand for `checkpoint_region` where there is to be no region."""
    return function if function is not None else unmarked


@contextmanager
def frozen(linear: nn.Linear) -> Iterator[None]:
    linear.requires_grad_(False)
    yield
    linear.requires_grad_(True)


NOT_DIFFERENTIATED = {
    "no_grad": lambda linear: torch.no_grad(),
    "inference_mode": lambda linear: torch.inference_mode(),
    "frozen": frozen,
    "detached": lambda linear: nullcontext(),
}


COMPILERS = {
    "aot_eager": functools.partial(torch.compile, backend="aot_eager", fullgraph=True),
    "remat": compile_with_remat,
}


def run_and_train(mark: Any, body: Any, reason: str, compiler: str) -> list[torch.Tensor]:
    """Run a compiled program whose graph has no backward, and then a step of the same program that has one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)
    region = mark(policy=lambda ctx, op, *args, **kwargs: MUST_RECOMPUTE)(lambda x: body(linear(x)).reshape(4, 8).exp())
    program = lambda x, detach: region(region(x)).detach() if detach else region(region(x))  # noqa: E731
    compiled = COMPILERS[compiler](program)
    with NOT_DIFFERENTIATED[reason](linear):
        untrained = compiled(torch.randn(4, 8), reason == "detached")
    compiled(torch.randn(4, 8), False).sum().backward()
    assert linear.weight.grad is not None
    return [untrained, linear.weight.grad, torch.get_rng_state()]


WITHOUT_BACKWARD = [("dropout", reason) for reason in NOT_DIFFERENTIATED] + [
    (body, "no_grad") for body in RANDOM if body != "dropout"
]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(("body", "reason"), WITHOUT_BACKWARD)
def test_random_numbers_in_graphs_without_backward(body: str, reason: str, compiler: str) -> None:
    found = run_and_train(remat.checkpoint_region, RANDOM[body], reason, compiler)
    expected = run_and_train(unmarked, RANDOM[body], reason, compiler)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("compiler", COMPILERS)
@torch._dynamo.config.patch(trace_autograd_ops=True)
def test_random_numbers_in_a_graph_with_a_backward_of_its_own(compiler: str) -> None:
    def run(mark: Any) -> tuple[torch.Tensor, ...]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        linear, x = nn.Linear(8, 8), x_of(4, 8)
        region = mark(lambda x: F.dropout(linear(x), 0.5).sin())
        return COMPILERS[compiler](lambda x: torch.autograd.grad(region(region(x)).sum(), x))(x)

    assert torch.equal(*run(remat.checkpoint_region), *run(unmarked))


class Tripled(TorchFunctionMode):
    """Triples what `relu` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.relu else out


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


FUNCTION_MODES = {"device": lambda: torch.device("cpu"), "default_device": default_device, "users": Tripled}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("mode", FUNCTION_MODES.values(), ids=FUNCTION_MODES)
@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_function_modes_see_the_ops_of_regions(mode: Any, compiler: str, is_compiled_before: bool) -> None:
    model = nn.Sequential(Model(), Model())
    layer = remat.checkpoint_region(name="outer")(lambda x: torch.relu(model(x)) + torch.ones(8))
    x = torch.randn(4, 8)
    compiled = COMPILERS[compiler](layer)
    if is_compiled_before:
        compiled(x)
    with mode():
        found, expected = compiled(x), layer(x)
    assert torch.equal(found, expected)
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(out.sum(), parameters) for out in (found, expected)]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_device_context_holds_inside_of_regions(compiler: str) -> None:
    region = remat.checkpoint_region(lambda x: x + torch.ones(8))
    with torch.device("meta"):
        assert COMPILERS[compiler](lambda: region(torch.zeros(4, 8)))().device.type == "meta"


@every_backend
def test_under_transforms_of_torch_func(backend: str) -> None:
    region, x = remat.checkpoint_region(lambda x: x.sin().exp()), torch.randn(4, 8)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda t: region(t).sum())(x)

    def per_row(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: region(row).sum()))(x)

    expected = x.cos() * x.sin().exp()
    for function in (gradient, per_row):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(x), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    model, x = Model(), torch.randn(4, 8)
    exported = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(exported.module()(x), model(x))
    ops = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert ops == ["aten.linear.default", "aten.gelu.default", "aten.sin.default", "aten.mul.Tensor"]


@pytest.mark.parametrize(("policy", "runs"), [(None, 1), (lambda ctx, op, *args: MUST_RECOMPUTE, 1), ([aten.addmm], 0)])
def test_torch_partitioner_honours_the_policy_too(policy: Any, runs: int) -> None:
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition
    )
    counts = count_backward_ops(
        lambda model: torch.compile(model, backend=backend, fullgraph=True), lambda: (Model(policy), (x_of(4, 8),))
    )
    assert counts["aten.addmm"] == runs


def test_eager_backend_drops_activations_at_run_time() -> None:
    counts = count_backward_ops(
        lambda model: torch.compile(model, backend="eager", fullgraph=True), lambda: (Model(), (x_of(4, 8),))
    )
    assert counts["aten.addmm"] == counts["aten.gelu"] == 1


def test_dynamic_shapes_keep_the_region(tmp_path: Path) -> None:
    model = Model([aten.addmm])
    compiled = compile_with_remat(model, dump=str(tmp_path))
    for rows in (4, 6, 9):
        x = x_of(rows, 8)
        (grad,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad((F.gelu(model.linear(x)).sin() * 2).sum(), x)[0])
    plans = [remat.Plan.from_json(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert len(plans) == 2, "one for the first shape, one for all"
    for plan in plans:
        assert [d.op for d in plan.saved if d.region == "part"] == ["aten.addmm.default"]


def test_policy_is_asked_once_per_op_in_program_order() -> None:
    asked: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(f"{op} {tuple(ctx.op_output.shape)}")
        return False

    x = x_of(4, 8)
    compile_with_remat(Model(policy))(x).sum().backward()
    # A linear layer transposes its weight first; the name is asked about as an op of its own.
    expected = ["aten.t.default (8, 8)", "aten.addmm.default (4, 8)", "remat.named.default (4, 8)"]
    assert asked == [*expected, "aten.gelu.default (4, 8)", "aten.sin.default (4, 8)"]


# ------------------------------------------------------------------------------------------------- graph breaks


class Broken(nn.Module):
    def __init__(self, policy: Any, name: str = "broken") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.region = remat.checkpoint_region(name=name, policy=policy)(self.part)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x)).sin()
        torch._dynamo.graph_break()
        return F.gelu(self.second(x)).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region(x * 2) * 3


def test_graph_break_keeps_both_sides_compiled_and_the_policy_in_force(tmp_path: Path) -> None:
    model, x = Broken([aten.addmm]), x_of(4, 8)
    (expected,) = torch.autograd.grad((model.part(x * 2) * 3).sum(), x)
    compiled = compile_with_remat(model, dump=str(tmp_path))
    with pytest.warns(UserWarning, match="graph break in region broken") as caught:
        (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    compiled(x_of(4, 8)).sum().backward()  # a second warning would be an error here
    torch.testing.assert_close(grad, expected)
    plans = [remat.Plan.from_json(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    saved = [[d.op for d in plan.saved if d.region == "broken"] for plan in plans]
    assert [ops for ops in saved if ops] == [["aten.addmm.default"]] * 2
    (warning,) = [w for w in caught if "graph break" in str(w.message)]
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "graph_break()" in text)
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert f"{__file__}:{line}" in str(warning.message)


def test_policy_is_in_force_after_a_graph_break_although_the_code_also_runs_without_a_region(tmp_path: Path) -> None:
    model = Broken([aten.addmm], "sometimes")  # each region reports a line once
    compiled = compile_with_remat(lambda x: model.part(x) + model(x) + model.part(x), dump=str(tmp_path))
    with pytest.warns(UserWarning, match="graph break in region sometimes"):
        compiled(x_of(4, 8)).sum().backward()
    plans = [remat.Plan.from_json(file.read_text()) for file in tmp_path.glob("*.json")]
    regions = [d.region for plan in plans for d in plan.decisions if d.op == "aten.addmm.default"]
    assert sorted(regions) == ["", "", "sometimes", "sometimes"]


def test_graph_break_in_a_bare_region_recomputes_both_sides() -> None:
    counter = CompileCounter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = count_backward_ops(compile_with_remat, lambda: (Broken(None), (x_of(4, 8),)))
        torch._dynamo.reset()
        torch.compile(Broken(None), backend=counter)(x_of(4, 8))
    assert counts["aten.addmm"] == 2
    assert counter.frame_count >= 3, "before the region, and the region's two sides"


def test_graph_break_is_an_error_with_fullgraph() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(Broken(None), backend="remat", fullgraph=True)(x_of(4, 8))


# ------------------------------------------------------------------------------------------------- wrong policies


def raised_by(policy: Any, function: Any = None) -> str:
    """Compile a region with a policy that goes wrong; return what remat says."""
    region = remat.checkpoint_region(name="wrong", policy=policy)(function or (lambda x: x.exp().sin()))
    outer = remat.checkpoint_region(name="outer")(lambda x: region(x))
    with pytest.raises(BackendCompilerFailed) as caught:
        compile_with_remat(outer)(x_of(4, 8)).sum().backward()
    assert isinstance(caught.value.inner_exception, remat.RematError)
    return str(caught.value.inner_exception)


def test_policy_that_raises_is_named() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return {}["missing"]

    text = raised_by(policy)
    assert "<locals>.policy (" in text and f"{__file__}:" in text
    assert "raised KeyError when asked about aten.exp.default in region outer/wrong at " in text


def test_answer_that_is_no_policy_is_refused() -> None:
    text = raised_by(lambda ctx, op, *args, **kwargs: "save")
    assert "answered 'save' for aten.exp.default, which is neither a CheckpointPolicy nor a bool" in text
    assert "in region outer/wrong at " in text


@torch.library.custom_op("remat_test_capture::fill", mutates_args=("x",))
def fill(x: torch.Tensor) -> torch.Tensor:
    x.fill_(1.0)
    return x.clone()


fill.register_fake(lambda x: torch.empty_like(x))


def test_must_recompute_of_what_runs_once_is_refused() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(4, 8)
        return (x.exp() * fill(buffer)).sin()

    text = raised_by(lambda ctx, op, *args, **kwargs: MUST_RECOMPUTE, region)
    assert "says MUST_RECOMPUTE for" in text and "effectful op, runs once" in text
    assert "of region outer/wrong" in text and f"{__file__}:" in text


def test_contradiction_between_an_op_and_one_of_its_results_is_explained() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if args[1:] == ("spread",):
            return MUST_RECOMPUTE
        return MUST_SAVE if op is aten.var_mean.correction else PREFER_RECOMPUTE

    def region(x: torch.Tensor) -> torch.Tensor:
        return remat.name(torch.var_mean(x.exp(), 1)[0], "spread").sin()

    text = raised_by(policy, region)
    assert "may be neither saved nor recomputed" in text
    assert "policy says recompute" in text and "policy says save" in text
    assert "in region outer/wrong, where the policy" in text and f"{__file__}:" in text


# ------------------------------------------------------------------------------------------------- options


def test_random_numbers_are_drawn_anew_if_the_region_says_so() -> None:
    def grads(preserve: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)

        @remat.checkpoint_region(preserve_rng_state=preserve)
        def region(x: torch.Tensor) -> torch.Tensor:
            return (x * torch.bernoulli(torch.full_like(x, 0.5))).square()

        out = compile_with_remat(region)(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        return out.detach(), grad

    out, grad = grads(True)
    assert torch.equal(grad, 2 * out)
    out, grad = grads(False)
    assert not torch.equal(grad, 2 * out)


def test_offloaded_value_leaves_forward_as_a_copy(tmp_path: Path) -> None:
    graphs: list[Any] = []

    def inner(gm: Any, example_inputs: Any) -> Any:
        graphs.append([str(node.name) for node in gm.graph.nodes])
        return gm

    policy = lambda ctx, op, *args, **kwargs: (  # noqa: E731
        remat.CheckpointPolicy.MUST_CPU_OFFLOAD if op is aten.addmm.default else PREFER_RECOMPUTE
    )
    compile_with_remat(Model(policy), inner=inner, dump=str(tmp_path))(x_of(4, 8)).sum().backward()
    assert "addmm_offloaded" in graphs[0]
    assert "addmm_reloaded" in graphs[1]
    (file,) = tmp_path.glob("*.json")
    plan = remat.Plan.from_json(file.read_text())
    assert [(d.value, d.reason.name) for d in plan.offloaded] == [("addmm", "POLICY_OFFLOAD")]
    assert "offloaded        1" in plan.summary() and plan.offloaded[0] not in plan.saved


def test_names_beat_what_was_said_of_the_op() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return MUST_SAVE if args[1:] == ("product",) else MUST_RECOMPUTE

    counts = count_backward_ops(compile_with_remat, lambda: (Model(policy), (x_of(4, 8),)))
    assert (counts["aten.addmm"], counts["aten.gelu"]) == (0, 1)


def test_a_name_that_must_be_recomputed_is_not_saved() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return MUST_RECOMPUTE if args[1:] == ("product",) else MUST_SAVE

    counts = count_backward_ops(compile_with_remat, lambda: (Model(policy), (x_of(4, 8),)))
    assert (counts["aten.addmm"], counts["aten.gelu"]) == (1, 0)


def run_named(answer: Any, part: Any) -> Any:
    """Name a part of a linear layer's output; return what backward runs."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return answer if args[1:] == ("part",) else PREFER_RECOMPUTE

    def make() -> Any:
        linear = nn.Linear(8, 8)

        @remat.checkpoint_region(policy=policy)
        def region(x: torch.Tensor) -> torch.Tensor:
            h = linear(x)
            return F.gelu(remat.name(part(h), "part")) + F.gelu(h).sum()

        return region, (x_of(4, 8),)

    return count_backward_ops(compile_with_remat, make)


@pytest.mark.parametrize("part", [lambda h: h[:, :4], lambda h: h.chunk(2, 1)[0], lambda h: h.t()[:3]], ids=range(3))
def test_naming_a_part_names_what_it_is_a_view_of(part: Any) -> None:
    assert run_named(MUST_SAVE, part)["aten.addmm"] == 0
    assert run_named(MUST_RECOMPUTE, part)["aten.addmm"] == 1


def test_a_name_has_no_effect_on_what_an_inner_region_returned() -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return MUST_SAVE if args[1:] == ("inner",) else PREFER_RECOMPUTE

    def make() -> Any:
        linear = nn.Linear(8, 8)
        inner = remat.checkpoint_region(lambda x: linear(x))
        return remat.checkpoint_region(policy=policy)(lambda x: F.gelu(remat.name(inner(x), "inner"))), (x_of(4, 8),)

    assert count_backward_ops(compile_with_remat, make)["aten.addmm"] == 1


def test_a_marked_module_stays_the_module_it_is() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    keys = list(module.state_dict())
    marked = remat.checkpoint_region(module)
    assert marked is module and type(marked) is nn.Sequential and list(marked.state_dict()) == keys
    x = x_of(4, 8)
    compile_with_remat(marked)(x).sum().backward()
    assert list(marked.state_dict()) == keys and x.grad is not None


def test_policy_error_is_a_value_error() -> None:
    assert issubclass(PolicyError, ValueError)
