"""What inductor's kernels may take, and whether they do: looked at before they are run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from ..passes.budgets import Budget
from ..passes.inductor import Excess, PeakExceeded, Promise, describe_kernels
from ..passes.pipeline import Partitioned
from ..passes.torch_private import CompiledHalf


@dataclass(slots=True)
class KernelCheck:
    """Compares the kernels of one compilation with the budget."""

    budget: Budget | None
    """None if nothing is to be compared."""
    promise: Promise | None = None
    """What the kernels of the graph that was split last may take; None if nothing was promised."""
    largest: Excess | None = field(default=None, init=False)

    def expect(self, parts: Partitioned) -> None:
        """Note what the kernels of a graph may take."""
        self.promise = None if self.budget is None else promised(self.budget, parts)

    def check(self, half: CompiledHalf) -> None:
        """Raise PeakExceeded if the kernels of one half take more than was promised."""
        if self.promise is None:
            return
        try:
            kernels = describe_kernels(half)
        except (AttributeError, KeyError, TypeError) as error:
            warnings.warn(
                f"memory_budget: it cannot be said what inductor's kernels take ({type(error).__name__}: {error}), so "
                "they are not compared with the budget, and may exceed it by a few per cent.",
                stacklevel=2,
            )
            return
        excess = self.promise.excess_of(kernels)
        if excess is not None and (self.largest is None or self.largest.num_bytes < excess.num_bytes):
            self.largest = excess
        # Of the lowest plan one wants to know what all of it takes.
        looks_on = self.budget is not None and self.budget.is_for_lowest and not kernels.is_backward
        if self.largest is not None and not looks_on:
            raise PeakExceeded(self.largest)


def promised(budget: Budget, parts: Partitioned) -> Promise | None:
    """What the kernels of a graph may take; None if nothing was promised."""
    plan, storages = parts.plan, parts.prepared.storages
    if plan.budget_bytes is None or plan.shares or budget.fraction == 1.0:
        return None
    if budget.is_for_lowest:
        return Promise(plan.peak.num_bytes, plan.budget_bytes, parts.held)
    margin = budget.margin_in(storages)
    if plan.peak.num_bytes > (1 - margin) * plan.budget_bytes:
        return None  # the lowest plan, which was asked for whatever it takes
    # At other sizes kernels take more, in the proportion in which they do at these.
    num_bytes = int(plan.peak.num_bytes / (1 - margin)) if storages.sizes.symbols else plan.budget_bytes
    return Promise(plan.peak.num_bytes, num_bytes, parts.held)
