"""The models that tests and benchmarks train: real architectures, random weights, nothing downloaded.

Each model comes in two sizes:

- ``tiny``: two layers, for tests; dropout is on everywhere, in attention too, because random ops are what a plan that
  recomputes gets wrong most easily. ``bench`` has the dropout that the architecture's own default configuration has;
- ``bench``: activations are at least eight times the gradients, so that a plan's effect on the peak is not buried, and
  a compiled step takes about a second on one thread. Numbers of tokens and pixels are odd on purpose: no activation
  has the size of a weight, so no compiler writes a gradient into a buffer that held an activation before.

Every entry builds ``(model, make_batch, loss_fn)``. ``make_batch(seed)`` gives the model's inputs, and
``loss_fn(model, batch)`` its scalar loss; ``model`` there is the module or what ``torch.compile`` makes of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Size = Literal["tiny", "bench"]
Batch = dict[str, torch.Tensor]


class Built(NamedTuple):
    """A model in training mode, with what feeds it and what judges it."""

    model: nn.Module
    make_batch: Callable[[int], Batch]
    loss_fn: Callable[[Any, Batch], torch.Tensor]

    def training_step(self, model: Any, batch: Batch) -> torch.Tensor:
        """Run forward and backward from empty gradients and return the loss."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self.loss_fn(model, batch)
        loss.backward()
        return loss.detach()


@dataclass(frozen=True)
class Entry:
    """One model of the zoo; ``shapes`` holds its builder's arguments for each size."""

    name: str
    builder: Callable[..., Built]
    shapes: Mapping[Size, Mapping[str, Any]]
    takes_attention: bool = False
    """Whether the builder has an ``attention`` argument (a transformers ``attn_implementation``)."""

    def build(self, size: Size = "tiny", *, attention: str = "sdpa", seed: int = 0) -> Built:
        """Build the model with weights drawn from ``seed``."""
        if size not in self.shapes:
            raise ValueError(f"zoo model {self.name!r} has no size {size!r}; it has {', '.join(self.shapes)}.")
        options = {"attention": attention} if self.takes_attention else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            built = self.builder(**self.shapes[size], **options)
        built.model.train()
        return built


def get(name: str) -> Entry:
    """Look an entry up by name."""
    if name not in ZOO:
        raise ValueError(f"the zoo has no model {name!r}; it has {', '.join(ZOO)}.")
    return ZOO[name]


def _require(module: str) -> Any:
    """Import a model library, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"This model of the zoo needs {module!r}, which is not installed. "
            'Install the `models` extra: pip install "remat[models]"',
            name=module,
        ) from error


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _loss_of_output(model: Any, batch: Batch) -> torch.Tensor:
    """Call a model that computes its loss from labels in the batch."""
    return model(**batch).loss


def _loss_itself(model: Any, batch: Batch) -> torch.Tensor:
    """Call a model whose output is the loss."""
    return model(**batch)


def _token_batch(vocab: int, batch: int, length: int) -> Callable[[int], Batch]:
    def make_batch(seed: int) -> Batch:
        tokens = torch.randint(vocab, (batch, length), generator=_generator(seed))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make_batch


# --- transformers ---------------------------------------------------------------------------------------------------


def _llama(
    *, attention: str, dropout: float, vocab: int, width: int, layers: int, heads: int, batch: int, length: int
) -> Built:
    transformers = _require("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=length,
        attention_dropout=dropout, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return Built(model, _token_batch(vocab, batch, length), _loss_of_output)


def _gpt2(*, attention: str, vocab: int, width: int, layers: int, heads: int, batch: int, length: int) -> Built:
    transformers = _require("transformers")
    config = transformers.GPT2Config(
        vocab_size=vocab, n_embd=width, n_layer=layers, n_head=heads, n_positions=length,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # left unset, transformers warns inside forward, which breaks the graph
    return Built(model, _token_batch(vocab, batch, length), _loss_of_output)


def _bert(*, attention: str, vocab: int, width: int, layers: int, heads: int, batch: int, length: int) -> Built:
    transformers = _require("transformers")
    config = transformers.BertConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=length, hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)

    def make_batch(seed: int) -> Batch:
        """Hide 15 % of the tokens and pad the last eighth of every second row."""
        generator = _generator(seed)
        labels = torch.randint(3, vocab, (batch, length), generator=generator)
        hidden = torch.rand((batch, length), generator=generator) < 0.15
        mask = torch.ones((batch, length), dtype=torch.long)
        mask[::2, length - length // 8 :] = 0
        return {
            "input_ids": labels.masked_fill(hidden, 1),
            "attention_mask": mask,
            "labels": labels.masked_fill(~hidden, -100),
        }

    return Built(model, make_batch, _loss_of_output)


def _t5(*, attention: str, vocab: int, width: int, layers: int, heads: int, batch: int, length: int) -> Built:
    transformers = _require("transformers")
    config = transformers.T5Config(
        vocab_size=vocab, d_model=width, d_ff=4 * width, d_kv=width // heads, num_layers=layers,
        num_decoder_layers=layers, num_heads=heads, dropout_rate=0.1, decoder_start_token_id=0,
        use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        source = torch.randint(1, vocab, (batch, length), generator=generator)
        target = torch.randint(1, vocab, (batch, length * 3 // 4), generator=generator)
        return {"input_ids": source, "labels": target}

    return Built(model, make_batch, _loss_of_output)


def _mixtral(
    *,
    attention: str,
    dropout: float,
    vocab: int,
    width: int,
    layers: int,
    heads: int,
    experts: int,
    batch: int,
    length: int,
) -> Built:
    transformers = _require("transformers")
    # The bench size has the proportions of Mixtral-8x7B: experts 3.5 times, vocabulary 7.8 times as wide as a layer.
    config = transformers.MixtralConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=length,
        num_local_experts=experts, num_experts_per_tok=2, attention_dropout=dropout, sliding_window=None,
        output_router_logits=True, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    # In bfloat16, as Mixtral is trained: transformers' grouped matmul for compiled float32 has a backward that reads
    # group sizes back to Python, which no graph captures.
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    # The first call installs the hooks that collect router logits, under a lock that no graph captures.
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 2), dtype=torch.long))
    return Built(model, _token_batch(vocab, batch, length), _loss_of_output)


def _vit(
    *, attention: str, dropout: float, width: int, layers: int, heads: int, batch: int, pixels: int, patch: int
) -> Built:
    transformers = _require("transformers")
    config = transformers.ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        image_size=pixels, patch_size=patch, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        num_labels=10, problem_type="single_label_classification", attn_implementation=attention,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        return {
            "pixel_values": torch.randn((batch, 3, pixels, pixels), generator=generator),
            "labels": torch.randint(10, (batch,), generator=generator),
        }

    return Built(model, make_batch, _loss_of_output)


# --- diffusers ------------------------------------------------------------------------------------------------------


def _unet(*, dropout: float, channels: tuple[int, ...], layers: int, batch: int, pixels: int) -> Built:
    diffusers = _require("diffusers")
    last = len(channels) - 1
    model = diffusers.UNet2DModel(
        sample_size=pixels, in_channels=3, out_channels=3, block_out_channels=channels, layers_per_block=layers,
        down_block_types=("DownBlock2D",) * last + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * last,
        norm_num_groups=8, attention_head_dim=16, dropout=dropout,
    )  # fmt: skip

    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        return {
            "sample": torch.randn((batch, 3, pixels, pixels), generator=generator),
            "timestep": torch.randint(1000, (batch,), generator=generator),
            "noise": torch.randn((batch, 3, pixels, pixels), generator=generator),
        }

    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        predicted = model(batch["sample"], batch["timestep"]).sample
        return F.mse_loss(predicted, batch["noise"])

    return Built(model, make_batch, loss_fn)


# --- our own --------------------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and a skip; ReLU works in place, as in most vision code."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.skip = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's correction to its input."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.skip(x)
        return self.relu(y)


class ConvNet(nn.Module):
    """A small residual network for image classification; returns its loss."""

    def __init__(self, widths: tuple[int, ...], blocks: int, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        stages: list[nn.Module] = []
        num_in = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stages.append(ResidualBlock(num_in, width, 2 if stage and not block else 1))
                num_in = width
        self.blocks = nn.Sequential(*stages)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(num_in, num_classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Classify images and compare with their labels."""
        features = self.blocks(self.stem(images)).mean(dim=(2, 3))
        return F.cross_entropy(self.head(self.dropout(features)), labels)


def _resnet(*, widths: tuple[int, ...], blocks: int, batch: int, pixels: int) -> Built:
    def make_batch(seed: int) -> Batch:
        generator = _generator(seed)
        return {
            "images": torch.randn((batch, 3, pixels, pixels), generator=generator),
            "labels": torch.randint(10, (batch,), generator=generator),
        }

    return Built(ConvNet(widths, blocks), make_batch, _loss_itself)


class LSTMCell(nn.Module):
    """One LSTM step in plain tensor code, so that autograd sees every op (nn.LSTM is one opaque kernel)."""

    def __init__(self, num_in: int, width: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(num_in, 4 * width)
        self.from_state = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Advance the state by one input."""
        forget, keep, new, out = (self.from_input(x) + self.from_state(hidden)).chunk(4, dim=-1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(keep) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(cell), cell


class LSTMLanguageModel(nn.Module):
    """A stack of LSTM layers unrolled over time, with dropout between layers; returns its loss."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cells = nn.ModuleList(LSTMCell(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Predict each token from those before it."""
        steps = list(self.dropout(self.embed(input_ids)).unbind(dim=1))
        for layer in self.cells:
            hidden = cell = torch.zeros_like(steps[0])
            outputs = []
            for step in steps:
                hidden, cell = layer(step, hidden, cell)
                outputs.append(self.dropout(hidden))
            steps = outputs
        logits = self.head(torch.stack(steps[:-1], dim=1))
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def _lstm(*, vocab: int, width: int, layers: int, batch: int, length: int) -> Built:
    return Built(LSTMLanguageModel(vocab, width, layers), _token_batch(vocab, batch, length), _loss_itself)


_TINY_TEXT = {"vocab": 128, "width": 32, "layers": 2, "heads": 2, "batch": 2, "length": 18}

ZOO: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "llama", _llama,
            {"tiny": {**_TINY_TEXT, "dropout": 0.1},
             "bench": {"dropout": 0.0, "vocab": 2048, "width": 256, "layers": 8, "heads": 8, "batch": 6,
                       "length": 250}},
            takes_attention=True,
        ),
        Entry(
            "gpt2", _gpt2,
            {"tiny": _TINY_TEXT,
             "bench": {"vocab": 2048, "width": 256, "layers": 6, "heads": 8, "batch": 5, "length": 250}},
            takes_attention=True,
        ),
        Entry(
            "bert", _bert,
            {"tiny": _TINY_TEXT,
             "bench": {"vocab": 2048, "width": 256, "layers": 6, "heads": 8, "batch": 6, "length": 250}},
            takes_attention=True,
        ),
        Entry(
            "t5", _t5,
            {"tiny": _TINY_TEXT,
             "bench": {"vocab": 2048, "width": 256, "layers": 3, "heads": 8, "batch": 6, "length": 250}},
            takes_attention=True,
        ),
        Entry(
            "mixtral", _mixtral,
            {"tiny": {**_TINY_TEXT, "experts": 4, "dropout": 0.1},
             "bench": {"dropout": 0.0, "vocab": 1000, "width": 128, "layers": 6, "heads": 4, "experts": 4, "batch": 5,
                       "length": 250}},
            takes_attention=True,
        ),
        Entry(
            "vit", _vit,
            {"tiny": {"dropout": 0.1, "width": 32, "layers": 2, "heads": 2, "batch": 2, "pixels": 20, "patch": 5},
             "bench": {"dropout": 0.0, "width": 192, "layers": 6, "heads": 6, "batch": 11, "pixels": 88, "patch": 8}},
            takes_attention=True,
        ),
        Entry(
            "unet", _unet,
            {"tiny": {"dropout": 0.1, "channels": (16, 32), "layers": 1, "batch": 2, "pixels": 8},
             "bench": {"dropout": 0.0, "channels": (32, 64), "layers": 1, "batch": 7, "pixels": 52}},
        ),
        Entry(
            "resnet", _resnet,
            {"tiny": {"widths": (8, 16), "blocks": 1, "batch": 4, "pixels": 10},
             "bench": {"widths": (32, 64, 96), "blocks": 2, "batch": 18, "pixels": 62}},
        ),
        Entry(
            "lstm", _lstm,
            {"tiny": {"vocab": 64, "width": 24, "layers": 2, "batch": 3, "length": 6},
             "bench": {"vocab": 1024, "width": 160, "layers": 2, "batch": 300, "length": 13}},
        ),
    )
}  # fmt: skip
