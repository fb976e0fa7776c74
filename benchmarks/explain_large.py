"""Explain a Llama of 70B shape, which no machine here holds, and print the time and memory that it takes.

python benchmarks/explain_large.py --output report.html
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from support.zoo import _require

import remat
from remat.cli.spec import placed


def llama(layers: int, width: int, intermediate: int, heads: int, kv_heads: int, vocab: int) -> torch.nn.Module:
    """Build a Llama for causal language modelling where the caller's context says."""
    transformers = _require("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        use_cache=False,
        dtype="bfloat16",
    )
    return transformers.LlamaForCausalLM(config).train()


def main() -> None:
    """Explain, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--memory-budget", default=None, help="for example 35%%")
    parser.add_argument("--device", default="meta", help="meta, or fake:cpu for the CPU's kernels")
    parser.add_argument("--output", action="append", default=[], metavar="FILE")
    asked = parser.parse_args()
    with placed(asked.device) as device:
        with torch.device(device):
            model = llama(asked.layers, 8192, 28672, 64, 8, 128256)
        tokens = torch.zeros(1, asked.length, dtype=torch.int64, device=device)
        start = time.perf_counter()
        report = remat.explain(model, input_ids=tokens, labels=tokens, memory_budget=asked.memory_budget, progress=True)
        explained = time.perf_counter()
    for file in asked.output:
        report.save(file)
    print(report)
    print(f"\nexplained in {explained - start:.1f} s, written in {time.perf_counter() - explained:.1f} s")
    print(f"memory of this process at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
