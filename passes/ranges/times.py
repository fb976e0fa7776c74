"""Say what a plan's decisions cost at other sizes, where the cost model knows that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..plans import Action, Chosen, Decision, Prepared, Request, TimeExpressions
from ..sizes import NotExpressible
from .price_expressions import Price, Prices, general_prices, total_of, total_text

NOT_KNOWN = "times are those of the example: the cost model says nothing of other sizes"
PARTLY_KNOWN = "{} of {} decisions have a price that is known at the sizes of the example only"


def find_prices(prepared: Prepared, request: Request) -> Prices:
    """Ask the cost model for the prices of a graph in terms of its symbols."""
    problem = prepared.problem
    return general_prices(problem.graph, request.cost_model, prepared.storages.sizes, problem.costs)


def with_times(prepared: Prepared, chosen: Chosen, prices: Prices) -> Chosen:
    """Add to a plan what its decisions cost in terms of its symbols."""
    graph, plan = prepared.problem.graph, chosen.plan
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    positions = [position[d.value] for d in plan.decisions]
    texts = _Texts()
    decisions = [
        replace(d, save_expression=texts.of(prices.save[i]), recompute_expression=texts.of(prices.recompute[i]))
        for d, i in zip(plan.decisions, positions, strict=True)
    ]
    runs = Counter(chosen.schedule.forward)
    pairs = list(zip(plan.decisions, positions, strict=True))
    times = TimeExpressions(
        forward=total_text(total_of((prices.run[i], n) for i, n in runs.items())),
        recompute=total_text(total_of((prices.recompute[i], d.num_recomputes) for d, i in pairs)),
        keep=total_text(total_of((prices.save[i], 1) for d, i in pairs if d.action is not Action.RECOMPUTE)),
        note=_note(decisions),
    )
    return replace(chosen, plan=replace(plan, decisions=tuple(decisions), times=times))


def _note(decisions: list[Decision]) -> str:
    """What is not known; empty if everything is."""
    num_unknown = sum(not d.recompute_expression for d in decisions)
    if not num_unknown:
        return ""
    return NOT_KNOWN if num_unknown == len(decisions) else PARTLY_KNOWN.format(num_unknown, len(decisions))


class _Texts:
    """Prices as text, each written once."""

    def __init__(self) -> None:
        self.known: dict[Price | None, str] = {None: ""}

    def of(self, price: Price | None) -> str:
        if price not in self.known:
            try:
                self.known[price] = "" if price is None else price.text()
            except NotExpressible:
                self.known[price] = ""
        return self.known[price]
