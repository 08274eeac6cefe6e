"""Energy: counters in a folder like Linux's, and the power of recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from llamacpp_instr.base.machine import read_joules
from llamacpp_instr.prediction import recorded as measure
from llamacpp_instr.prediction.fit import Sample
from llamacpp_instr.prediction.recorded import Recorded, Subject, joules_between
from tests.kit.sketched_log import Sketch
from tests.kit.steady_log import write


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


def test_a_counter_that_did_not_move_has_not_begun_again(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 2_000_000)
    before = read_joules(tmp_path)
    assert joules_between(before, before) == 0


def test_only_processors_of_both_readings_count() -> None:
    before = {"intel-rapl:0": (5.0, 100.0), "intel-rapl:1": (9.0, 100.0)}
    after = {"intel-rapl:1": (11.0, 100.0), "intel-rapl:2": (50.0, 100.0)}
    assert joules_between(before, after) == 2
    assert joules_between(before, {}) is None


def test_a_processor_whose_counter_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:1").mkdir()
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("none\n")
    zone(tmp_path, "intel-rapl:2", 2_000_000)
    assert read_joules(tmp_path) == {"intel-rapl:2": (2.0, 1000.0)}


def test_watts_are_energy_divided_by_the_time_of_the_runs_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recordings of two models with 1, 2, 3 and 4 threads: joules and seconds of each."""
    energy: dict[str, list[tuple[int, float | None, float]]] = {
        "small": [(1, 0.3, 2.0), (2, None, 1.0), (3, 0.0, 1.0), (4, 10.0, 3.0)],
        "large": [(1, 0.7, 3.0), (2, None, 1.0), (3, 0.0, 1.0), (4, None, 50.0)],
    }
    sketch = Sketch()
    for ns in (900, 500):
        sketch.step(ns, ops=([ns - 100, 100], [0, 0]))
    logs = []

    def recordings(folder: Path, threads: Sequence[int], _: object) -> Iterator[Recorded]:
        assert list(threads) == [1, 2, 3, 4]
        for model, of_model in energy.items():
            for n, joules, seconds in of_model:
                logs.append(write(folder / f"{model}-{n}.log", sketch.events))
                yield Recorded(model, logs[-1], n, joules, seconds)
                assert not logs[-1].exists(), "it is read and deleted before the next"

    fitted: list[tuple[list[list[Sample]], dict[int, float]]] = []
    monkeypatch.setattr(measure, "record_subjects", recordings)
    monkeypatch.setattr(measure, "fit", lambda *of: fitted.append(of))
    progress: list[tuple[int, int]] = []
    subjects: list[Subject] = list(measure.SUBJECTS[:2])
    measure.measure_kernels([1, 2, 3, 4], lambda *of: progress.append(of), subjects)
    ((models, watts),) = fitted
    assert watts == {1: 0.2, 4: 3.333}, "four digits; none without a counter that moves"
    assert [[of.ns.tolist() for of in model] for model in models] == [[[400, 100]] * 4] * 2
    assert progress == [(done, 8) for done in range(1, 9)]
