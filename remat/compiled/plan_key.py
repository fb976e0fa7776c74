"""What a plan depends on beside its graph, as keys for caches and as text for other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from ..passes.prices import Callback, CostModel, Flops, Roofline
from ..passes.shared import Executor
from ..version import __version__
from . import calibration
from .options import Options
from .ranks import Job, current_job, shared_machines


def job_of(options: Options) -> Job | None:
    """The ranks that are to have the same plans."""
    return None if options.ranks == "alone" else current_job()


def cost_model_of(options: Options, job: Job | None = None) -> CostModel:
    """Build the cost model that the options ask for."""
    machines = calibration.machines()
    if job is not None:
        machines = shared_machines(job, machines)
    if callable(options.cost_model):
        return Callback(machines, options.fuses, function=options.cost_model)
    models: Mapping[str, Callable[..., CostModel]] = {
        "roofline": Roofline,
        "flops": Flops,
        "profile": calibration.Profile,
    }
    return models[options.cost_model](machines, options.fuses)


def plan_key_of(options: Options, cost_model: CostModel, executor: Executor) -> str:
    """Everything a plan depends on beside its graph."""
    stored = [hashlib.sha256(plan.to_json().encode()).hexdigest() for plan in options.plans]
    asked = f"{options.budget} {options.take_minimum} {executor} {options.unbacked_hint} {stored}"
    text = f"remat {__version__} {source_digest()} torch {torch.__version__} {cost_model.cache_key()} {asked}"
    return f"remat-{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def asked_of(options: Options) -> str:
    """What a plan is made for, in words that do not differ between ranks that were given the same options."""
    budget = "none" if options.budget is None else options.budget.text
    model = getattr(options.cost_model, "__qualname__", options.cost_model)
    stored = "a stored plan" if options.plans else "no stored plan"
    infeasible = "minimum" if options.take_minimum else "error"
    inner = "inductor" if options.fuses else "node by node"
    return f"memory_budget {budget}, on_infeasible {infeasible}, cost_model {model}, {stored}, run by {inner}"


@cache
def source_digest() -> str:
    """A digest of remat's own code, so that a changed installation never hits an old entry."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in (package, (package / "passes").resolve()):  # a link where remat is installed for development
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
