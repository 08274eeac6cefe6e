"""The recorder's C API under stress: contexts at once, sessions that come and go, errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

from llamacpp_instr.check import check_log
from tests.native_kit import DEMO, ROOT, compile_program, installed_library


def test_the_recorder_under_stress(tmp_path: Path) -> None:
    source = ROOT / "tests" / "native" / "recorder_stress.cpp"
    program = compile_program(source, installed_library(), tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    done = subprocess.run([program, DEMO, logs], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "recorder_stress: passed\n"
    written = sorted(logs.glob("*.log"))
    assert len(written) == 26
    for log in written:
        assert list(check_log(log)) == []
