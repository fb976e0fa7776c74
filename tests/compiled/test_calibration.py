"""Machine constants: measured once, rounded, remembered, and never a reason to fail."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from remat.compiled import calibration
from remat.passes.prices.cost import Machine

_machines = calibration.machines  # before other tests are given a machine of their own


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "machines", _machines)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration._machine.cache_clear()
    yield
    calibration._machine.cache_clear()


def test_constants_are_told_apart_in_steps() -> None:
    machine = calibration.measure("cpu")
    for value in dataclasses.astuple(machine):
        steps = calibration.STEPS_PER_DOUBLING * math.log2(value)
        assert steps == pytest.approx(round(steps), abs=1e-6)


def test_small_disturbances_do_not_change_a_constant() -> None:
    assert calibration._rounded(95e9) == calibration._rounded(100e9)
    assert calibration._rounded(95e9) < calibration._rounded(120e9) < 1.5 * calibration._rounded(95e9)


def test_second_process_reads_what_the_first_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    first = calibration.machines()
    calibration._machine.cache_clear()
    monkeypatch.setattr(calibration, "measure", lambda device: pytest.fail("measured again"))
    assert calibration.machines() == first


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1.0]",
        '{"flops_per_second": 0.0, "bytes_per_second": 1.0, "half_speed": 2.0}',
        '{"flops_per_second": 1}',
        '{"flops_per_second": 1.0, "bytes_per_second": 1.0}',
    ],
)
def test_damaged_file_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(calibration, "measure", lambda device: Machine(8.0, 4.0))
    calibration.machines()
    (file,) = (tmp_path / "remat").glob("machine-*.json")
    file.write_text(text)
    calibration._machine.cache_clear()
    assert calibration.machines()["cpu"] == Machine(8.0, 4.0)
    assert file.read_text() != text


def test_unwritable_home_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(calibration, "measure", lambda device: Machine(8.0, 4.0))
    assert calibration.machines()["cpu"] == Machine(8.0, 4.0)


def test_measuring_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    calibration.measure("cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_settings_of_the_user_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(calibration, "_seconds", lambda run, device: seen.append(run().dtype) or 1.0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            calibration.measure("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float32, torch.float32, torch.bfloat16, torch.float32], "one product is of half precision"


def test_first_process_to_write_decides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure", lambda device: Machine(8.0, 4.0))
    calibration.machines()
    (file,) = (tmp_path / "remat").glob("machine-*.json")
    calibration._write(file, Machine(1.0, 1.0))
    assert calibration._read(file) == Machine(8.0, 4.0)
    assert [f.name for f in file.parent.iterdir()] == [file.name], "no temporary file is left"


def test_user_without_a_home_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(calibration.tempfile, "gettempdir", lambda: str(tmp_path))
    assert calibration._cache_folder() == tmp_path / "remat"
