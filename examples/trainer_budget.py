"""Train a small Llama with Transformers' Trainer under a memory budget.

    python examples/trainer_budget.py
    python examples/trainer_budget.py --budget 25% --inner inductor

Needs transformers and accelerate (pip install "remat[integrations]"); the weights are random, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import remat
from remat.integrations.transformers import RematCallback

VOCAB, LENGTH, BATCH, MIB = 512, 128, 4, 2**20


def main() -> None:
    """Train with and without a budget; print the measured activation peaks and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="40%", help="bytes, or of the peak without recomputation (%(default)s)")
    parser.add_argument("--inner", default="aot_eager", help="what compiles the graphs: aot_eager (default), inductor")
    parser.add_argument("--steps", type=int, default=3, help="training steps (%(default)s)")
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)

    callback = RematCallback(compile={"memory_budget": arguments.budget, "inner": arguments.inner})
    for name, callbacks in {"Trainer": [], f"budget {arguments.budget}": [callback]}.items():
        model = make_model()
        trainer = train(model, callbacks, arguments.steps)
        losses = [f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry]
        peak = remat.observe(lambda m=model: m(input_ids=TOKENS, labels=TOKENS).loss).measured.activation_bytes
        print(f"{name:12} activation peak {peak / MIB:7.1f} MiB, losses {' '.join(losses)}", flush=True)
    print(f"done in {time.perf_counter() - started:.0f} s")


TOKENS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def make_model() -> LlamaForCausalLM:
    """A Llama of four narrow layers."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, use_cache=False, **shape))


def train(model: LlamaForCausalLM, callbacks: list[RematCallback], num_steps: int) -> Trainer:
    """Run Trainer for a few steps on the same few sequences."""
    rows = [{"input_ids": row, "labels": row} for row in TOKENS] * num_steps
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=num_steps, per_device_train_batch_size=BATCH, logging_steps=1, learning_rate=1e-3,
            report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=settings, train_dataset=rows, callbacks=callbacks)
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
