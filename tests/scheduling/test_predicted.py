"""`instr schedule MODEL` schedules what `instr predict` predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import assert_refused
from tests.kit.in_process import instr_here, json_reports
from tests.kit.native_kit import ROOT

pytestmark = pytest.mark.native

MACHINE = ROOT / "tests" / "fixtures" / "machine.json"
LOG = ROOT / "tests" / "fixtures" / "demo-verbose.log"


def scheduled(*words: object) -> tuple[dict[str, float], str]:
    """Times of the first table by name, in ns, and all notes."""
    tables = json_reports("schedule", "demo", "--machine", MACHINE, *words)
    notes = " ".join(note for table in tables for note in table["notes"])
    first = tables[0]
    return {next(iter(row.values())): row["time"] for row in first["rows"]}, notes


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_one_engine_takes_as_long_as_the_predicted_kernels(phase: str) -> None:
    predicted = json_reports("predict", "demo", "--machine", MACHINE, "--threads", 1)
    ops = next(table for table in predicted if "op" in table["title"] and phase in table["title"])
    kernels = sum(row["time"] for row in ops["rows"] if row["op"] != "outside the ops")
    times, notes = scheduled("--engines", 1, "--phase", phase)
    assert times["one engine, in sequence"] == pytest.approx(kernels, rel=1e-3)
    assert "predicted" in notes


def test_a_prefill_beside_a_decode_has_both() -> None:
    alone, _ = scheduled("--engines", 1)
    prefill, _ = scheduled("--engines", 1, "--phase", "prefill")
    both, _ = scheduled("--engines", 1, "--beside-prefill")
    name = "one engine, in sequence"
    assert both[name] == alone[name] + prefill[name]


WRONG = {
    "a step of a model": (["demo", "--step", "1"], "choose --phase prefill or decode"),
    "a machine for a log": ([str(LOG), "--machine", str(MACHINE)], "--machine is for models"),
    "no machine file": (["demo", "--machine", "nothing.json"], "nothing.json: no such file"),
    "a machine file without costs": (
        ["demo", "--machine", str(ROOT / "tests" / "fixtures" / "probe.json")],
        "run `instr probe` again",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_gets_one_line(case: str, tmp_path: Path) -> None:
    words, message = WRONG[case]
    assert_refused(instr_here("schedule", *words, "-o", tmp_path / "out.json"), message)
    assert not list(tmp_path.iterdir())
