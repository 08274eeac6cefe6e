"""Models come and go for seconds while the log rotates."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.kit.native_kit import DEMO
from tests.kit.programs import native_program

pytestmark = pytest.mark.native


def test_models_come_and_go_while_the_log_rotates(tmp_path: Path) -> None:
    program = native_program("models_come_and_go", tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    asked = {"LLAMA_INSTR_LOG": str(logs / "r.log"), "LLAMA_INSTR_ROTATE": "20000"}
    done = subprocess.run(
        [program, DEMO, "3"], env=os.environ | asked, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "models_come_and_go: passed\n"), done.stderr
    parts = list(logs.iterdir())
    assert len(parts) > 20, "the log hardly rotated"
    assert not [fault for part in parts for fault in check_log(part)]
