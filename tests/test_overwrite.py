"""No command writes its result over a model or a log that it reads, not even with --force."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import Instr, assert_refused
from tests.native_kit import DEMO

LOG = Path(__file__).parent / "fixtures" / "demo-verbose.log"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copyfile(DEMO, tmp_path / "model.gguf")
    shutil.copyfile(LOG, tmp_path / "session.log")
    (tmp_path / "prompt.txt").write_text("Once")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "cat session.log -o session.log",
        "stats session.log -o ./session.log",
        "diff session.log session.log -o session.log",
        "to-perfetto session.log -o session.log",
        "report session.log -o session.log",
        "report model.gguf -o model.gguf",
        "inspect model.gguf -o model.gguf",
        "blocks model.gguf output.weight -o model.gguf",
        "compare session.log session.log -o session.log",
        "compare demo demo --reference model.gguf -o model.gguf",
        "quality demo model.gguf --only weights -o model.gguf",
        "quality demo demo --text prompt.txt -o prompt.txt",
        "run model.gguf -p x --log model.gguf",
        "run model.gguf -p x --perfetto model.gguf",
        "run demo --prompt-file prompt.txt --log prompt.txt",
        "quantize model.gguf --types F16 -o model.gguf",
    ],
)
def test_what_is_read_stays(line: str, place: Path, instr: Instr) -> None:
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    done = instr(*line.split(), "--force")
    assert_refused(done, line.split()[-1], "name another")
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_a_log_and_its_trace_are_two_files(place: Path, instr: Instr) -> None:
    done = instr("run", "demo", "-p", "x", "--log", "a", "--perfetto", "./a")
    assert_refused(done, "cannot hold both the log and the trace")
    assert not (place / "a").exists()
