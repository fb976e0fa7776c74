"""Whole models, dropout on, each layer a region: the same bits over three steps, peaks at most torch's."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from support.eager_testing import REGIONS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", reason="the model definitions come from it")

pytestmark = pytest.mark.filterwarnings("ignore")  # the model library's own deprecations

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}


def llama():
    config = transformers.LlamaConfig(vocab_size=64, attention_dropout=0.1, use_cache=False, **SMALL)
    return transformers.LlamaForCausalLM(config), "model.layers", text(labels=True)


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False)
    return transformers.GPT2LMHeadModel(config), "transformer.h", text(labels=True)


def bert():
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **SMALL)
    return transformers.BertForMaskedLM(config), "bert.encoder.layer", text(labels=True)


def t5():
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), "encoder.block decoder.block", text(labels=True)


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=64,
        num_key_value_heads=2,
        num_local_experts=4,
        attention_dropout=0.1,
        use_cache=False,
        **SMALL,
    )
    return transformers.MixtralForCausalLM(config), "model.layers", text(labels=True)


def vit():
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        **SMALL,
    )
    model = transformers.ViTForImageClassification(config)
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == 2]
    return model, lists[0], {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 2])}


def text(labels):
    ids = torch.randint(1, 64, (2, 16))
    return {"input_ids": ids, **({"labels": ids} if labels else {})}


MODELS = {f.__name__: f for f in (llama, gpt2, bert, t5, mixtral, vit)}


def torch_region(function, *args, **kwargs):
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def mark_layers(model, layers, region):
    """Make every layer a region, without changing the layers themselves."""
    for path in layers.split():
        for layer in model.get_submodule(path):
            layer.forward = functools.partial(region, layer.forward)


def make(build, region):
    torch.manual_seed(0)
    model, layers, batch = build()
    model.train()
    if region is not None:
        mark_layers(model, layers, region)
    return model, batch


def train(build, region, num_steps=3):
    """Return losses and gradients of a few steps."""
    model, batch = make(build, region)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(num_steps):
        torch.manual_seed(step)
        loss = model(**batch).loss
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return seen


@pytest.mark.parametrize("name", ["plain", "save_matmuls", "recompute_all"])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_losses_and_gradients_are_bitwise_equal_over_three_steps(build, name):
    expected, found = train(build, None), train(build, REGIONS[name])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class PeakMeter(TorchDispatchMode):
    """The largest sum of bytes of the storages made inside that were alive at once."""

    def __init__(self):
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in inputs and storage not in self._known:
                    self._add(storage)
        return out

    def _add(self, storage):
        self._known.add(storage)
        self.num_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, num_bytes):
        self.num_bytes -= num_bytes


def peak_bytes(build, region):
    model, batch = make(build, region)
    peaks = []
    for step in range(2):
        torch.manual_seed(step)
        with PeakMeter() as meter:
            model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
        peaks.append(meter.peak_bytes)
    return peaks


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_peak_is_at_most_that_of_torch(build, record_property):
    ours, theirs, none = (peak_bytes(build, region) for region in (REGIONS["plain"], torch_region, None))
    record_property("peak_bytes", {"remat": ours, "torch": theirs, "no regions": none})
    assert ours[1] <= theirs[1]
    assert ours[0] <= theirs[0]
    assert ours[1] < none[1]
