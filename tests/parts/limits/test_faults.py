"""A hundred processes, each killed at another moment, lose nothing that was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recording.test_faults import kill_processes

pytestmark = pytest.mark.native
KILLS = 100


def test_each_killed_process_leaves_whole_lines_and_an_unclosed_log(tmp_path: Path) -> None:
    kill_processes(KILLS, tmp_path)
