"""`instr collect`: every log once, whole or not at all, with the figures of the log itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamacpp_instr.converters.fleet.dataset import known_logs
from tests.fleet.fleet_logs import write_log
from tests.fleet.test_collect import check, collect


@pytest.mark.native
def test_a_killed_collect_leaves_each_log_whole_or_absent(tmp_path: Path) -> None:
    folder, dataset = tmp_path / "logs", tmp_path / "fleet"
    folder.mkdir()
    for i in range(24):
        write_log(folder / f"{i}.log", i, repeat=8)
    command = [sys.executable, "-m", "llamacpp_instr", "collect", str(folder), "-o", str(dataset)]
    seen = set()
    for moment in (0, 2, 5, 9, 14):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None and (
            not dataset.is_dir() or len(list(dataset.glob("logs/*/*/*"))) < moment
        ):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if not (dataset / "_format").is_file():
            continue
        check(dataset)
        seen.add(len(known_logs(dataset)))
    assert len(seen) > 2, "it was killed in the middle"
    done = collect(folder, "-o", dataset)
    assert done.returncode == 0
    check(dataset)
    assert len(known_logs(dataset)) == 24
    assert list(dataset.glob(".*")) == []
