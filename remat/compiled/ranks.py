"""Many ranks: those that plan the same graph use the same plan.

Planning is deterministic, but what it starts from need not be: machine constants are measured per host, and the
prices of `cost_model="profile"` per process. So constants are shared within a job, and of several plans for one graph
the first to be finished holds for all. This goes through the store behind torch.distributed's default group, one
atomic compare-and-set per graph, and not through a collective: nobody waits for anybody, so a rank that compiles
alone (other shapes, another stage of a pipeline, a recompilation) cannot hang.

Ranks with different graphs have different plans. That is safe: no plan adds, drops or moves a collective, which
`verify_schedule` checks for every plan.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..passes.graph import describe_graph
from ..passes.plans import Chosen, Decision, Plan, Prepared, schedule_from
from ..passes.prices import Machine
from ..passes.shared import RankMismatch
from ..passes.torch_private import default_store

WAIT = timedelta(seconds=60)
"""How long the plan of another rank may take to arrive, once that rank has said that it is there."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks that train together, as seen by one of them."""

    store: Any
    rank: int

    def first(self, key: str, value: str) -> str:
        """Offer a value under a key, and return the one that was offered first."""
        found: bytes = self._asked(lambda: self.store.compare_set(key, "", value))
        return found.decode()

    def put(self, key: str, text: str) -> None:
        """Store a text under a key."""
        packed = base64.b85encode(zlib.compress(text.encode())).decode()
        self._asked(lambda: self.store.set(key, packed))

    def get(self, key: str) -> str:
        """Return what somebody has stored under a key."""
        self._asked(lambda: self.store.wait([key], WAIT))
        return zlib.decompress(base64.b85decode(self._asked(lambda: self.store.get(key)))).decode()

    def has(self, key: str) -> bool:
        """True if somebody has stored something under a key."""
        return bool(self._asked(lambda: self.store.check([key])))

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except dist.DistError as error:
            raise RankMismatch(
                f"rank {self.rank} cannot agree with the other ranks on a plan, because the store of "
                f"torch.distributed does not answer: {error}. Has another rank ended? To plan without the "
                'others, set the option ranks="alone".'
            ) from error


def current_job() -> Job | None:
    """The job that this process is a rank of; None if it trains alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = default_store()
    return None if store is None else Job(store, dist.get_rank())


# -------------------------------------------------------------------------------------------------- prices


def shared_machines(job: Job, machines: Mapping[str, Machine]) -> dict[str, Machine]:
    """The machine constants that all ranks use: for each device those of the first rank that planned for it."""
    return {
        device: Machine(**json.loads(job.first(f"machine/{device}", json.dumps(asdict(machine)))))
        for device, machine in machines.items()
    }


def job_name(job: Job) -> str:
    """A text that all ranks of a job share, and no other job has."""
    return job.first("name", uuid.uuid4().hex)


# -------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class _Claim:
    """Who planned a graph first, for what, and with which result."""

    rank: int
    asked: str
    plan: str
    """The digest of the plan, under which its text is stored."""


_num_planned: Counter[tuple[str, str]] = Counter()
"""How often this process has planned each graph, by job; strict ranks compare what they plan for the nth time."""


def agree(job: Job, prepared: Prepared, chosen: Chosen, *, asked: str, is_strict: bool) -> Chosen:
    """Return the plan that holds for a graph on all ranks; where that is strict, raise if it is another one.

    `asked` says what the plan was made for. Ranks that ask for different things plan alone, unless that is strict.
    """
    graph = _digest("\n".join(_described(prepared)))
    if is_strict:
        counted = (job_name(job), graph)
        _num_planned[counted] += 1
        key = f"strict/{graph}/{_num_planned[counted]}"
    else:
        key = f"plan/{graph}/{_digest(asked)}"
    own = _Claim(job.rank, asked, _digest(_decided(chosen.plan)))
    first = _first_claim(job, key, own, chosen.plan)
    if first.plan == own.plan and first.asked == own.asked:
        return chosen
    theirs = replace(Plan.from_json(job.get(f"text/{first.plan}")), graph=describe_graph(prepared.problem.graph))
    if is_strict:
        raise _mismatch(first, own, theirs, chosen.plan)
    theirs = replace(theirs, planner=f"{theirs.planner}, by rank {first.rank}")
    return Chosen(theirs, schedule_from(theirs, prepared.problem.graph, prepared.problem.constraints))


def _first_claim(job: Job, key: str, own: _Claim, plan: Plan) -> _Claim:
    if not job.has(key):  # before the claim, so that who sees the claim finds the plan
        job.put(f"text/{own.plan}", replace(plan, graph=()).to_json())
    return _Claim(**json.loads(job.first(key, json.dumps(asdict(own)))))


def _described(prepared: Prepared) -> list[str]:
    """All that a plan depends on beside prices and options: the graph, and what may be done with its values.

    Constants and the names of process groups, in which ranks differ, are not part of it.
    """
    graph, constraints = prepared.problem.graph, prepared.problem.constraints
    rows = zip(describe_graph(graph), graph.roles, constraints.of, strict=True)
    return [f"{line} {role} {constraint}" for line, role, constraint in rows] + [str(prepared.num_fwd_outputs)]


def _decided(plan: Plan) -> str:
    """What a plan does, without the prices, which may differ in their last digits."""
    rows = [f"{d.value} {d.action.name} {d.num_recomputes}" for d in plan.decisions]
    return "\n".join([*rows, *plan.order, *map(str, plan.phases)])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# -------------------------------------------------------------------------------------------------- differences


def _mismatch(first: _Claim, own: _Claim, theirs: Plan, ours: Plan) -> RankMismatch:
    what = (
        f"rank {first.rank} asks for\n  {first.asked}\nand rank {own.rank} for\n  {own.asked}"
        if first.asked != own.asked
        else _first_difference(first.rank, theirs, own.rank, ours)
    )
    return RankMismatch(
        f"ranks {first.rank} and {own.rank} have different plans for the same graph of {ours.num_nodes} nodes: "
        f'{what}\nGive all ranks the same options and stored plans; the option ranks="agree" makes them use one plan '
        "where only prices differ."
    )


def _first_difference(their_rank: int, theirs: Plan, our_rank: int, ours: Plan) -> str:
    """Say where two plans for one graph part."""
    values = {d.value: d for d in theirs.decisions}, {d.value: d for d in ours.decisions}
    for name in dict.fromkeys([*values[0], *values[1]]):
        done = [_done_with(decisions.get(name)) for decisions in values]
        if done[0] != done[1]:
            source = next(d.source for d in (values[0].get(name), values[1].get(name)) if d is not None)
            where = f" ({source})" if source else ""
            return (
                f"the first difference is `{name}`{where}, which rank {their_rank} {done[0]}, rank {our_rank} {done[1]}"
            )
    orders = (theirs.order, ours.order)
    number = next((i for i, (a, b) in enumerate(zip(*orders, strict=False)) if a != b), min(map(len, orders)))
    names = [f"`{order[number]}`" if number < len(order) else "nothing more" for order in orders]
    return (
        f"backward runs in another order from step {number} on, where rank {their_rank} runs {names[0]} and rank "
        f"{our_rank} {names[1]}"
    )


def _done_with(decision: Decision | None) -> str:
    if decision is None:
        return "does not need"
    if decision.num_recomputes:
        return f"recomputes {decision.num_recomputes} time(s)"
    return {"SAVE": "saves", "OFFLOAD": "offloads", "RECOMPUTE": "drops"}[decision.action.name]
