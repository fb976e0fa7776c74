"""Collectives and effectful ops in selective regions run once; a policy that insists otherwise is refused."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from support.eager_testing import MUST_CPU_OFFLOAD, MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, OpCounter, selective
from support.joints import capture, named
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._prims.rng_prims import run_and_save_rng_state

from remat.passes.memory.legal import verify_schedule
from remat.passes.memory.schedule import schedule_backward
from remat.passes.shared.errors import VerificationError
from remat.passes.shared.policy import PolicyError
from remat.policies import recompute_all
from remat.regions.region import checkpoint_region


@pytest.fixture(autouse=True, scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, requires_grad=True)


class Twice(torch.utils._python_dispatch.TorchDispatchMode):
    """Let collectives double what they are given, as if another process had sent the same."""

    def __init__(self):
        super().__init__()
        self.num_runs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.allreduce_.default:
            self.num_runs += 1
            for tensor in args[0]:
                tensor.mul_(2)
        return out


def functional(x):
    return collectives.all_reduce((x * 3).sin(), "sum", dist.group.WORLD).exp().sin()


def in_place(x):
    scale = (x.detach() * 3).sin()
    dist.all_reduce(scale)
    return (x * scale).exp().sin()


def in_place_async(x):
    scale = (x.detach() * 3).sin()
    work = dist.all_reduce(scale, async_op=True)
    y = x.cos()
    work.wait()
    return (y * scale).exp().sin()


def gathered(x):
    parts = [torch.empty(4)]
    dist.all_gather(parts, (x.detach() * 3).sin())
    return (x * parts[0]).exp().sin()


def written_twice(x):
    scale = (x.detach() * 3).sin()
    dist.all_reduce(scale)
    y = x * scale
    dist.all_reduce(scale)
    return (y * scale).exp().sin()


def with_barrier(x):
    y = x.sin()
    dist.barrier()
    return y.exp().sin()


def always(answer):
    return lambda ctx, op, *args, **kwargs: answer


PROGRAMS = [functional, in_place, in_place_async, gathered, written_twice, with_barrier]
ANSWERS = [PREFER_RECOMPUTE, MUST_SAVE, MUST_CPU_OFFLOAD]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_collectives_run_once_and_gradients_stay(function, answer, x):
    with Twice():
        plain = function(x)
    with OpCounter() as gradient:
        expected = torch.autograd.grad(plain.sum(), x)[0]
    with Twice():
        out = selective(always(answer), function, x)
    with OpCounter() as backward, Twice() as communication:
        found = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(found, expected)
    assert communication.num_runs == 0
    again = {
        op for op in backward.counts - gradient.counts if any(word in op for word in ("reduce", "gather", "barrier"))
    }
    assert not again


def test_the_second_backward_of_a_retained_graph_communicates_nothing_either(x):
    with Twice() as communication:
        out = selective(recompute_all(), written_twice, x)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
        second = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(first, second)
    assert communication.num_runs == 2


@pytest.mark.parametrize("function", [functional, in_place, with_barrier], ids=lambda f: f.__name__)
def test_must_recompute_of_a_collective_is_refused(function, x):
    is_collective = lambda op: op.namespace in ("c10d", "_c10d_functional")  # noqa: E731
    policy = lambda ctx, op, *args, **kwargs: MUST_RECOMPUTE if is_collective(op) else False  # noqa: E731
    with pytest.raises(PolicyError, match=r"says MUST_RECOMPUTE for _?c10d.*, a collective, which runs once.*region"):
        selective(policy, function, x)


class TestEffectfulOps:
    @pytest.fixture
    def log(self):
        calls = []
        with torch.library._scoped_library("remat_test", "FRAGMENT") as library:
            library.define("log(Tensor x) -> ()")
            library.impl("log", lambda x: calls.append(x.shape), "CompositeExplicitAutograd")
            op = torch.ops.remat_test.log.default
            handle = _register_effectful_op(op, _EffectType.ORDERED)
            yield functools.partial(op), calls
            handle.destroy()

    def test_they_run_once(self, log, x):
        op, calls = log

        def function(x):
            y = x.sin()
            op(y.detach())
            return y.exp().sin()

        selective(recompute_all(), function, x).sum().backward()
        assert len(calls) == 1

    def test_must_recompute_is_refused(self, log, x):
        with pytest.raises(PolicyError, match=r"MUST_RECOMPUTE for remat_test.log.default, an effectful op"):
            selective(lambda ctx, op, *args, **kwargs: MUST_RECOMPUTE, lambda x: (log[0](x.detach()), x.sin())[1], x)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
class TestCompiled:
    """The same rules in compiled code."""

    @staticmethod
    def compiled(policy):
        torch._dynamo.reset()
        region = checkpoint_region(name="reduced", policy=policy)(functional)
        return torch.compile(lambda x: region(x).cos(), backend="remat", options={"inner": "aot_eager"}, fullgraph=True)

    @staticmethod
    def insist(ctx, op, *args, **kwargs):
        return MUST_RECOMPUTE if op.namespace == "_c10d_functional" else PREFER_RECOMPUTE

    def test_must_recompute_of_a_collective_is_refused(self, x):
        expected = r"of region reduced at .*test_collectives.py:\d+ says MUST_RECOMPUTE for `all_reduce`"
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=expected):
            self.compiled(self.insist)(x)

    def test_a_collective_in_a_recomputed_region_runs_once(self, x):
        reference = x.detach().clone().requires_grad_()
        loss = functional(reference).cos().sum()
        with OpCounter() as plain:
            loss.backward()
        compiled = self.compiled(recompute_all())
        compiled(x)  # traced outside of the counter, which compilers keep away from
        out = compiled(x).sum()
        with OpCounter() as counter:
            out.backward()
        assert counter["exp.default"] == 1, "the region is recomputed"
        assert counter["all_reduce.default"] == plain["all_reduce.default"], "only what the gradient itself needs"
        assert torch.equal(x.grad, reference.grad)


def test_a_schedule_that_moves_a_collective_is_refused(x):
    def program(x):
        reduced = [collectives.all_reduce(y, "sum", dist.group.WORLD) for y in (x.sin(), x.cos())]
        return reduced[0].exp(), reduced[1].exp()

    graph, constraints = capture(program, x).constraints()
    schedule = schedule_backward(graph, constraints, saved=())
    verify_schedule(graph, constraints, schedule)
    first, second = (named(graph, "all_reduce", which) for which in (0, 1))
    swapped = {first: second, second: first}
    broken = dataclasses.replace(schedule, forward=tuple(swapped.get(i, i) for i in schedule.forward))
    with pytest.raises(VerificationError, match=r"the collective `all_reduce\w*` is moved ahead of an earlier one"):
        verify_schedule(graph, constraints, broken)


@pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_scatter_tensor` is deprecated:FutureWarning")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("answer", [MUST_SAVE, PREFER_RECOMPUTE])
def test_result_that_is_written_only_in_the_wait_is_kept(x, answer, is_async):
    """With gloo, that of reduce_scatter; what is there before is no result."""

    def function(x):
        scale = torch.zeros(4)
        work = dist.reduce_scatter_tensor(scale, (x.detach() * 3).sin(), async_op=is_async)
        if work is not None:
            work.wait()
        return (x * scale).exp().sin()

    y = x.detach().clone().requires_grad_()
    function(x).sum().backward()
    checkpoint_region(policy=lambda ctx, op, *args, **kwargs: answer)(function)(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_a_higher_order_op_runs_in_a_region_whose_collectives_are_watched(x):
    def function(x):
        _, kept = run_and_save_rng_state(torch.ops.aten.abs.default, x.detach())
        return (x * kept).sin()

    (expected,) = torch.autograd.grad(function(x).sum(), x)
    (found,) = torch.autograd.grad(checkpoint_region(function)(x).sum(), x)
    assert torch.equal(found, expected)
