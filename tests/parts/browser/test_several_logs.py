"""The trace of several logs is one for Perfetto's trace_processor."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from llamacpp_instr.log.schema import SessionStart
from tests.kit.in_process import printed
from tests.kit.made_log import make_log
from tests.kit.split_log import split_log
from tests.kit.steady_log import write
from tests.kit.trace_processor import check


@pytest.fixture
def logs(tmp_path: Path) -> list[str]:
    """Two parts of a session, the second first, and the log of another process. Their CPU has no
    name, so any probe fits it."""
    rotated = make_log(lambda _low, high: high, n_contexts=2, level="detailed")
    other = make_log(Random(3).randint, n_contexts=1, level="detailed")
    paths = [tmp_path / name for name in ("a.log", "a.part2.log", "b.log")]
    for path, events in zip(paths, [*split_log(rotated, 2, Random(5)), other], strict=True):
        assert isinstance(events[0], SessionStart)
        events[0].host.cpu = ""
        write(path, events)
    return [str(paths[1]), str(paths[2]), str(paths[0])]


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
