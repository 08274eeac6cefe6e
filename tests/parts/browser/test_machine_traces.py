"""Perfetto's trace_processor reads a process for each machine of a session."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.reader import read_events
from tests.exports.test_machine_traces import log, made, slices
from tests.kit.machines import HOSTS, Made
from tests.kit.trace_processor import ask, check

__all__ = ["log", "made"]  # fixtures


@pytest.mark.native
def test_perfetto_has_a_process_for_each_machine(made: Made, log: Path, tmp_path: Path) -> None:
    merged = '"arrive"' in log.read_text()
    trace = tmp_path / "a.pftrace"
    with trace.open("wb") as file:
        write_perfetto(read_events(log), file, Options())
    assert check(trace)[0]["problems"] == []
    process = (
        "(select p.name from process_track pt join process p using (upid)"
        " where pt.id in (t.id, t.parent_id, (select parent_id from track where id = t.parent_id)))"
    )
    commands, served, kernels, flows = ask(
        trace,
        "select t.name, s.name, s.ts, s.dur from slice s join track t on t.id = s.track_id"
        " where t.name glob 'commands to *' and s.category = 'command'",
        f"select {process}, s.name, s.ts, s.dur from slice s join track t on t.id = s.track_id"
        " where t.name = 'commands'",
        f"select {process}, count(*), t.name from slice s join track t on t.id = s.track_id"
        " where s.category = 'run' group by 1, 3 order by 1",
        # a viewer draws them from the end of a slice
        "select a.ts + a.dur, b.ts from flow f"
        " join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id"
        " where 'command' in (a.category, b.category)",
    )
    for wire, host in zip(made.wires, HOSTS, strict=True):
        mine = slices(wire.rows, "sent", "written", "answered")
        assert Counter(tuple(of[1:]) for of in commands if of[0].endswith(host)) == mine
        executed = slices(wire.rows, "started", "done") if merged else Counter()
        assert Counter(tuple(of[1:]) for of in served if of[0] == f"machine {host}") == executed
    runs = [[f"machine {host}", 12, f"RPC0[{host}]"] for host in HOSTS]
    assert kernels == (runs if merged else [])
    n = sum(1 + ("answered" in row) for row in made.rows)
    assert len(flows) == (n if merged else 0)
    assert all(begin <= end for begin, end in flows)
