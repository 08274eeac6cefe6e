"""The recorder's C API: what waits to be written is bounded, and descriptions are complete."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.kit.native_kit import DEMO
from tests.kit.programs import native_program
from tests.recording.test_native import _added, _events, log_threads

__all__ = ["log_threads"]  # fixtures

pytestmark = pytest.mark.native


def test_a_session_that_ends_while_a_context_is_made_has_all_of_it_or_nothing(
    tmp_path: Path,
) -> None:
    program = native_program("late_context", tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    subprocess.run([program, DEMO, logs, "1000"], check=True, timeout=300)
    described = ["model", *["tensor"] * 39, "context", "memory"]
    found = Counter()
    for log in logs.glob("*.log"):
        assert list(check_log(log)) == []
        _, *events, _ = (json.loads(line)["event"] for line in log.read_text().splitlines())
        assert events in ([], described)
        found[bool(events)] += 1
    assert set(found) == {False, True}
    assert found.total() == 1000


def test_what_waits_to_be_written_is_bounded(log_threads: Path, tmp_path: Path) -> None:
    """Nothing writes before 100 MB of records were added, 32 MB of which may wait: what came first
    is written, the rest is counted."""
    log = tmp_path / "session.log"
    counts, memory = _added(log_threads, log, 1, 30000, 10000)
    dropped = counts.pop("dropped")
    assert counts.pop("unwritten") == dropped
    assert counts == _events(log) - Counter(["end"])
    times = [json.loads(line)["t"] for line in log.read_bytes().splitlines()[:-1]]
    assert times == list(range(30000 - dropped))
    assert 10_000 < dropped < 30_000
    assert memory < 80 * 1024
