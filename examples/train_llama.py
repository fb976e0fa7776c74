"""Train a small Llama-shaped model with torch.compile, then with backend="remat", and see what remat changed.

    python examples/train_llama.py

Needs transformers (pip install "remat[models]"); the weights are random, nothing is downloaded. Takes two or three
minutes, most of them spent in the C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces its start and stop otherwise

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import remat

BATCH, LENGTH, VOCAB = 4, 250, 1024
MIB = 2**20


def main() -> None:
    """Train with both backends and compare losses, memory and time."""
    parser = argparse.ArgumentParser(description="Train a small Llama with torch.compile's default and with remat.")
    parser.add_argument("--steps", type=int, default=3, help="training steps with each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of timing (default: %(default)s)")
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)  # steady times; both backends gain alike from more
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(VOCAB, (BATCH, LENGTH))
    print(f"Llama-shaped, {config.num_hidden_layers} layers, {BATCH} x {LENGTH} tokens")

    with tempfile.TemporaryDirectory() as folder:
        compiled = {
            "default": torch.compile(model),
            "remat": torch.compile(model, backend="remat", options={"dump": folder}),
        }
        losses = {name: train(name, model, step, tokens, arguments.steps) for name, step in compiled.items()}
        plans = [remat.Plan.load(path).summary() for path in sorted(Path(folder).glob("*.json"))]

    print("\nloss per step" + "".join(f"\n  {name:8}" + "".join(f"{x:10.6f}" for x in losses[name]) for name in losses))
    print("\nremat's plan")
    for plan in plans:
        print(plan)

    peaks = {name: activation_peak(model, step, tokens) for name, step in compiled.items()}
    print("\nmeasured activation peak (parameters and their gradients not counted)")
    for name, peak in peaks.items():
        print(f"  {name:8}{peak / MIB:8.1f} MiB")
    print(f"  ratio   {peaks['remat'] / peaks['default']:8.2f}")

    steps = {name: lambda f=f: run_step(model, f, tokens) for name, f in compiled.items()}
    seconds = interleaved_seconds(steps, arguments.rounds)
    print(f"\nstep time, median of {arguments.rounds} interleaved rounds")
    for name, values in seconds.items():
        print(f"  {name:8}{statistics.median(values):8.3f} s")
    ratio = statistics.median(b / a for a, b in zip(seconds["default"], seconds["remat"], strict=True))
    print(f"  ratio   {ratio:8.2f}\n\ndone in {time.perf_counter() - started:.0f} s")


def run_step(model: torch.nn.Module, compiled: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    """Run forward and backward from empty gradients."""
    model.zero_grad(set_to_none=True)
    loss = compiled(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def train(
    name: str, model: torch.nn.Module, compiled: Callable[..., Any], tokens: torch.Tensor, num_steps: int
) -> list[float]:
    """Train a few steps, then put the weights back, so that every backend starts from the same ones."""
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for number in range(num_steps):
        print(f"  {name}: step {number + 1} of {num_steps}{', compiling first' * (number == 0)} ...", flush=True)
        losses.append(run_step(model, compiled, tokens).item())
        optimizer.step()
    model.load_state_dict(weights)
    return losses


def activation_peak(model: torch.nn.Module, compiled: Callable[..., Any], tokens: torch.Tensor) -> int:
    """Measure the most bytes that a step holds at any moment, from the allocator's own record.

    Memory whose address a parameter's gradient has in the end is the step's result and left out.
    """
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run_step(model, compiled, tokens)
    gradients = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    records = list(profiler.profiler.kineto_results.experimental_event_tree())
    for record in records:  # grows while it is walked: the tree, flattened
        records.extend(record.children)
    memory = [r for r in sorted(records, key=lambda r: r.start_time_ns) if r.typed[0].name == "Allocation"]
    born = {r.typed[1].ptr: i for i, r in enumerate(memory) if r.typed[1].alloc_size > 0}  # the last at each address
    results = {born[address] for address in gradients if address in born}
    live, now, peak = {}, 0, 0
    for i, record in enumerate(memory):
        address, size = record.typed[1].ptr, record.typed[1].alloc_size
        if size > 0:
            live[address] = 0 if i in results else size
        now += live[address] if size > 0 else -live.pop(address, 0)
        peak = max(peak, now)
    return peak


def interleaved_seconds(steps: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Time steps in turns, so that a slow moment of the machine hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
