"""Embeddings with `max_norm` inside a region: rows are shortened once, and looked up alike in recomputation."""

from __future__ import annotations

import pytest
import torch
from support.eager_testing import REGIONS, plain
from torch import nn

import remat
from remat import compat
from remat.regions.region import checkpoint_region

every_region = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


class Model(nn.Module):
    """Looks rows up, some of them several times, and computes with them."""

    def __init__(self, bag=False):
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.embedding = kind(32, 8, max_norm=1.0)
        self.linear = nn.Linear(8, 8)

    def forward(self, rows):
        return self.linear(self.embedding(rows).tanh()).sin()


def make_pair(**options):
    torch.manual_seed(0)
    model, reference = Model(**options), Model(**options)
    with torch.no_grad():
        model.embedding.weight.mul_(100)  # so that rounding may shorten a row twice
    reference.load_state_dict(model.state_dict())
    return model, reference


def assert_same(model, reference):
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
        assert torch.equal(parameter.grad, expected.grad), name


@every_region
@pytest.mark.parametrize("bag", [False, True], ids=["embedding", "bag"])
def test_gradients_and_weights_are_those_without_a_region(region, bag):
    model, reference = make_pair(bag=bag)
    for step in range(3):
        rows = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(step))
        region(model, rows).sum().backward()
        reference(rows).sum().backward()
        assert_same(model, reference)


@every_region
def test_a_weight_that_is_read_by_other_ops_after_its_rows_were_shortened(region):
    model, reference = make_pair()

    def scores(model, rows):
        return (model(rows) @ model.embedding.weight.t()).sin()

    for step in range(3):
        rows = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(step))
        region(lambda rows: scores(model, rows), rows).sum().backward()
        scores(reference, rows).sum().backward()
        assert_same(model, reference)


@every_region
def test_inside_of_another_region(region):
    model, reference = make_pair()

    def outer(rows):
        return region(model, rows).cos() * 2

    for step in range(3):
        rows = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(step))
        plain(outer, rows).sum().backward()
        (reference(rows).cos() * 2).sum().backward()
        assert_same(model, reference)


def test_regions_marked_inside_one_another():
    model, reference = make_pair()
    inner = checkpoint_region(model.__call__)
    outer = checkpoint_region(lambda rows: inner(rows).cos())
    rows = torch.randint(0, 32, (6,))
    outer(rows).sum().backward()
    reference(rows).cos().sum().backward()
    assert_same(model, reference)


def test_a_reentrant_region():
    model, reference = make_pair()
    rows, x = torch.randint(0, 32, (6,)), torch.randn(6, 8, requires_grad=True)
    compat.checkpoint(lambda rows, x: model(rows) * x, rows, x, use_reentrant=True).sum().backward()
    (reference(rows) * x).sum().backward()
    assert_same(model, reference)


def test_several_backwards():
    model, reference = make_pair()
    rows = torch.randint(0, 32, (6,))
    for module in (lambda r: plain(model, r), reference):
        out = module(rows)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    assert_same(model, reference)


def test_a_compiled_region():
    model, reference = make_pair()
    region = checkpoint_region(model.__call__)
    rows = torch.randint(0, 32, (6,))
    compiled = torch.compile(lambda r: region(r), backend="remat", options={"inner": "aot_eager"})
    compiled(rows).sum().backward()
    torch.compile(reference, backend="aot_eager")(rows).sum().backward()
    assert_same(model, reference)


def test_rows_that_are_looked_up_before_others_are_shortened_are_refused():
    """The second call may shorten, by rounding, a row once more that the first one has read."""
    model, _ = make_pair()

    def twice(rows):
        return model(rows) * model(rows.flip(0))

    with pytest.raises(compat.CheckpointError, match=r"embedding\.weight.*changed in place by the forward"):
        plain(twice, torch.randint(0, 32, (6,))).sum().backward()


def test_a_weight_that_the_region_changes_by_other_means_is_refused():
    model, _ = make_pair()

    def function(rows):
        out = model(rows)
        with torch.no_grad():
            model.embedding.weight.mul_(2)
        return out.exp()

    with pytest.raises(compat.CheckpointError, match=r"embedding\.weight.*changed in place by the forward"):
        plain(function, torch.randint(0, 32, (6,))).sum().backward()


def test_a_weight_that_is_changed_between_forward_and_backward_is_refused():
    model, _ = make_pair()
    out = plain(model, torch.randint(0, 32, (6,)))
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    with pytest.raises(remat.compat.CheckpointError, match="modified by an inplace operation"):
        out.sum().backward()
