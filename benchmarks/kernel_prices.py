"""Hold the prices of the default cost model against measured times, op by op, where ops run one by one.

    python benchmarks/kernel_prices.py
    python benchmarks/kernel_prices.py --models llama,resnet

The first table is where constants of `passes/cost.py` come from: what torch's kernels on this machine take beside
reading and writing, as a part of the time to move four bytes through memory, and what attention takes per pair of a
query and a key. The others are models of the benchmarks: per op the prices of all its different calls in forward, the
times of the same calls, each run alone on made-up data, and the second over the first. Ops that draw random numbers
are not timed.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from support import zoo

import remat
from remat.compiled import calibration
from remat.compiled.calibration import measured_seconds
from remat.passes.prices.cost import Roofline
from remat.passes.prices.op_call import OpCall

NUM_ELEMENTS = 6 * 250 * 1024
"""As many as a layer of the benchmarks' models computes at a time."""

KERNELS: dict[str, Callable[[torch.Tensor], object]] = {
    "mul": lambda x: x * 2.5,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "exp": torch.exp,
    "log": torch.log,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (1024,)),
    "dropout": lambda x: torch.native_dropout(x, 0.1, True),
}
HEADS = ((6, 8, 250, 32), (2, 8, 512, 64), (1, 8, 2048, 64), (1, 8, 1024, 128))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="comma-separated; none by default")
    names = [name for name in parser.parse_args(argv).models.split(",") if name]
    torch.set_num_threads(1)
    _print_kernels()
    for name in names:
        _print_model(name)
    return 0


def _print_kernels() -> None:
    machine = calibration.measure("cpu")
    unit = 4 / machine.bytes_per_second
    print(
        f"{machine.flops_per_second:.3g} flops/s, {machine.bytes_per_second:.3g} bytes/s; half {machine.half_speed:g}"
    )
    x = torch.rand(NUM_ELEMENTS // 1024, 1024) + 0.1
    for name, kernel in KERNELS.items():
        seconds = _seconds(lambda kernel=kernel: kernel(x))
        print(f"{name:<12} {seconds / (unit * x.numel()) - 2:6.2f} beside reading and writing")
    images, ones = torch.randn(18, 32, 62, 62), torch.ones(32)
    seconds = _seconds(lambda: F.batch_norm(images, None, None, ones, ones, training=True))
    print(f"{'batch_norm':<12} {seconds / (2 * unit * images.numel()):6.2f} copies")
    for shape in HEADS:
        query = torch.randn(shape)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        seconds = _seconds(lambda query=query, attend=attend: attend(query, query, query))
        batch, heads, length, width = shape
        pairs = batch * heads * length * length
        products = 4 * pairs * width / machine.flops_per_second
        print(f"attention, heads of {width}, {length} long: {(seconds - products) / (unit * pairs):6.2f} per pair")


def _seconds(run: Callable[[], object]) -> float:
    with torch.no_grad():
        return calibration._seconds(run, "cpu", repeats=7)


def _print_model(name: str) -> None:
    built = zoo.get(name).build("bench")
    batch = built.make_batch(0)
    model = Roofline(calibration.machines(), fuses=False)
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def compare(call: OpCall) -> float:
        price, seconds = model.recompute_seconds(call), measured_seconds(call)
        if seconds is not None and price:
            rows[str(call.target)][0] += price
            rows[str(call.target)][1] += seconds
        return price

    remat.explain(lambda: built.loss_fn(built.model, batch), inner="aot_eager", cost_model=compare)
    print(f"\n{name:<56} {'price, ms':>9} {'time, ms':>9}")
    for op, (price, seconds) in sorted(rows.items(), key=lambda row: -row[1][1])[:12]:
        print(f"{op:<56} {1e3 * price:9.2f} {1e3 * seconds:9.2f} {seconds / price:6.2f}")


if __name__ == "__main__":
    sys.exit(main())
