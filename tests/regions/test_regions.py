"""Regions in every engine: the same results as without them, and the ops run that the policy asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.harness import OpCounter as HarnessCounter
from support.harness import assert_records_agree, recompute_is_ruinous, take_step, weighted_sum
from support.region_fuzz import STEPS_WITH_STATE, RandomProgram
from support.region_programs import PROGRAMS, Program, x_of

import remat

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")

WATCHED = {
    "addmm": "addmm",
    "gelu": "gelu",
    "sin": "sin",
    "exp": "exp",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "topk": "topk",
    "_softmax": "softmax",
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_native_batch_norm_legit_functional": "batch_norm",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "bernoulli": "bernoulli",
    # The compiled engines' ways to run a random op that is recomputed, in forward and in backward.
    "run_and_save_rng_state": "bernoulli",
    "run_with_rng_state": "bernoulli",
    "twice": "twice",
}
"""Ops whose runs are counted, by the name that the expectations use."""


class OpCounter(HarnessCounter):
    """Count ops of compiled code too: without this, Dynamo would not run it under a mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@dataclass(frozen=True)
class RegionEngine:
    """A way to run a program that has regions."""

    name: str

    @property
    def is_eager(self) -> bool:
        return self.name == "eager"

    def compile(self, run: Any) -> Any:
        """Prepare a program; outside regions nothing is recomputed, so that all recomputation is the regions'."""
        if self.is_eager:
            return run
        options = {"inner": self.name, "cost_model": recompute_is_ruinous}
        return torch.compile(run, backend="remat", options=options, fullgraph=True)


EAGER, AOT, INDUCTOR = RegionEngine("eager"), RegionEngine("aot_eager"), RegionEngine("inductor")


def unmarked(function: Any = None, **_: Any) -> Any:
    """Stand for `checkpoint_region` where there is to be no region."""
    return function if function is not None else unmarked


def cases() -> list[Any]:
    found = []
    for name, program in PROGRAMS.items():
        found += [pytest.param(program, engine, id=f"{name}-{engine.name}") for engine in (EAGER, AOT)]
        marks = [] if program.is_quick_in_inductor else [pytest.mark.slow]
        found.append(pytest.param(program, INDUCTOR, id=f"{name}-inductor", marks=marks))
    return found


def count_ops(engine: RegionEngine, program: Program) -> dict[str, tuple[int, int]]:
    """Run one step; return how often each watched op ran in forward and in backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    run, args = program.make(remat.checkpoint_region)
    compiled = engine.compile(run)
    compiled(*args)  # compiling runs ops too, and they are not the program's
    with OpCounter() as forward:
        outputs = compiled(*args)
    loss = weighted_sum(outputs)
    assert loss is not None
    with OpCounter() as backward:
        loss.backward()
    runs = [_watched(counter.counts) for counter in (forward, backward)]
    ops = [op for op in dict.fromkeys(WATCHED.values()) if any(op in counts for counts in runs)]
    return {op: (runs[0][op], runs[1][op]) for op in ops}


def _watched(counts: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for op, runs in counts.items():
        name = op.split(".")[-1].rstrip("_")
        if name in WATCHED:
            found[WATCHED[name]] += runs
    return found


@pytest.mark.parametrize(("program", "engine"), cases())
def test_results_are_those_without_regions(program: Program, engine: RegionEngine) -> None:
    with_regions = take_step(engine.compile, lambda: program.make(remat.checkpoint_region))
    without = take_step(engine.compile, lambda: program.make(unmarked))
    # Inductor fuses what is recomputed with what reads it, and then rounds to bfloat16 at other places.
    tolerance = {"rtol": 2**-6, "atol": 2**-6} if program.in_bfloat16 else {}
    assert_records_agree(with_regions, without, exact=engine is not INDUCTOR, **tolerance)


@pytest.mark.parametrize(("program", "engine"), [case for case in cases() if case.values[1] is not INDUCTOR])
def test_ops_run_as_often_as_the_policy_says(program: Program, engine: RegionEngine) -> None:
    assert count_ops(engine, program) == program.expected(engine.is_eager)


def random_cases() -> list[Any]:
    engines = {EAGER: 40, AOT: 4}  # how many of them are quick enough to be run always
    return [
        pytest.param(seed, engine, id=f"{seed}-{engine.name}", marks=[pytest.mark.slow] if seed >= quick else [])
        for engine, quick in engines.items()
        for seed in range(60)
    ]


@pytest.mark.parametrize(("seed", "engine"), random_cases())
def test_random_programs_give_the_same_results_with_regions(seed: int, engine: RegionEngine) -> None:
    def step(mark: Any) -> Any:
        return take_step(engine.compile, lambda: (RandomProgram(seed, mark, STEPS_WITH_STATE), (x_of(4, 8),)))

    assert_records_agree(step(remat.checkpoint_region), step(unmarked), exact=True)
