"""Collectives on real ranks run once: in regions with and without a policy, eager and compiled, at any budget."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from support import rank_programs as programs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import remat


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that what DTensor does inside of its ops comes by, too
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def functional(x):
    return collectives.all_reduce((x * 3).sin(), "sum", dist.group.WORLD).exp().sin()


def functional_in_place(x):
    scale = (x.detach() * 3).sin()
    torch.ops._c10d_functional.all_reduce_(scale, "sum", dist.group.WORLD.group_name)
    torch.ops._c10d_functional.wait_tensor(scale)
    return (x * scale.div_(2)).exp().sin()


def in_place(x):
    scale = (x.detach() * 3).sin()
    dist.all_reduce(scale)
    scale.div_(dist.get_world_size())  # changes what the collective wrote
    return (x * scale).exp().sin()


def in_place_async(x):
    scale = (x.detach() * 3).sin()
    work = dist.all_reduce(scale, async_op=True)
    y = x.cos()
    work.wait()
    return (y * scale).exp().sin()


def gathered(x):
    parts = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, (x.detach() * 3).sin())
    return (x * sum(parts)).exp().sin()


def written_twice(x):
    scale = (x.detach() * 3).sin()
    dist.all_reduce(scale)
    y = x * scale
    dist.all_reduce(scale)
    return (y * scale).exp().sin()


def exchanged(x):
    received = torch.empty(4)
    dist.all_to_all_single(received, (x.detach() * 3).sin())
    return (x * received).exp().sin()


def with_barrier(x):
    y = x.sin()
    dist.barrier()
    return y.exp().sin()


def sent_around(x):
    other, received = 1 - dist.get_rank(), torch.empty(4)
    requests = [dist.isend((x.detach() * 3).sin(), other), dist.irecv(received, other)]
    for request in requests:
        request.wait()
    return (x * received).exp().sin()


def in_place_async_then_changed(x):
    scale = (x.detach() * 3).sin()
    dist.all_reduce(scale, async_op=True).wait()
    scale.div_(dist.get_world_size())
    return (x * scale).exp().sin()


PROGRAMS = [
    functional,
    functional_in_place,
    in_place,
    in_place_async,
    gathered,
    written_twice,
    exchanged,
    with_barrier,
    sent_around,
]
WAYS = {
    "bare": remat.checkpoint_region,
    "nested": lambda function: remat.checkpoint_region(remat.checkpoint_region(function)),
    "in a bare one": lambda function: remat.checkpoint_region(
        remat.checkpoint_region(policy=remat.policies.recompute_all())(function)
    ),
    "recompute_all": remat.checkpoint_region(policy=remat.policies.recompute_all()),
    "checkpoint": lambda function: lambda x: remat.checkpoint(function, x, use_reentrant=False),
    "nested checkpoint": lambda function: (
        lambda x: remat.checkpoint(lambda y: remat.checkpoint(function, y, use_reentrant=False), x, use_reentrant=False)
    ),
}


def run_every_program(way):
    """Compare each program with itself as a region: same gradients, and no collective but those of its gradient."""
    for function in PROGRAMS:
        torch.manual_seed(dist.get_rank())
        x = torch.randn(4, requires_grad=True)
        expected, found = [_twice_backward(run, x) for run in (function, WAYS[way](function))]
        assert torch.equal(found[0], expected[0]), function.__name__
        assert torch.equal(found[1], expected[1]), f"{function.__name__}, second backward"
        assert found[2] == expected[2], f"{function.__name__} communicates {found[2]} in backward, not {expected[2]}"


def _twice_backward(run, x):
    loss = run(x).sum()
    with CollectiveCounter() as counter:
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x)[0]
    return first, second, counter.counts


@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_communicates_nothing(two_ranks, way):
    two_ranks.run(run_every_program, way)


@remat.checkpoint_region
def two_results(x):
    first = (x * 2).sin()
    second = first.cos()
    summed = collectives.all_reduce(first.detach().exp(), "sum", dist.group.WORLD)
    return second, (first * summed).sin()


def want_different_results():
    """Rank 0 needs what comes before the collective, rank 1 what comes after it."""
    x = torch.ones(4, requires_grad=True)
    loss = two_results(x)[dist.get_rank()].sum()
    return torch.autograd.grad(loss, x)[0].tolist()


def test_ranks_may_recompute_different_parts_of_a_region(two_ranks):
    found = two_ranks.run(want_different_results)
    assert found[0] != found[1]


def change_what_was_reduced():
    """A result that is changed in place before anybody could copy it is communicated again."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, requires_grad=True)
    function = in_place_async_then_changed
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    for region in (remat.checkpoint_region(function), WAYS["nested"](function), WAYS["recompute_all"](function)):
        assert torch.equal(torch.autograd.grad(region(x).sum(), x)[0], expected)


def test_an_asynchronous_result_that_is_changed_in_place_gives_the_same_gradients(two_ranks):
    two_ranks.run(change_what_was_reduced)


def count_of_tensor_parallel(compile_options, region):
    """Count the collectives of forward and backward of a tensor-parallel model, without and with remat."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(4, programs.HIDDEN)
    found = []
    for with_remat in (False, True):
        torch.manual_seed(0)
        model = programs.split_products(programs.mark(programs.Model(), region if with_remat else "none"), mesh)
        call = model
        if compile_options is not None:
            backend = {"backend": "remat", "options": compile_options} if with_remat else {"backend": "aot_eager"}
            call = torch.compile(model, **backend)
        trained = programs.Trained(model, call)
        trained.step(x, 0)  # compiled outside of the counter
        with CollectiveCounter() as counter:
            loss, gradients = trained.step(x, 0)
        found.append((counter.counts, loss, gradients))
    (counts, loss, gradients), (our_counts, our_loss, our_gradients) = found
    assert torch.equal(our_loss, loss)
    assert all(torch.equal(our_gradients[name], gradients[name]) for name in gradients)
    return counts, our_counts


def redistribute_implicitly():
    """Multiply matrices that are split over ranks: the sum, which `sin` needs whole, is a collective inside of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(8, 4), mesh, [Replicate()]).requires_grad_()
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)])

    def function(weight):
        return (x @ weight).sin().exp()

    for region in (remat.checkpoint_region(function), WAYS["recompute_all"](function), WAYS["checkpoint"](function)):
        losses = [run(weight).full_tensor().sum() for run in (function, region)]
        expected, found = [programs.whole(torch.autograd.grad(loss, weight)[0]) for loss in losses]
        assert torch.equal(found, expected)


def test_what_dtensor_communicates_inside_of_an_op_is_repeated_with_the_op(two_ranks):
    two_ranks.run(redistribute_implicitly)


LOWEST = {"inner": "aot_eager", "memory_budget": 0.01, "on_infeasible": "minimum"}


@pytest.mark.parametrize("region", ["bare", "policy", "checkpoint", "around"])
def test_tensor_parallel_layers_communicate_as_often_as_without_regions(two_ranks, region):
    for counts, ours in two_ranks.run(count_of_tensor_parallel, None, region):
        assert counts
        assert ours == counts


def test_compiled_layers_communicate_as_often_at_the_lowest_budget(two_ranks):
    for counts, ours in two_ranks.run(count_of_tensor_parallel, LOWEST, "none"):
        assert counts
        assert ours == counts


def gathers_of_fsdp(region, inner):
    """Count FSDP's gathers in backward, with layers checkpointed by torch and by remat."""
    found = []
    for with_remat in (False, True):
        torch.manual_seed(0)
        model = programs.Model()
        if with_remat:
            programs.mark(model, region)
        else:
            model.call = checkpointed_by_torch
        programs.shard(model, inner=inner)
        loss = model(torch.randn(4, programs.HIDDEN)).sum()
        with CollectiveCounter() as counter:
            loss.backward()
        found.append(counter.counts)
    return found


def checkpointed_by_torch(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize("inner", [False, True], ids=["sharded layers", "sharded modules inside"])
@pytest.mark.parametrize("region", ["checkpoint", "around"])
def test_fsdp_gathers_parameters_again_in_recomputation(two_ranks, region, inner):
    for by_torch, ours in two_ranks.run(gathers_of_fsdp, region, inner):
        assert by_torch["c10d._allgather_base_.default"] > 0
        assert ours == by_torch


def saved_bytes_of_fsdp(policy):
    """Measure what a selective region over sharded modules keeps between forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 4))
    for part in model:
        programs.fully_shard(part, reshard_after_forward=True)
    region = remat.checkpoint_region(policy=policy)(lambda x: model(x))
    loss = region(torch.randn(2, 64, requires_grad=True)).sum()
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
    kept = [tuple(t.shape) for t in tensors if t.untyped_storage().nbytes() >= 64 * 1024 * 4]
    loss.backward()
    return kept


def test_gathered_parameters_are_not_kept_by_a_policy(two_ranks):
    for kept in two_ranks.run(saved_bytes_of_fsdp, remat.policies.recompute_all()):
        assert kept == []
