"""Every differentiable op of torch's own op database gives the same bits inside a region as without one."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
import warnings

import pytest
import torch
from support.eager_testing import REGIONS
from torch.utils._pytree import tree_flatten, tree_unflatten

from remat.compat import CheckpointError
from remat.eager.state.write_guard import Clearance

# The database is part of torch.testing, whose base class comes from a package that only torch's own tests
# need.
if "expecttest" not in sys.modules:
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside torch while the database is built
    from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.filterwarnings("ignore")  # many ops warn about their own deprecated uses

NUM_SAMPLES = 6  # per op; the database holds up to hundreds
OPS = [op for op in op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")]
SAMPLED = {
    "addmm",
    "bmm",
    "cat",
    "cumsum",
    "einsum",
    "gather",
    "index_put",
    "linalg.svd",
    "logsumexp",
    "matmul",
    "mul",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "nn.functional.ctc_loss",
    "nn.functional.dropout",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.layer_norm",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "normal",
    "pow",
    "softmax",
    "sort",
    "split",
    "topk",
    "unbind",
    "var_mean",
    "where",
}


# They change statistics that are arguments, which the guard of a first recomputation refuses.
REFUSED_BY_GUARD = {
    "nn.functional.batch_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
}

# Its LAPACK routine gives other bits from call to call, also without a region, by where memory lies.
NOT_REPEATABLE = {"linalg.lstsq"}


def leaves_of(sample):
    """Return a sample's values, flat, and what puts them together again."""
    return tree_flatten((sample.input, sample.args, sample.kwargs))


def fresh(values):
    """Copy the tensors of a sample, so that runs share nothing."""
    return [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in values]


def run(op, values, spec, region):
    """Return outputs and gradients of one call, from a fixed seed."""
    values = fresh(values)
    leaves = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]

    def function(*values):
        first, args, kwargs = tree_unflatten(values, spec)
        first = [x * 1 for x in first] if isinstance(first, (list, tuple)) else first * 1  # in-place variants
        return op(first, *args, **kwargs)

    torch.manual_seed(0)
    out = function(*values) if region is None else region(function, *values)
    outputs = [o for o in tree_flatten(out)[0] if isinstance(o, torch.Tensor)]
    wanted = [o for o in outputs if o.requires_grad]
    grads = ()
    if wanted:
        ones = [torch.ones_like(o) for o in wanted]
        grads = torch.autograd.grad(wanted, leaves, ones, allow_unused=True)
    return outputs, grads


def same(a, b):
    if a is None or b is None:
        return a is b
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.allclose(a.detach().cdouble(), b.detach().cdouble(), rtol=0, atol=0, equal_nan=True)


def changes_an_argument(op, values, spec):
    values = fresh(values)
    before = [v._version for v in values if isinstance(v, torch.Tensor)]
    first, args, kwargs = tree_unflatten(values, spec)
    with torch.no_grad():
        op(first, *args, **kwargs)
    return before != [v._version for v in values if isinstance(v, torch.Tensor)]


def check(op, region):
    num_checked = 0
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), NUM_SAMPLES):
        values, spec = leaves_of(sample)
        try:
            expected, expected_grads = run(op, values, spec, None)
            again, again_grads = run(op, values, spec, None)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            continue  # the op cannot be used this way without a region either
        if not all(map(same, (*expected, *expected_grads), (*again, *again_grads))):
            continue  # uninitialised memory and the like
        if changes_an_argument(op, values, spec):
            with pytest.raises(CheckpointError, match="has been modified by an inplace operation"):
                run(op, values, spec, region)
            continue
        outputs, grads = run(op, values, spec, region)
        assert all(map(same, outputs, expected)), "outputs"
        assert all(map(same, grads, expected_grads)), "gradients"
        num_checked += 1
    return num_checked


@pytest.fixture
def region(request, monkeypatch):
    """A region by its name; "guarded" is one each of whose recomputations is watched as the first one is."""
    if request.param == "guarded":
        monkeypatch.setattr(Clearance, "is_given", lambda self: False)
    return REGIONS["plain" if request.param == "guarded" else request.param]


def identify(op):
    return op.formatted_name


every_region = pytest.mark.parametrize("region", ["plain", "guarded", "save_all", "recompute_all"], indirect=True)


def check_or_refuse(op, region, request):
    if op.name in REFUSED_BY_GUARD and "guarded" in request.node.name:
        with pytest.raises(CheckpointError, match="changes a tensor that outlives it"):
            check(op, region)
        return 1
    return check(op, region)


@every_region
@pytest.mark.parametrize("op", [op for op in OPS if op.name in SAMPLED and not op.variant_test_name], ids=identify)
def test_sampled_ops_are_bitwise_equal(op, region, request):
    assert check_or_refuse(op, region, request) > 0


@pytest.mark.slow
@every_region
@pytest.mark.parametrize("op", [op for op in OPS if op.name not in NOT_REPEATABLE], ids=identify)
def test_every_differentiable_op_is_bitwise_equal(op, region, request):
    check_or_refuse(op, region, request)


def test_the_database_is_not_empty_and_the_sample_is_in_it():
    assert len(OPS) > 400
    assert {op.name for op in OPS} >= SAMPLED
