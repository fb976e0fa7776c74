"""Results written over what nobody reads any more: the same bits in less memory, and never over what is still read."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from support import zoo
from support.joints import capture
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat.passes.graph import checked_forms
from remat.passes.graph.overwrite import overwritable, overwritten_by, write_over
from remat.passes.pipeline import Partitioned, run
from remat.passes.plans.request import Request
from remat.passes.prices.cost import Callback
from remat.passes.shared.errors import VerificationError
from remat.passes.shared.executor import Executor
from remat.passes.write.verify import verify_memory
from remat.report.observed.counting import activation_peak, clear_gradients

aten = torch.ops.aten
FREE = Callback(function=lambda call: 0.0)


# --- one op ---------------------------------------------------------------------------------------------------------


def arguments_of(op: Any, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Made-up arguments for one call; what a backward formula takes as its result lies where results do."""
    made = iter([(torch.rand(shape) * 0.8 + 0.1).to(dtype) for _ in op._schema.arguments])
    if op in checked_forms.BY_ROW:
        tensors = [t.softmax(-1) for t in (next(made), next(made))]
        is_backward = "backward" in str(op)
        return (*tensors, -1, dtype) if is_backward else (tensors[0], -1, False)
    values: list[Any] = []
    for argument in op._schema.arguments:
        if str(argument.type) == "Tensor":
            is_mask = argument.name in ("condition", "mask")
            values.append(next(made) > 0.5 if is_mask else next(made))
        elif argument.default_value is None and not argument.has_default_value():
            values.append(0.7)  # which no type holds exactly
    return tuple(values)


def graph_of(op: Any, args: tuple[Any, ...]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph with nothing but one call, with what the tensors are like written on its nodes."""
    graph = fx.Graph()
    nodes: list[Any] = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for k, arg in enumerate(args):
            node = graph.placeholder(f"x{k}") if isinstance(arg, torch.Tensor) else arg
            if isinstance(node, fx.Node):
                node.meta["val"] = mode.from_tensor(arg)
            nodes.append(node)
        call = graph.call_function(op, tuple(nodes))
        call.meta["val"] = op(*[n.meta["val"] if isinstance(n, fx.Node) else n for n in nodes])
    graph.output(call)
    return graph, [call, *(n for n in nodes if isinstance(n, fx.Node))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7,), (3, 5, 17), (64, 1000), (5, 2048)], ids=str)
@pytest.mark.parametrize("op", list(checked_forms.FORMS), ids=str)
def test_result_over_an_input_has_the_same_bits(op: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = arguments_of(op, shape, dtype)
    expected = op(*args)
    _, (call, *sources) = graph_of(op, args)
    found = list(overwritable(call))
    assert found, "the op is listed, and all of its tensors are alike"
    for source in found:
        own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        changed, (node, *inputs) = graph_of(op, args)
        write_over(node, inputs[sources.index(source)])
        result = fx.GraphModule(nn.Module(), changed)(*[a for a in own if isinstance(a, torch.Tensor)])
        assert torch.equal(result, expected)
        target = [a for a in own if isinstance(a, torch.Tensor)][sources.index(source)]
        assert result.data_ptr() == target.data_ptr()
        assert result.stride() == expected.stride()


def test_every_listed_form_takes_the_same_arguments_and_a_place() -> None:
    for op, form in checked_forms.FORMS.items():
        given = [(a.name, str(a.type)) for a in form._schema.arguments if not a.is_out]
        taken = [(a.name, str(a.type)) for a in op._schema.arguments]
        # A number may be given where a tensor is taken.
        assert [(name, type_) for name, type_ in given if (name, "number") not in taken or type_ != "Tensor"] == [
            (name, type_) for name, type_ in taken if type_ != "number" or (name, "Tensor") not in given
        ]
        assert form._schema.is_mutable


def sources_of(function: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    """What the last op of a function could write over."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = make_fx(function, tracing_mode="fake")(*[mode.from_tensor(a) for a in args])
    last = next(n for n in reversed(traced.graph.nodes) if n.op == "call_function")
    return [node.name for node in overwritable(last)]


def test_inputs_of_another_kind_are_left_alone() -> None:
    x, row = torch.rand(4, 6), torch.rand(6)
    assert sources_of(lambda x, y: x + y, x, x.clone()) == ["x_1", "y_1"]
    assert sources_of(lambda x, y: y + x, x, row) == ["x_1"], "a row is smaller than the result"
    assert sources_of(lambda x, y: x + y, x.double(), x) == ["x_1"], "of another type"
    assert sources_of(lambda x, y: x + y, x, torch.rand(6, 4).t()) == ["x_1"], "laid out in another way"
    assert sources_of(lambda x, y: x + y, x, row.expand(4, 6)) == ["x_1"], "one row read many times"
    assert sources_of(lambda x: x * 2, torch.arange(6)) == [], "only what gradients are made of"
    assert sources_of(lambda x: x @ x, torch.rand(4, 4)) == [], "reads its input again and again"
    assert sources_of(lambda x: x.softmax(-1), x) == ["x_1"]
    assert sources_of(lambda x: x.softmax(0), x) == [], "columns"
    assert sources_of(lambda x: x.softmax(-1), torch.rand(4, 6, 2).transpose(1, 2)) == [], "not in one piece"
    assert sources_of(lambda x: aten._softmax.default(x, -1, False), x[0]) == ["x_1"]


# --- what lies in memory in another way than traced -------------------------------------------------------------------


def layouts_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of a shape, or that broadcast to it, that lie in memory in many ways."""
    dense = []
    for order in itertools.permutations(range(len(shape))):
        back = [order.index(dim) for dim in range(len(shape))]
        dense.append(torch.rand([shape[dim] for dim in order]).permute(back))
    gaps = torch.rand(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    return [*dense, gaps, torch.rand(shape[1:]), torch.rand(shape[-1]).expand(shape), torch.rand(())]


def calls_of(op: Any, dtype: torch.dtype, num_calls: int = 60) -> Iterator[tuple[Any, ...]]:
    """Calls of an op with tensors that lie in memory in different ways, some of all that there are."""
    num_tensors = sum(str(argument.type) == "Tensor" for argument in op._schema.arguments)
    for shape in [(3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1)]:
        choices = list(itertools.product(layouts_of(shape), repeat=num_tensors))
        picked = random.Random(0).sample(choices, min(num_calls // 4, len(choices)))
        for tensors in [choices[0], *picked]:  # the first all lie row by row
            left = iter(tensors)
            made = arguments_of(op, shape, dtype)
            args = [next(left).to(a.dtype) if isinstance(a, torch.Tensor) else a for a in made]
            yield tuple(args)


def is_possible(op: Any, args: tuple[Any, ...]) -> bool:
    try:
        op(*args)
    except RuntimeError:  # a softmax's inputs must have one shape
        return False
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", list(checked_forms.FORMS), ids=str)
def test_what_is_written_over_lies_where_the_kernel_would_put_its_result(op: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_found = 0
    for args in filter(functools.partial(is_possible, op), calls_of(op, dtype)):
        expected = op(*args)
        _, (call, *sources) = graph_of(op, args)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        for source in overwritable(call):
            num_found += 1
            assert tensors[sources.index(source)].stride() == expected.stride()
    assert num_found


@pytest.mark.parametrize("op", list(checked_forms.FORMS), ids=str)
def test_plain_op_runs_where_one_input_lies_in_another_way_than_traced(op: Any) -> None:
    shape = (3, 4, 5)
    args = arguments_of(op, shape, torch.float32)
    _, (call, *sources) = graph_of(op, args)
    for source, position in itertools.product(overwritable(call), range(len(sources))):
        own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        own[position] = args[position].permute(2, 0, 1).contiguous().permute(1, 2, 0)
        tensors = [a for a in own if isinstance(a, torch.Tensor)]
        expected, before = op(*own), [t.clone() for t in tensors]
        changed, (node, *inputs) = graph_of(op, args)
        write_over(node, inputs[sources.index(source)])
        result = fx.GraphModule(nn.Module(), changed)(*tensors)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
        assert all(map(torch.equal, tensors, before)), "nothing was written over"


@pytest.mark.parametrize("other", [torch.rand(4, 6).double(), torch.rand(4, 12)[:, ::2], torch.rand(6, 4).t()])
def test_plain_op_runs_where_an_input_is_of_another_type_or_has_gaps(other: torch.Tensor) -> None:
    x, y = torch.rand(4, 6), torch.rand(4, 6)
    graph, (node, first, _) = graph_of(aten.add.Tensor, (x, y))
    write_over(node, first)
    result = fx.GraphModule(nn.Module(), graph)(x, other)
    assert torch.equal(result, x + other)
    assert result.dtype is (x + other).dtype


def test_stride_of_a_dimension_of_size_one_is_looked_at() -> None:
    """Elements lie alike whatever it is, and yet kernels choose the layout of images by it."""
    x = torch.rand(1, 4, 6)
    graph, (node, first) = graph_of(aten.neg.default, (x,))
    write_over(node, first)
    odd = x.as_strided((1, 4, 6), (1, 6, 1))
    assert odd.is_contiguous()
    result = fx.GraphModule(nn.Module(), graph)(odd)
    assert result.data_ptr() != odd.data_ptr()
    assert result.stride() == odd.neg().stride()


def test_result_of_one_number_may_be_written_over_another() -> None:
    x = torch.rand(())
    graph, (node, first) = graph_of(aten.neg.default, (x,))
    assert list(overwritable(node)) == [first]
    write_over(node, first)
    assert fx.GraphModule(nn.Module(), graph)(x).data_ptr() == x.data_ptr()


def test_graph_that_writes_over_inputs_can_be_printed_and_copied() -> None:
    x, y = torch.rand(4, 6), torch.rand(6, 4).t()
    for args in [(x, x.clone()), (y, y.clone())]:
        graph, (node, first, _) = graph_of(aten.add.Tensor, args)
        write_over(node, first)
        assert overwritten_by(node) is first
        module = fx.GraphModule(nn.Module(), graph)
        assert "add_Tensor__" in module.code
        twin = copy.deepcopy(module)
        (call,) = twin.graph.find_nodes(op="call_function", target=node.target)
        assert overwritten_by(call) is call.args[0]
        target, other = (a.clone() for a in args)
        assert twin(target, other).data_ptr() == target.data_ptr()


def test_what_a_graph_calls_is_found_by_name_in_any_process() -> None:
    function = checked_forms.checked_form(aten.where.self, "mRr")
    text = f"import pickle, torch; f = pickle.loads({pickle.dumps(function)!r}); x = torch.rand(2, 3)"
    check = "assert f(x > 0.5, x, -x).data_ptr() == x.data_ptr() and f.__name__ == 'where_self__mRr'"
    subprocess.run([sys.executable, "-c", f"{text}; {check}"], check=True, timeout=120)
    with pytest.raises(AttributeError):
        checked_forms.add_Tensor__rr  # noqa: B018


# --- whole graphs ---------------------------------------------------------------------------------------------------


def split(function: Callable[..., Any], *args: Any, cost_model: Any = FREE, **kwargs: Any) -> Partitioned:
    joint = capture(function, *args, **kwargs)
    return run(
        joint.module, Request(cost_model, executor=Executor(overwrites=True)), num_fwd_outputs=joint.num_fwd_outputs
    )


def overwriting(graph: fx.Graph) -> list[tuple[str, str]]:
    """Which nodes write over which."""
    pairs = ((node, overwritten_by(node)) for node in graph.nodes)
    return [(node.name, target.name) for node, target in pairs if target is not None]


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(shape, requires_grad=True)


def test_chain_of_pointwise_ops_takes_one_buffer() -> None:
    halves = split(lambda x, w: ((x @ w).neg() * 2 + 1).sum(), leaf(4, 4), leaf(4, 4))
    assert overwriting(halves.forward.graph) == [("neg", "mm"), ("mul", "neg"), ("add", "mul")]


def test_what_is_read_later_or_returned_is_kept() -> None:
    read_later = split(lambda x, w: ((y := x @ w).neg() * y).sum(), leaf(4, 4), leaf(4, 4), cost_model=ruinous())
    assert ("neg", "mm") not in overwriting(read_later.forward.graph)
    returned = split(lambda x, w: ((y := x @ w), y.neg().sum()), leaf(4, 4), leaf(4, 4))
    assert overwriting(returned.forward.graph) == []
    view_returned = split(lambda x, w: ((y := x @ w).view(-1), y.neg().sum()), leaf(4, 4), leaf(4, 4))
    assert overwriting(view_returned.forward.graph) == []


def ruinous() -> Callback:
    """Recomputing is so dear that all is kept."""
    return Callback(function=lambda call: 1.0)


def test_what_backward_gets_is_kept() -> None:
    halves = split(lambda x, w: (x @ w).sin().exp().sum(), leaf(4, 4), leaf(4, 4), cost_model=ruinous())
    assert ("sin", "mm") not in overwriting(halves.forward.graph), "the gradient of sin needs the product"
    given = {node.name for node in halves.backward.graph.nodes if node.op == "placeholder"}
    assert not given & {target for _, target in overwriting(halves.backward.graph)}


def test_what_the_caller_gave_is_kept() -> None:
    halves = split(lambda x: x.neg().exp().sum(), leaf(4, 4))
    targets = {target for _, target in overwriting(halves.forward.graph)}
    assert targets <= {"neg"}


def test_memory_with_other_views_is_kept() -> None:
    halves = split(lambda x, w: ((y := x @ w) + y.t()).neg().sum(), leaf(4, 4), leaf(4, 4))
    assert ("neg", "add") in overwriting(halves.forward.graph)
    assert all(name != "add" for name, _ in overwriting(halves.forward.graph)), "its other input lies across the first"


def test_part_of_larger_memory_is_not_taken() -> None:
    halves = split(lambda x, w: (x @ w).split(2)[0].neg().sum(), leaf(4, 4), leaf(4, 4))
    assert overwriting(halves.forward.graph) == []


def test_one_of_several_results_may_be_taken() -> None:
    halves = split(lambda x, w: F.layer_norm(x @ w, (4,)).neg().sum(), leaf(4, 4), leaf(4, 4))
    assert ("neg", "getitem") in overwriting(halves.forward.graph)


def test_random_op_that_is_replayed_hides_nothing() -> None:
    def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return (F.dropout(y, 0.5).sin() + y.neg()).sum()

    halves = split(dropped, leaf(4, 4), leaf(4, 4))
    assert "run_and_save_rng_state" in [node.name for node in halves.forward.graph.nodes]
    assert ("neg", "mm") in overwriting(halves.forward.graph)


@pytest.fixture
def hiding_op() -> Iterator[Any]:
    with torch.library._scoped_library("remat_test_overwrite", "FRAGMENT") as library:
        library.define("passes_on(Tensor x) -> Tensor")
        library.impl("passes_on", lambda x: x.clone(), "CompositeExplicitAutograd")
        library.impl("passes_on", lambda x: torch.empty_like(x), "Meta")
        library.impl("passes_on", torch.library.fallthrough_kernel, "Autograd")
        yield torch.ops.remat_test_overwrite.passes_on.default


def test_memory_that_an_unknown_op_has_seen_is_kept(hiding_op: Any) -> None:
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return hiding_op(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    halves = split(lambda x, w: (Seen.apply(y := x @ w).neg() + y.sin()).sum(), leaf(4, 4), leaf(4, 4))
    assert not {"mm", "passes_on"} & {target for _, target in overwriting(halves.forward.graph)}


def test_symbolic_sizes_are_compared_as_expressions() -> None:
    def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([x, y.detach()]) * 2
        return whole[: x.shape[0]].neg().sum()

    halves = split(part, leaf(4, 6), torch.rand(5, 6), dynamic=True)
    assert all(target != "slice_1" for _, target in overwriting(halves.forward.graph))
    same = split(lambda x: ((x * 2).sin() * 3).neg().sum(), leaf(4, 6), dynamic=True)
    assert len(overwriting(same.forward.graph)) >= 2, "equal whatever the sizes are"


# --- the check of finished graphs -----------------------------------------------------------------------------------


def traced(function: Callable[..., Any], *args: torch.Tensor) -> fx.Graph:
    return make_fx(function)(*args).graph


def find(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def test_reading_what_is_not_there_any_more_is_refused() -> None:
    graph = traced(lambda x: ((y := x.sin()).neg(), y.exp()), torch.rand(4))
    verify_memory(graph)
    write_over(find(graph, "neg"), find(graph, "sin"))
    with pytest.raises(VerificationError, match="`exp` reads `sin`, whose memory holds another result"):
        verify_memory(graph)


def test_reading_it_through_a_view_is_refused() -> None:
    graph = traced(views, torch.rand(4))
    write_over(find(graph, "neg"), find(graph, "sin"))
    with pytest.raises(VerificationError, match="reads `view`"):
        verify_memory(graph)


def views(x: torch.Tensor) -> Any:
    y = x.sin()
    view = y.view(2, 2)
    return y.neg(), view.exp()


def test_results_of_one_op_have_memory_of_their_own() -> None:
    def dropped(x: torch.Tensor) -> Any:
        out, mask = aten.native_dropout.default(x, 0.5, True)
        return out.neg(), mask

    graph = traced(dropped, torch.rand(4))
    write_over(find(graph, "neg"), find(graph, "getitem"))
    verify_memory(graph)
    graph = traced(lambda x: ((y := x.sin()).split(2)[0].neg(), y.exp()), torch.rand(4))
    write_over(find(graph, "neg"), find(graph, "getitem"))
    with pytest.raises(VerificationError, match="`exp` reads `sin`"):
        verify_memory(graph)


def test_writing_over_what_was_given_is_refused() -> None:
    graph = traced(lambda x: x.neg(), torch.rand(4))
    write_over(find(graph, "neg"), find(graph, "x_1"))
    with pytest.raises(VerificationError, match="`neg` writes over `x_1`, which is not the graph's alone"):
        verify_memory(graph)


def test_writing_over_what_an_unknown_op_has_seen_is_refused(hiding_op: Any) -> None:
    graph = traced(lambda x: (hiding_op(y := x.sin()), y.neg()), torch.rand(4))
    write_over(find(graph, "neg"), find(graph, "sin"))
    with pytest.raises(VerificationError, match="not the graph's alone"):
        verify_memory(graph)


# --- a step ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Has a loss over many classes, gates, normalisation, dropout, and a buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            gate, value = layer(x).chunk(2, -1)
            x = x + F.dropout(F.silu(gate) * value.relu(), 0.1)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def gradients(model: nn.Module, step: Callable[[], torch.Tensor], backwards: int = 1) -> list[torch.Tensor]:
    clear_gradients(model.parameters())
    torch.manual_seed(3)
    loss = step()
    for number in range(backwards):
        loss.backward(retain_graph=number + 1 < backwards)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("budget", [None, 0.7, 0.4, "minimum"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_step_has_eagers_gradients_and_the_predicted_peak(budget: Any, backwards: int, tmp_path: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, tokens = Net(), torch.randint(40, (6, 30))
    options = {"inner": "aot_eager", "dump": str(tmp_path), "memory_budget": budget}
    if budget == "minimum":
        options.update(memory_budget=1024, on_infeasible="minimum")
    compiled = torch.compile(lambda: model(tokens), backend="remat", options=options, fullgraph=True)
    expected = gradients(model, lambda: model(tokens), backwards)
    with pytest.warns(UserWarning, match="lowest plan") if budget == "minimum" else nullcontext():
        found = gradients(model, compiled, backwards)
    assert all(map(torch.equal, found, expected))
    (file,) = tmp_path.glob("*.json")
    peak = activation_peak(compiled, list(model.parameters()), counter="dispatch").activation_bytes
    assert peak - remat.Plan.load(file).peak.num_bytes in (0, 4), "backward() starts with a one of its own"


def test_loss_of_a_large_vocabulary_needs_its_gradient_once() -> None:
    """The scores, their gradient and their softmax: two of them at a time instead of three."""
    torch._dynamo.reset()
    head, x, labels = nn.Linear(8, 1000), torch.randn(64, 8), torch.randint(1000, (64,))
    compiled = torch.compile(
        lambda: F.cross_entropy(head(x), labels), backend="remat", options={"inner": "aot_eager"}, fullgraph=True
    )
    compiled().backward()
    peak = activation_peak(compiled, list(head.parameters()), counter="dispatch").activation_bytes
    scores = 64 * 1000 * 4
    assert 2 * scores <= peak < 2.1 * scores


def test_graphs_for_other_compilers_write_over_nothing() -> None:
    seen: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, example_inputs: object) -> Callable[..., Any]:
        seen.append(gm)
        return gm.forward

    torch._dynamo.reset()
    model, tokens = Net(), torch.randint(40, (2, 5))
    torch.compile(lambda: model(tokens), backend="remat", options={"inner": inner}, fullgraph=True)().backward()
    own = remat.partitioner(inner="aot_eager")
    joint = capture(lambda: model(tokens))
    seen += own(joint.module, [], num_fwd_outputs=joint.num_fwd_outputs)
    assert len(seen) == 4
    assert all(overwritten_by(node) is None for gm in seen for node in gm.graph.nodes)


@pytest.mark.parametrize("name", ["llama", "unet", "resnet"])
def test_models_write_over_much_and_keep_their_bits(name: str) -> None:
    torch._dynamo.reset()
    built = zoo.get(name).build("tiny")
    batch = built.make_batch(0)
    model = built.model.train()

    def step() -> torch.Tensor:
        return built.loss_fn(model, batch)

    states = {k: v.clone() for k, v in model.state_dict().items()}
    compiled = torch.compile(step, backend="remat", options={"inner": "aot_eager", "memory_budget": 0.7})
    found = gradients(model, compiled)
    model.load_state_dict(states)
    expected = gradients(model, torch.compile(step, backend="aot_eager"))
    assert all(map(torch.equal, found, expected))
