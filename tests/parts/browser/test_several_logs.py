"""The trace of several logs is one for Perfetto's trace_processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_several_logs import logs
from tests.kit.in_process import printed
from tests.kit.trace_processor import check

__all__ = ["logs"]  # fixtures


@pytest.mark.native
def test_a_trace_of_several_sessions_is_one_for_perfetto(logs: list[str], tmp_path: Path) -> None:
    second, other, first = logs
    traces = {"all": logs, "joined": [first, second], "other": [other]}
    for name, chosen in traces.items():
        printed("to-perfetto", *chosen, "--flows", "-o", tmp_path / name)
    found = dict(zip(traces, check(*(tmp_path / name for name in traces)), strict=True))
    assert all(of["problems"] == [] for of in found.values())
    for what in ("slices", "flows", "counter_samples", "tracks"):
        assert found["all"][what] == found["joined"][what] + found["other"][what], what
