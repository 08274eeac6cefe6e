"""Counters of energy, in a folder like Linux's."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.prediction.recorded import joules_between, read_joules


def zone(folder: Path, name: str, microjoules: int) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    (folder / name / "max_energy_range_uj").write_text("1000000000\n")


def test_processors_add_up_and_their_parts_do_not_count_twice(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 5_000_000)
    zone(tmp_path, "intel-rapl:1", 7_000_000)
    zone(tmp_path, "intel-rapl:0:0", 1_000_000)
    before = read_joules(tmp_path)
    zone(tmp_path, "intel-rapl:0", 8_000_000)
    zone(tmp_path, "intel-rapl:1", 7_500_000)
    assert joules_between(before, read_joules(tmp_path)) == pytest.approx(3.5)


def test_a_counter_that_began_again(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 999_000_000)
    before = read_joules(tmp_path)
    zone(tmp_path, "intel-rapl:0", 2_000_000)
    assert joules_between(before, read_joules(tmp_path)) == pytest.approx(3)


def test_a_system_that_reports_none(tmp_path: Path) -> None:
    assert joules_between(read_joules(tmp_path), read_joules(tmp_path)) is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert read_joules(tmp_path) == {}
