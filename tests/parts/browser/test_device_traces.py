"""Perfetto's trace_processor reads every kernel of a device, and its submission."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.reader import read_events
from tests.exports.test_device_traces import device_spans, logs, n_runs, overlapping
from tests.kit.trace_processor import ask

__all__ = ["overlapping"]  # fixtures


@pytest.mark.native
def test_perfetto_has_every_kernel_of_a_device_and_its_submission(
    tmp_path: Path, overlapping: Path
) -> None:
    for i, log in enumerate(logs(overlapping)):
        trace = tmp_path / f"{i}.pftrace"
        with trace.open("wb") as file:
            write_perfetto(read_events(log), file, Options())
        inside = (
            "from slice s join slice b on s.parent_id = b.id join slice l on b.parent_id = l.id"
            " join slice r on l.parent_id = r.id join track t on s.track_id = t.id"
            " where r.category = 'run' and s.ts >= r.ts and s.ts + s.dur <= r.ts + r.dur"
        )
        kernels, runs, flows, submissions, wrong, rates = ask(
            trace,
            f"select s.ts, s.dur {inside}",
            "select count(*), count(distinct t.name) from slice s join track t"
            " on s.track_id = t.id where s.category = 'run'",
            "select count(*) from flow f join slice a on f.slice_out = a.id"
            " join slice b on f.slice_in = b.id where b.category = 'run'"
            " and a.name = 'submit to ' || (select name from track where id = b.track_id)"
            " and a.category = 'split'",
            "select count(*) from slice where category = 'split' and name glob 'submit to *'",
            "select name, value from stats where severity = 'error' and value > 0",
            f"select count(*) {inside} and extract_arg(s.arg_set_id, 'debug.GB/s') > 0",
        )
        assert Counter(map(tuple, kernels)) == device_spans(log)
        assert runs[0][0] == n_runs(log)
        assert flows[0][0] <= submissions[0][0]
        assert wrong == []
        if log is not overlapping:
            assert runs == [[n_runs(log), 1]]
            assert flows == submissions == [[n_runs(log)]]
            assert 0 < rates[0][0] <= len(kernels)
