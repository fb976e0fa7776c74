"""Plans with a budget in bytes hold for a range of sizes, and are made again outside of it, once per range."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batch_stream import MAX_COMPILATIONS, MODELS, run_stream
from support.dynamic_programs import PROGRAMS, batch, train, unmarked
from support.joints import Joint, capture
from torch import nn

import remat
from remat.cli.main import main
from remat.passes.budgets.budget import Budget
from remat.passes.memory.simulate import Simulator
from remat.passes.pipeline import choose, prepare
from remat.passes.plans.request import Prepared, Request
from remat.passes.plans.write_plan import Chosen
from remat.passes.prices.cost import Likes, Machine, Roofline
from remat.passes.ranges.ranges import at_sizes
from remat.passes.search import problem as flow
from remat.passes.search.bench import Bench
from remat.passes.search.chain import Chain
from remat.passes.search.improve import Improver
from remat.passes.search.planner import Planner
from remat.passes.search.tuning import MIDDLE
from remat.passes.shared.executor import Executor
from remat.passes.shared.readable import size
from remat.passes.sizes.expressions import is_true, rounded
from remat.report.data.collecting import collected
from remat.report.observed.counting import activation_peak

pytestmark = pytest.mark.filterwarnings("ignore:memory_budget=")


def compile_for(model: nn.Module, **options: Any) -> Any:
    given = {"inner": "aot_eager", "on_infeasible": "minimum", **options}
    return torch.compile(model, backend="remat", options=given, fullgraph=True, dynamic=True)


def plans_of(name: str, sizes: Any, **options: Any) -> list[remat.Plan]:
    with collected() as graphs:
        train(lambda model: compile_for(model, **options), PROGRAMS[name].make, remat.checkpoint_region, sizes, False)
    return [graph.plan for graph in graphs]


def test_run_over_all_lengths_compiles_once_per_range_and_keeps_within_the_budget() -> None:
    rng = random.Random(0)
    sizes = [17, 4096, *(rng.randint(17, 4096) for _ in range(38))]  # 16 rows are as many as columns, a case of its own
    model = PROGRAMS["layers"].make(unmarked)
    compiled = compile_for(model, memory_budget="2MB")
    with collected() as graphs:
        for size in sizes:
            compiled(batch(size)).backward()
    plans = [graph.plan for graph in graphs]
    assert len(plans) <= 4, [plan.guards for plan in plans]
    (symbol,) = plans[0].symbols
    for size in sizes:
        plan = next(plan for plan in plans if holds_at(plan, symbol.name, size))
        planned_bytes = plan.at({symbol.name: size}).peak.num_bytes
        assert planned_bytes <= 2_000_000 or not any("<" in guard for guard in plan.guards)
    for size in (17, 900, 1800, 2500):
        x = batch(size)
        peak = activation_peak(lambda x=x: compiled(x), [x, *model.parameters()], counter="dispatch")
        assert peak.activation_bytes <= 2_000_000
    assert len(graphs) == len(plans)


def holds_at(plan: remat.Plan, symbol: str, size: int) -> bool:
    """True if none of a plan's guards fails."""
    return all(is_true(guard, {symbol: size}) for guard in plan.guards)


def test_plan_states_its_range_and_why_it_ends() -> None:
    small, large = plans_of("layers", (100, 1500), memory_budget="1MB")
    name = small.symbols[0].name
    (within,) = small.ranges
    assert within.is_proved
    assert within.low == 2
    assert small.at({name: within.high}).peak.num_bytes <= 1_000_000 < small.at({name: within.high + 1}).peak.num_bytes
    assert small.guards == (f"{name} <= {within.high}",)
    assert [guard.split()[1] for guard in large.guards] == ["<=", ">="]
    assert int(large.guards[1].split()[-1]) > within.high, "the fastest plan is not replaced where it fits"


def test_fraction_is_planned_once_for_all_sizes() -> None:
    (plan,) = plans_of("layers", (100, 30, 1500, 4000), memory_budget=0.5)
    assert plan.guards == ()


def test_region_budget_in_bytes_has_a_range_too() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = PROGRAMS["layers"].make(unmarked)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.sin())

    model = Marked()
    remat.apply(model, "inner", memory_budget="400kB")
    compiled = compile_for(model)
    with collected() as graphs:
        for size in (100, 200, 600, 1000, 150):
            compiled(batch(size)).backward()
    plans = [graph.plan for graph in graphs]
    assert 2 <= len(plans) <= 3
    assert all(share.predicted_bytes <= 400_000 for plan in plans for share in plan.shares)
    assert all(plan.guards for plan in plans)


def test_of_several_stored_plans_each_is_applied_in_its_range() -> None:
    sizes = (100, 1500)
    plans = plans_of("layers", sizes, memory_budget="1MB")
    applied = plans_of("layers", (100, 1500, 90, 1400), plan=list(reversed(plans)))
    assert [plan.guards for plan in applied] == [plan.guards for plan in plans]


@pytest.mark.slow
def test_two_sizes_that_change_are_guarded_together() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = x + self.linear(x).tanh().exp()
            return x.sum()

    rng = random.Random(1)
    compiled = compile_for(Rows(), memory_budget="3MB")
    with collected() as graphs:
        for _ in range(40):
            compiled(torch.randn(rng.randint(2, 16), rng.randint(16, 1024), 16, requires_grad=True)).backward()
    plans = [graph.plan for graph in graphs]
    assert len(plans) <= 6, [plan.guards for plan in plans]
    assert any("*" in guard for plan in plans for guard in plan.guards)
    for plan in plans:
        values = {symbol.name: symbol.value for symbol in plan.symbols}
        assert all(is_true(guard, values) for guard in plan.guards)


@pytest.mark.slow
def test_cached_graph_keeps_its_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = PROGRAMS["layers"].make(unmarked)
    counters = torch._dynamo.utils.counters
    caches = (
        torch._inductor.config.patch({"fx_graph_cache": True}),
        torch._functorch.config.patch({"enable_autograd_cache": True}),
    )
    with caches[0], caches[1]:
        graphs, hits = [], []
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            compiled = compile_for(model, memory_budget="1MB", inner="inductor")
            for size in (100, 1200, 1300, 90):
                compiled(batch(size)).backward()
            graphs.append(counters["stats"]["unique_graphs"])
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert graphs == [2, 2]
    assert hits == [0, 2]


# ------------------------------------------------------------------------------------------------- reports


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = PROGRAMS["layers"].make(unmarked)
    torch._dynamo.reset()
    report = remat.explain(model, batch(64), memory_budget="1MB", inner="aot_eager", dynamic=True)
    file = tmp_path_factory.mktemp("stored") / "report.json"
    report.save(file)
    report.plans[0].save(file.with_name("plan.json"))
    return file


def test_report_shows_expressions_and_ranges(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(stored), "--full"]) == 0
    text = capsys.readouterr().out
    plan = remat.Plan.load(stored)
    name = plan.symbols[0].name
    assert f"{name} = 64 (size of the example)" in text
    assert f"{plan.peak.expression} bytes, {size(plan.peak.num_bytes)} at {name}=64" in text
    assert f"within the budget   {name} from 2 to " in text
    assert f"planned again       unless {name} <= " in text
    assert f" = 128*{name} bytes" in text


@pytest.mark.parametrize("file", ["report.json", "plan.json"])
def test_command_evaluates_expressions_at_other_sizes(
    stored: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored.with_name(file)
    name = remat.Plan.load(path).symbols[0].name
    (expected,) = plans_of("layers", (512,), memory_budget="1MB")
    assert main(["show", str(path), "--set", f"{name}=512", "--json"]) == 0
    shown = remat.Plan.from_json(capsys.readouterr().out)
    assert shown.peak.num_bytes == expected.peak.num_bytes
    assert [d.num_bytes for d in shown.decisions] == [d.num_bytes for d in expected.decisions]
    assert main(["show", str(path), "--set", f"{name}=512"]) == 0
    assert f"{name} = 512 (given)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s9=3", "s9=3: the symbols of this plan are {name} (was 64)"),
        ("{name}=0", "{name}=0: expected a whole number from 1; the symbols of this plan are {name} (was 64)"),
        ("{name}=-4", "{name}=-4: expected a whole number from 1"),
        ("{name}", "--set {name}: expected SYMBOL=SIZE, such as s1=8192"),
        ("{name}=x", "--set {name}=x: expected SYMBOL=SIZE"),
    ],
)
def test_wrong_size_on_the_command_line_names_the_symbols(
    stored: Path, given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = remat.Plan.load(stored).symbols[0].name
    assert main(["show", str(stored), "--set", given.format(name=name)]) == 2
    assert message.format(name=name) in capsys.readouterr().err


def test_page_shows_expressions(stored: Path) -> None:
    report = remat.Report.load(stored)
    page = report.to_html()
    plan = report.plans[0]
    assert f'forward time","{rounded(plan.times.forward)}' in page
    assert plan.peak.expression in page


# ------------------------------------------------------------------------------------------------- models


def assert_stream_is_right(*args: Any, **kwargs: Any) -> None:
    stream = run_stream(*args, **kwargs)
    assert stream.num_different == 0, "gradients are not eager's"
    assert stream.num_exceeding == 0, f"a peak is {stream.worst_part_of_budget:.3f} of the budget"
    assert stream.num_compilations <= MAX_COMPILATIONS


def test_llama_on_batches_of_changing_lengths() -> None:
    assert_stream_is_right("llama", "aot_eager", num_batches=5, longest=48, budget_bytes=300_000, num_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_models_on_batches_of_changing_lengths(name: str, inner: str) -> None:
    assert_stream_is_right(name, inner, num_batches=200, longest=1024)


# ------------------------------------------------------------------------------------------------- two symbols


class Attentive(nn.Module):
    """Memory grows with rows times length, and with rows times its square."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.query, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.num_layers = num_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_layers):
            h = self.query(x)
            x = x + (h @ h.transpose(1, 2)).softmax(-1) @ x
            x = x + self.down(nn.functional.gelu(self.up(x)).sin())
        return x.pow(2).sum()


def plans_over_two_sizes(num_layers: int, part: float, *, fuses: bool, num_batches: int) -> list[Chosen]:
    """Plan for batches of 2 to 64 rows of 16 to 4096 tokens, each time none of the plans so far is for its size."""
    x = torch.randn(4, 64, 16, requires_grad=True)
    torch._dynamo.mark_static(x, 2)
    joint = capture(Attentive(num_layers), x, dynamic=True)
    model = Roofline({"cpu": Machine(2.0**36, 2.0**33)}, fuses)
    plain = prepare(joint.module, Request(model, executor=Executor(fuses=fuses)), num_fwd_outputs=joint.num_fwd_outputs)
    sizes = plain.storages.sizes
    rows, length = sorted(sizes.backed, key=lambda symbol: sizes.values[symbol])
    largest = at_sizes(plain.problem, plain.storages, model, sizes.at({rows: 64, length: 4096}))
    budget = Budget("part", num_bytes=int(part * Planner(Bench(*largest)).lowest.peak_bytes), take_minimum=True)
    request = Request(model, budget, take_minimum=True, executor=Executor(fuses=fuses))
    rng, found = random.Random(0), []
    for number in range(num_batches):
        given = {rows: rng.randint(2, 64), length: rng.randint(16, 4096)}
        if number % 2:
            given = {rows: int(2 ** rng.uniform(1, 6)), length: int(2 ** rng.uniform(4, 12))}
        values = {symbol.name: value for symbol, value in given.items()}
        if not any(all(is_true(guard, values) for guard in chosen.plan.guards) for chosen in found):
            problem, storages = at_sizes(plain.problem, plain.storages, model, sizes.at(given))
            found.append(choose(Prepared(problem, storages, plain.num_fwd_outputs), request))
        covering = [c.plan for c in found if all(is_true(guard, values) for guard in c.plan.guards)]
        assert covering, "a plan does not cover the sizes that it was made for"
        for plan in covering:
            is_lowest = not any("<=" in guard for guard in plan.guards)
            assert is_lowest or plan.at(values).peak.num_bytes <= budget.num_bytes
    return found


def plans_over_one_size(num_layers: int, part: float, *, fuses: bool, num_lengths: int) -> list[Chosen]:
    """Plan for lengths up to 4096, and for those next to the ends of ranges, where no plan so far is for them."""
    x = torch.randn(4, 64, 16, requires_grad=True)
    torch._dynamo.mark_static(x, 0)
    torch._dynamo.mark_static(x, 2)
    joint = capture(Attentive(num_layers), x, dynamic=True)
    model = Roofline({"cpu": Machine(2.0**36, 2.0**33)}, fuses)
    plain = prepare(joint.module, Request(model, executor=Executor(fuses=fuses)), num_fwd_outputs=joint.num_fwd_outputs)
    sizes = plain.storages.sizes
    (length,) = sizes.backed
    largest = at_sizes(plain.problem, plain.storages, model, sizes.at({length: 4096}))
    budget = Budget("part", num_bytes=int(part * Planner(Bench(*largest)).lowest.peak_bytes), take_minimum=True)
    request = Request(model, budget, take_minimum=True, executor=Executor(fuses=fuses))
    rng, found = random.Random(0), []
    todo = [int(2 ** rng.uniform(4, 12)) for _ in range(num_lengths)]
    while todo:
        value = todo.pop(0)
        values = {length.name: value}
        if any(all(is_true(guard, values) for guard in chosen.plan.guards) for chosen in found):
            continue
        problem, storages = at_sizes(plain.problem, plain.storages, model, sizes.at({length: value}))
        chosen = choose(Prepared(problem, storages, plain.num_fwd_outputs), request)
        assert all(is_true(guard, values) for guard in chosen.plan.guards)
        found.append(chosen)
        ends = [int(guard.split()[-1]) for guard in chosen.plan.guards]
        todo += [n for end in ends for n in (end - 1, end + 1, end + 2, end + 9) if 16 <= n <= 4096]
    return found


@pytest.mark.parametrize(
    ("num_layers", "part", "fuses"),
    [
        (4, 0.3, False),
        *(
            pytest.param(num_layers, part, fuses, marks=pytest.mark.slow)
            for num_layers in (2, 8, 16)
            for part in (0.05, 0.3, 0.9, 1.2)
            for fuses in (False, True)
        ),
    ],
)
def test_number_of_plans_over_one_size_is_bounded_also_next_to_the_ends_of_ranges(
    num_layers: int, part: float, fuses: bool
) -> None:
    found = plans_over_one_size(num_layers, part, fuses=fuses, num_lengths=60)
    most = 5  # four, and the lowest plan beyond the budget
    assert len(found) <= most, [chosen.plan.guards for chosen in found]
    assert {chosen.plan.most_ranges for chosen in found} == {most}


@pytest.mark.parametrize(
    ("num_layers", "part", "fuses"),
    [
        (6, 0.1, False),
        *(
            pytest.param(num_layers, part, fuses, marks=pytest.mark.slow)
            for num_layers in (2, 8, 16)
            for part in (0.05, 0.3, 1.2)
            for fuses in (False, True)
        ),
    ],
)
def test_number_of_plans_over_two_sizes_is_bounded(num_layers: int, part: float, fuses: bool) -> None:
    found = plans_over_two_sizes(num_layers, part, fuses=fuses, num_batches=120)
    most = 4  # where the fastest plan fits, up to twice the budget, as far as there is one, beyond
    assert len(found) <= most, [chosen.plan.guards for chosen in found]
    for chosen in found:
        assert chosen.plan.most_ranges == most
        assert f"at most {most} plans for all sizes" in str(chosen.plan)


def test_stream_of_batches_of_all_shapes_stays_below_torchs_limit() -> None:
    """A single row, which torch makes a constant, and up to 64; no graph is given up."""
    model, rng = Attentive(3), random.Random(2)
    compiled = torch.compile(
        model,
        backend="remat",
        options={"inner": "aot_eager", "memory_budget": "6MB", "on_infeasible": "minimum"},
        fullgraph=True,  # an error, not eager, beyond the limit
    )
    shapes = [(1, 100), (1, 300), (4, 40), *((rng.choice((1, 2, 7, 24)), rng.randint(17, 200)) for _ in range(30))]
    with collected() as graphs:
        for rows, length in shapes:
            x = torch.randn(rows, length, 16)
            compiled(x).backward()
    assert len(graphs) <= MAX_COMPILATIONS, [graph.plan.guards for graph in graphs]


# ------------------------------------------------------------------------------------------------- work


@dataclass
class Work:
    """What planning was made of."""

    graphs_read: int = 0
    searches: int = 0
    chains: int = 0
    cuts: int = 0
    nodes_simulated: int = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    work = Work()

    def count(owner: Any, name: str, field: str, amount: Callable[[Any], int] = lambda _: 1) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            setattr(work, field, getattr(work, field) + amount(result))
            return result

        patch.setattr(owner, name, staticmethod(counting) if owner is Likes else counting)

    with monkeypatch.context() as patch:
        count(Likes, "find", "graphs_read")
        count(Improver, "within", "searches")
        count(Chain, "_options", "chains")
        count(flow, "solve_network", "cuts")
        count(Simulator, "run", "nodes_simulated", lambda simulation: len(simulation.order))
        yield work


@cache
def attentive_joint(fixed: tuple[int, ...]) -> Joint:
    """Trace for one batch of four rows; the dimensions that are not fixed are symbols."""
    x = torch.randn(4, 64, 16, requires_grad=True)
    for dim in fixed:
        torch._dynamo.mark_static(x, dim)
    return capture(Attentive(6), x, dynamic=len(fixed) < 3)


def work_of_planning(budget_bytes: int | None, fixed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Work:
    joint = attentive_joint(fixed)
    budget = None if budget_bytes is None else Budget("bytes", num_bytes=budget_bytes)
    request = Request(Roofline({"cpu": Machine(2.0**36, 2.0**33)}, fuses=False), budget)
    with counted(monkeypatch) as work:
        prepared = prepare(copy.deepcopy(joint.module), request, num_fwd_outputs=joint.num_fwd_outputs)
        assert len(prepared.storages.sizes.backed) == 3 - len(fixed)
        choose(prepared, request)
    return work


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # copying a traced graph copies its pytree specs, which warn
@pytest.mark.parametrize("part", [None, 1.25, 0.75, 0.375, "lowest"])
def test_planning_with_symbols_is_hardly_more_work_than_with_fixed_sizes(
    part: float | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One search, whichever range a batch is in; the graph is read once, whatever the sizes."""
    fastest, lowest = attentive_peaks()
    budget_bytes = None if part is None else int(1.05 * lowest if part == "lowest" else part * fastest)
    expected = work_of_planning(budget_bytes, (0, 1, 2), monkeypatch)
    for fixed in ((0, 2), (2,)):
        work = work_of_planning(budget_bytes, fixed, monkeypatch)
        assert work.graphs_read == 1
        assert work.searches <= max(1, expected.searches), (work, expected)
        assert work.chains <= max(1, expected.chains), (work, expected)
        # How many stages of backward are cut for depends on where the peak moves, which is not the same at all sizes.
        assert work.cuts <= expected.cuts + 2 * MIDDLE.num_cuts, (work, expected)
        assert work.nodes_simulated <= 1.5 * expected.nodes_simulated + LONGEST_STEP, (work, expected)


LONGEST_STEP = 1_500
"""More nodes than a step of the graph runs."""


@cache
def attentive_peaks() -> tuple[int, int]:
    """The peaks of the fastest plan and of the lowest one that is looked for at all sizes alike."""
    joint = attentive_joint((0, 1, 2))
    request = Request(Roofline({"cpu": Machine(2.0**36, 2.0**33)}, fuses=False))
    prepared = prepare(copy.deepcopy(joint.module), request, num_fwd_outputs=joint.num_fwd_outputs)
    planner = Planner(Bench(prepared.problem, prepared.storages))
    return planner.fastest.peak_bytes, planner.low.peak_bytes
