"""Losses and gradients on many ranks are those without remat, bit for bit, and those of one process."""

from __future__ import annotations

import pytest
from support import rank_programs as programs
from support.rank_programs import REGIONS, Setting

EAGER = [Setting("eager", region) for region in REGIONS if region != "none"]


def compiled(*regions: str) -> list[Setting]:
    return [Setting("aot_eager", region) for region in regions]


def with_slow(quick: list[Setting], regions: tuple[str, ...] = ("none", "bare", "policy")) -> list:
    """Settings of which the quick ones run by default, and the rest of the matrix when asked for."""
    every = [Setting(engine, region) for engine in ("aot_eager", "inductor") for region in regions]
    slow = [setting for setting in every if setting not in quick]
    return [*quick, *(pytest.param(setting, marks=pytest.mark.slow) for setting in slow)]


def named(setting):
    return str(setting) if isinstance(setting, Setting) else None


class TestDDP:
    @pytest.mark.parametrize("setting", [*EAGER, *with_slow(compiled("bare"))], ids=named)
    def test_default(self, two_ranks, setting):
        two_ranks.run(programs.ddp, setting)

    @pytest.mark.parametrize("setting", [*EAGER[:2], *with_slow([])], ids=named)
    def test_static_graph(self, two_ranks, setting):
        two_ranks.run(programs.ddp, setting, static_graph=True)

    @pytest.mark.parametrize("setting", [*EAGER[:2], *with_slow([])], ids=named)
    def test_unused_parameters(self, two_ranks, setting):
        two_ranks.run(programs.ddp, setting, find_unused=True)

    @pytest.mark.parametrize("setting", [EAGER[0], *with_slow([])], ids=named)
    def test_four_ranks(self, four_ranks, setting):
        four_ranks.run(programs.ddp, setting)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tensor parallel"])
def test_eager_regions_with_a_budget(two_ranks, strategy):
    two_ranks.run(programs.budgeted_regions, strategy)


class TestFSDP2:
    @pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept whole"])
    @pytest.mark.parametrize("setting", EAGER, ids=named)
    def test_sharded_layers(self, two_ranks, setting, reshard):
        two_ranks.run(programs.fsdp, setting, reshard=reshard)

    @pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept whole"])
    @pytest.mark.parametrize("setting", EAGER, ids=named)
    def test_sharded_modules_inside_of_regions(self, two_ranks, setting, reshard):
        two_ranks.run(programs.fsdp, setting, reshard=reshard, inner=True)

    @pytest.mark.parametrize("setting", with_slow(compiled("policy")), ids=named)
    def test_compiled(self, two_ranks, setting):
        two_ranks.run(programs.fsdp, setting)

    def test_compiled_by_inductor(self, two_ranks):
        two_ranks.run(programs.small_fsdp, Setting("inductor", "bare"))

    @pytest.mark.parametrize("setting", with_slow(compiled("bare")), ids=named)
    def test_compiled_with_sharded_modules_inside_of_regions(self, two_ranks, setting):
        two_ranks.run(programs.fsdp, setting, inner=True)

    @pytest.mark.parametrize("setting", [*EAGER[:2], *with_slow([])], ids=named)
    def test_four_ranks(self, four_ranks, setting):
        four_ranks.run(programs.fsdp, setting)


class TestTensorParallel:
    @pytest.mark.parametrize("setting", [*EAGER, *with_slow(compiled("bare"))], ids=named)
    def test_split_products(self, two_ranks, setting):
        two_ranks.run(programs.tensor_parallel, setting)

    @pytest.mark.parametrize("setting", [*EAGER, *with_slow([])], ids=named)
    def test_with_fsdp2(self, four_ranks, setting):
        four_ranks.run(programs.fsdp_and_tensor_parallel, setting)


class TestPipelines:
    @pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
    @pytest.mark.parametrize("setting", EAGER, ids=named)
    def test_two_stages(self, two_ranks, setting, schedule):
        two_ranks.run(programs.pipeline, setting, schedule=schedule)

    @pytest.mark.parametrize("setting", with_slow(compiled("bare")), ids=named)
    def test_compiled_stages(self, two_ranks, setting):
        two_ranks.run(programs.pipeline, setting, schedule="Schedule1F1B")

    @pytest.mark.parametrize("setting", EAGER[:1], ids=named)
    def test_four_stages(self, four_ranks, setting):
        four_ranks.run(programs.pipeline, setting, schedule="Schedule1F1B")


class TestRouting:
    @pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
    @pytest.mark.parametrize("setting", [EAGER[0], EAGER[1], *with_slow([])], ids=named)
    def test_mixtral(self, two_ranks, setting, strategy):
        two_ranks.run(programs.mixtral, setting, strategy=strategy)
