"""Ranks that plan the same graph use the same plan; nobody waits for a rank that plans something else, or nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import rank_programs as programs
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import remat
from remat.compiled import calibration
from remat.compiled.options import Options
from remat.compiled.partitioner import Partitioner
from remat.compiled.ranks import Job, current_job
from remat.passes.prices.cost import Machine


def price_by_rank(call):
    """Nothing on even ranks, days on odd ones: plans made by these prices have nothing in common."""
    return 0.0 if dist.get_rank() % 2 == 0 else 1e6


def cheap(call):
    return 0.0


def dear(call):
    return 1e6


def plan(folder, *, num_rows=4, ranks=None, compiled_by=None, **options):
    """Train one step; return what each graph's plan does, and how long that took."""
    model = programs.Model()
    x = torch.randn(num_rows if isinstance(num_rows, int) else num_rows[dist.get_rank()], programs.HIDDEN)
    if compiled_by is not None and dist.get_rank() not in compiled_by:
        return None
    reference = programs.Trained(model, model).step(x, 0)
    own = Path(folder) / f"of-rank-{dist.get_rank()}"
    settings = {"inner": "aot_eager", "cost_model": price_by_rank, "dump": str(own), **options}
    if ranks is not None:
        settings["ranks"] = ranks
    started = time.monotonic()
    found = programs.Trained(model, torch.compile(model, backend="remat", options=settings)).step(x, 0)
    seconds = time.monotonic() - started
    assert torch.equal(found[0], reference[0])
    assert all(torch.equal(found[1][name], reference[1][name]) for name in reference[1])
    plans = [remat.Plan.load(path) for path in sorted(own.glob("*.json"))]
    return [(p.order, [d.value for d in p.saved]) for p in plans], seconds


def plans_of(answers):
    return [plans for plans, _ in answers]


class TestSameGraph:
    def test_ranks_with_different_prices_use_one_plan(self, four_ranks, tmp_path):
        plans = plans_of(four_ranks.run(plan, tmp_path))
        assert len(plans[0]) == 1
        assert plans[0] == plans[1] == plans[2] == plans[3]

    def test_ranks_that_plan_alone_have_their_own(self, two_ranks, tmp_path):
        plans = plans_of(two_ranks.run(plan, tmp_path, ranks="alone"))
        assert plans[0] != plans[1]

    def test_measured_prices_lead_to_one_plan(self, two_ranks, tmp_path):
        plans = plans_of(two_ranks.run(plan, tmp_path, cost_model="profile"))
        assert plans[0] == plans[1]

    def test_budgets_too(self, two_ranks, tmp_path):
        plans = plans_of(two_ranks.run(plan, tmp_path, memory_budget=0.9))
        assert plans[0] == plans[1]

    def test_ranks_whose_collectives_are_of_different_groups_use_one_plan(self, four_ranks, tmp_path):
        orders = four_ranks.run(plan_in_two_groups, tmp_path)
        assert orders[0] == orders[1] == orders[2] == orders[3]

    def test_the_regions_with_a_budget_of_eager_code_too(self, two_ranks, tmp_path):
        found = two_ranks.run(plan_of_region, tmp_path)
        assert found[0] == found[1]


def plan_in_two_groups(folder):
    """Split products over pairs of ranks: the graphs of the pairs name different groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = programs.split_products(programs.Model(dropout=0.0, num_layers=1), mesh["tensor"])
    own = Path(folder) / f"of-rank-{dist.get_rank()}"
    options = {"inner": "aot_eager", "cost_model": price_by_rank, "dump": str(own)}
    torch.compile(model, backend="remat", options=options)(torch.randn(4, programs.HIDDEN)).sum().backward()
    (path,) = own.glob("*.json")
    return remat.Plan.load(path).order


def plan_of_region(folder):
    """Plan an eager region with machine constants that differ from rank to rank."""
    machine = Machine(2.0**40, 2.0**20) if dist.get_rank() == 0 else Machine(2.0**20, 2.0**40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "machines", lambda: {"cpu": machine})
        own = Path(folder) / f"of-rank-{dist.get_rank()}"
        patch.setenv("REMAT_DUMP", str(own))
        model = programs.Model(dropout=0.0, num_layers=1)
        remat.apply(model, "layers.*", memory_budget=0.9)
        model(torch.randn(4, programs.HIDDEN)).sum().backward()
    (path,) = own.glob("*.json")
    return remat.Plan.load(path).order


class TestDifferentGraphs:
    def test_ranks_with_equal_shapes_agree_and_the_others_plan_alone(self, four_ranks, tmp_path):
        plans = plans_of(four_ranks.run(plan, tmp_path, num_rows=(4, 4, 6, 6)))
        assert plans[0] == plans[1]
        assert plans[2] == plans[3]

    def test_nobody_waits_for_a_rank_that_does_not_compile(self, two_ranks, tmp_path):
        alone, answer = two_ranks.run(plan, tmp_path, compiled_by=[1])
        assert alone is None
        assert answer[1] < two_ranks.group_seconds / 2

    def test_uneven_batches_under_ddp_give_the_gradients_of_one_process(self, two_ranks):
        two_ranks.run(uneven_ddp)


def uneven_ddp():
    """Ranks have batches of different sizes, in turns, so that each recompiles at its own time."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = programs.Model(dropout=0.0)
    reference = programs.Trained(model, model)
    wrapped = torch.nn.parallel.DistributedDataParallel(programs.copy.deepcopy(model))
    compiled = torch.compile(wrapped, backend="remat", options={"inner": "aot_eager", "cost_model": price_by_rank})
    ours = programs.Trained(wrapped.module, compiled)
    for number, sizes in enumerate([(4, 4), (4, 6), (5, 6)]):
        torch.manual_seed(number)
        batches = [torch.randn(size, programs.HIDDEN) for size in sizes]
        expected = [reference.step(batch, 0)[1] for batch in batches]
        _, found = ours.step(batches[rank], 0)
        for name, gradient in found.items():
            mean = sum(gradients[name] for gradients in expected) / num_ranks
            torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)


class TestMismatch:
    def test_the_error_names_the_ranks_and_the_first_difference(self, two_ranks, tmp_path):
        outcomes = two_ranks.attempt(plan, tmp_path, ranks="check")
        (error,) = [outcome.text for outcome in outcomes if not isinstance(outcome, tuple)]
        assert "RankMismatch: ranks" in error
        assert "different plans for the same graph" in error
        assert "the first difference is `" in error
        assert "rank_programs.py:" in error

    def test_the_error_names_options_that_differ(self, two_ranks, tmp_path):
        outcomes = two_ranks.attempt(plan_for_own_budget, tmp_path)
        (error,) = [outcome.text for outcome in outcomes if not isinstance(outcome, tuple)]
        assert "asks for\n  memory_budget 0." in error

    def test_equal_plans_pass_the_check(self, two_ranks, tmp_path):
        plans = plans_of(two_ranks.run(plan, tmp_path, ranks="check", cost_model="flops"))
        assert plans[0] == plans[1]

    def test_stored_plans_that_differ_are_refused(self, two_ranks, tmp_path):
        outcomes = two_ranks.attempt(apply_own_plan, tmp_path)
        (error,) = [outcome.text for outcome in outcomes if not isinstance(outcome, tuple)]
        assert "RankMismatch" in error
        assert "same options and stored plans" in error


def plan_for_own_budget(folder):
    return plan(folder, ranks="check", cost_model="flops", memory_budget=0.9 if dist.get_rank() == 0 else 0.95)


def apply_own_plan(folder):
    """Make a plan on each rank by its own prices, and apply it."""
    plan(folder, ranks="alone")
    (path,) = (Path(folder) / f"of-rank-{dist.get_rank()}").glob("*.json")
    stored = remat.Plan.load(path)
    torch._dynamo.reset()
    torch.manual_seed(0)
    return plan(Path(folder) / "again", cost_model="flops", plan=stored)


class TestKeys:
    def test_machine_constants_of_one_rank_hold_for_all(self, two_ranks):
        found = two_ranks.run(keys_with_own_machine, [1, 2])
        assert found[0]["agree"] == found[1]["agree"]
        assert found[0]["alone"] != found[1]["alone"]

    def test_measured_prices_do_not_outlive_a_job_in_caches(self, two_ranks):
        first, second = (two_ranks.run(keys_with_own_machine, [1, 1]) for _ in range(2))
        assert first[0]["profile"] == first[1]["profile"]
        assert first[0]["profile"] != second[0]["profile"]
        assert first[0]["agree"] == second[0]["agree"]


def keys_with_own_machine(speeds):
    machine = Machine(2.0 ** speeds[dist.get_rank()], 8.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "machines", lambda: {"cpu": machine})
        asked = {"agree": {}, "alone": {"ranks": "alone"}, "profile": {"cost_model": "profile"}}
        return {name: Partitioner(Options.parse_own(options)).uuid() for name, options in asked.items()}


class TestLifetime:
    def test_after_its_group_is_gone_a_rank_plans_alone(self, two_ranks, tmp_path):
        plans = two_ranks.run(plan_after_the_group, tmp_path)
        assert plans[0] != plans[1]

    def test_a_pretended_group_has_nobody_to_agree_with(self):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            assert current_job() is None
        finally:
            dist.destroy_process_group()

    def test_a_store_that_is_gone_is_an_error_that_says_so(self):
        class Gone:
            def compare_set(self, *_):
                raise dist.DistNetworkError("Connection reset by peer")

        with pytest.raises(remat.RankMismatch, match=r"rank 3 cannot agree.*Connection reset by peer.*ranks=\"alone\""):
            Job(Gone(), 3).first("key", "value")


def plan_after_the_group(folder):
    rank = dist.get_rank()
    dist.destroy_process_group()
    model = programs.Model()
    own = Path(folder) / f"of-rank-{rank}"
    options = {"inner": "aot_eager", "cost_model": cheap if rank == 0 else dear, "dump": str(own)}
    torch.compile(model, backend="remat", options=options)(torch.randn(4, programs.HIDDEN)).sum().backward()
    (path,) = own.glob("*.json")
    return remat.Plan.load(path).order


@pytest.mark.parametrize("value", ["together", None, 3])
def test_an_unknown_word_for_ranks_is_refused(value):
    with pytest.raises(remat.OptionError, match=r"ranks=.*expected 'agree', 'check' or 'alone'"):
        Options.parse_own({"ranks": value})
