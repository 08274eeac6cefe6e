"""Perfetto's trace_processor reads from a Chrome JSON trace what the log holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.log.reader import read_events as read_log
from tests.conftest import read_events
from tests.exports.test_chrome import log
from tests.kit.perfetto_queries import NAME
from tests.kit.perfetto_truth import truth
from tests.kit.trace_processor import ask, check

__all__ = ["log"]  # fixtures


@pytest.mark.native
def test_trace_processor_reads_what_is_in_the_log(log: Path, tmp_path: Path) -> None:
    trace = tmp_path / "session.json"
    with trace.open("wb") as file:
        write_chrome(read_log(log), file)
    (report,) = check(trace)
    assert report["problems"] == []
    start = read_events(log, "session_start")[0]["t"]
    wanted = truth(read_events(log))
    ops, steps, layers = ask(
        trace,
        f"select s.ts, s.dur, {NAME}, extract_arg(s.arg_set_id, 'args.tensor') from slice s"
        " join thread_track t on t.id = s.track_id join thread using (utid)"
        " where thread.name = 'layers' and category not in ('layer', 'block')",
        "select ts, dur, name from slice where category = 'step'",
        "select ts, dur, name from slice where category = 'layer'",
    )
    assert Counter(map(tuple, ops)) == Counter(
        (begin - start, *rest) for begin, *rest, _ in wanted.rows["ops"]
    )
    assert Counter(map(tuple, steps)) == Counter(
        (begin - start, dur, name) for begin, dur, name, *_ in wanted.rows["steps"]
    )
    assert Counter(map(tuple, layers)) == Counter(
        (begin - start, *rest) for begin, *rest in wanted.rows["layers"]
    )
