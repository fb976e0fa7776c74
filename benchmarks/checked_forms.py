"""What it costs to look at the inputs of an op before its result is written over one of them.

    python benchmarks/checked_forms.py [--rounds 200]

Each row times an op's form that is told where to write, and the function that looks first and then calls it, on tensors
of a few elements; the difference is what the look takes. The two take turns in short rounds, time is processor time of
this process, and of all rounds the quickest counts: everything else on a machine makes them slower only. The op that
has new memory allocated for its result stands beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.passes.graph.checked_forms import FORMS, checked_form

CALLS = 2000
"""Per timing: some milliseconds."""

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Case:
    """An op whose result is written over its first input."""

    name: str
    op: Any
    letters: str
    args: tuple[Any, ...]
    said: dict[str, Any]


def cases() -> list[Case]:
    """Ops with one to three tensors that lie row by row, in another order, and of several types."""
    x, y, z = (torch.rand(4, 5, 6) for _ in range(3))
    turned = {"self_stride": (30, 1, 5), "other_stride": (30, 1, 5)}
    a, b = (torch.rand(4, 6, 5).mT for _ in range(2))
    mask, half = x > 0.5, y.bfloat16()
    return [
        Case("one tensor", aten.exp.default, "R", (x,), {}),
        Case("one tensor and a number", aten.mul.Tensor, "Rn", (x, 2.0), {}),
        Case("two tensors", aten.mul.Tensor, "Rr", (x, y), {}),
        Case("two of different types", aten.mul.Tensor, "Ro", (x, half), {"other_dtype": torch.bfloat16}),
        Case("two in another order", aten.mul.Tensor, "Ss", (a, b), turned),
        Case("a mask and two tensors", aten.where.self, "mRr", (mask, x, z), {}),
        Case("softmax, backward", aten._softmax_backward_data.default, "Rrnn", (x, y, -1, torch.float32), {}),
    ]


def calls_of(case: Case) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """The form alone, the function that looks first, and the op with new memory, as a graph would call them."""
    form, checked, op = FORMS[case.op], checked_form(case.op, case.letters), case.op
    args, said = case.args, case.said
    target = args[next(k for k, letter in enumerate(case.letters) if letter.isupper())]
    place = {argument.name: target for argument in form._schema.arguments if argument.is_out}
    scope = {f"x{k}": value for k, value in enumerate(args)} | {"form": form, "checked": checked, "op": op}
    scope |= {"target": target, "torch": torch}
    given = ", ".join(f"x{k}" for k in range(len(args)))
    extra = "".join(f", {name}={value}" for name, value in said.items())
    where = "".join(f", {name}=target" for name in place)
    texts = (f"form({given}{where})", f"checked({given}{extra})", f"op({given})")
    first, second, third = (eval(f"lambda: {text}", scope) for text in texts)
    return first, second, third


def measure(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Microseconds per call, each in its quickest round."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for k, call in enumerate(calls):
            start = time.process_time()
            for _ in range(CALLS):
                call()
            best[k] = min(best[k], (time.process_time() - start) / CALLS * 1e6)
    return best


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args(argv).rounds
    torch.set_num_threads(1)
    print(f"{'microseconds':28}{'written over':>14}{'looked first':>14}{'the look':>10}{'new memory':>12}")
    with torch.no_grad():
        for case in cases():
            form, checked, op = measure(calls_of(case), rounds)
            print(f"{case.name:28}{form:14.2f}{checked:14.2f}{checked - form:10.2f}{op:12.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
