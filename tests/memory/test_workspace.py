"""Memory that kernels take only while they run: what is said of it is what the allocator sees."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import remat
from remat.passes.memory.workspace import ATTENTION, ATTENTION_BACKWARD, _queries_per_block, workspace_of
from remat.passes.sizes.symbols import Sizes
from remat.report.observed.counting import activation_peak

LENGTHS = [(16, 16), (100, 100), (200, 200), (768, 768), (300, 1024), (1024, 300)]


def scratch_bytes(op, *args):
    """The most that a call has allocated at a time, less what it has returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        results = op(*args)
    events = sorted((e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"), key=_start)
    alive = most = 0
    for event in events:
        alive += event.nbytes()
        most = max(most, alive)
    del results
    return most - alive


def _start(event):
    return event.start_ns()


def node_of(op, *args):
    """A node of a graph that calls an op with such arguments."""
    graph = fx.Graph()
    given = []
    with FakeTensorMode() as mode:
        for position, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                given.append(graph.placeholder(f"x{position}"))
                given[-1].meta["val"] = mode.from_tensor(arg)
            else:
                given.append(arg)
    return graph.call_function(op, tuple(given))


def stated_bytes(op, *args):
    node = node_of(op, *args)
    return workspace_of(node, Sizes.find([]))


def attention_inputs(num_queries, num_keys, dtype, batch=2, heads=2, head_size=16):
    query = torch.randn(batch, heads, num_queries, head_size, dtype=dtype)
    key, value = (torch.randn(batch, heads, num_keys, head_size, dtype=dtype) for _ in range(2))
    return query, key, value


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_attention_takes_what_is_stated(num_queries, num_keys, dtype, num_threads):
    query, key, value = attention_inputs(num_queries, num_keys, dtype)
    torch.set_num_threads(num_threads)
    try:
        out, logsumexp = ATTENTION(query, key, value)
        assert scratch_bytes(ATTENTION, query, key, value) == stated_bytes(ATTENTION, query, key, value)
        for gradient in (torch.randn_like(out), torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2)):
            given = (gradient, query, key, value, out, logsumexp, 0.0, False)
            assert scratch_bytes(ATTENTION_BACKWARD, *given) == stated_bytes(ATTENTION_BACKWARD, *given)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
def test_attention_in_half_precision_takes_at_least_what_is_stated(num_queries, num_keys):
    """And what the processor's matrix products take, of which nothing is said."""
    query, key, value = attention_inputs(num_queries, num_keys, torch.bfloat16)
    out, logsumexp = ATTENTION(query, key, value)
    given = (torch.randn_like(out), query, key, value, out, logsumexp, 0.0, False)
    for op, args in ((ATTENTION, (query, key, value)), (ATTENTION_BACKWARD, given)):
        stated, taken = stated_bytes(op, *args), scratch_bytes(op, *args)
        assert 0 < stated <= taken


def test_nothing_is_known_of_other_ops():
    assert stated_bytes(torch.ops.aten.mm.default, torch.ones(2, 2), torch.ones(2, 2)) == 0


def test_blocks_of_a_symbolic_length_are_those_of_its_value():
    import sympy

    length = sympy.Symbol("s0", integer=True, positive=True)
    expression = _queries_per_block(length)
    for value in (1, 31, 32, 33, 191, 192, 193, 767, 768, 769, 5000):
        assert expression.subs(length, value) == _queries_per_block(value)


class Attention(torch.nn.Module):
    """One layer whose blocks of products outweigh all else."""

    def __init__(self):
        super().__init__()
        self.inputs = torch.nn.Linear(8, 48)

    def forward(self, x):
        query, key, value = self.inputs(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_predicted_peak_counts_it_where_the_allocator_measures():
    model, x = Attention(), torch.randn(1, 800, 8)
    report = remat.explain(model, x, inner="inductor")
    compiled = torch.compile(model, backend="remat")
    parameters = list(model.parameters())
    measured = activation_peak(lambda: compiled(x).sum(), parameters).activation_bytes
    assert report.plans[0].peak.num_bytes == pytest.approx(measured, rel=0.1)
    assert measured > 2**20, "most of it is the blocks'"
