"""The requests of a trace, read by Perfetto's trace_processor, are those of `instr requests`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llamacpp_instr.converters.exports.perfetto import Options, stream, write_perfetto
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import load_session
from tests.conftest import read_events as read_json
from tests.kit.made_log import encode
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.perfetto_queries import arg, args, slices
from tests.kit.perfetto_truth import truth
from tests.kit.served_log import served
from tests.kit.trace_processor import ask

pytestmark = pytest.mark.native

ARGS = (
    "context", "sequence", "mark", "prompt_tokens", "reused_tokens", "output_tokens",
    "to_first_token_ns", "queued_ns", "first_step", "last_step",
)  # fmt: skip


def _compared(log: Path, tmp_path: Path) -> tuple[list[Any], list[Any]]:
    """The requests that the trace of a log has, and those that the log has."""
    trace = tmp_path / "session.pftrace"
    with trace.open("wb") as file:
        write_perfetto(read_events(log), file, Options())
    drawn, nested, flows = ask(
        trace,
        slices(f"s.ts, s.dur, s.name, {args(*ARGS)}", "category = 'request'"),
        slices("s.name", "category = 'request' and s.depth <> 0"),
        f"select s.ts, {args('context', 'sequence')}, s.category, {arg('step', 'b')}, b.category"
        " from flow f join slice s on s.id = f.slice_out join slice b on b.id = f.slice_in",
    )
    assert nested == [], "requests that overlap have lanes"
    steps, requests = find_requests(load_session(log))
    of = steps["step"].tolist()
    # without an arrival it begins before its first step, so that its flows lead forward
    begin = {id(r): min(r.first, r.begin - 1) for r in requests}
    served = [
        [begin[id(r)], r.ctx, r.seq, "request", of[i], "step"] for r in requests for i in r.steps
    ]
    assert sorted(flows) == sorted(served), "a flow from each request to each of its steps"
    assert len(flows) == truth(read_json(log)).n_served
    wanted = [
        [
            begin[id(r)], r.end - begin[id(r)], r.name or "request", r.ctx, r.seq, r.name or None,
            r.prompt, r.reused, len(r.token_times), r.to_first_token, r.queued, of[r.steps[0]],
            of[r.steps[-1]],
        ]
        for r in requests
    ]  # fmt: skip
    return sorted(drawn, key=str), sorted(wanted, key=str)


def test_a_server_s_requests_are_drawn(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    command = [sys.executable, "-m", "tests.kit.batch_server", str(DEMO), str(log)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    drawn, wanted = _compared(log, tmp_path)
    assert drawn == wanted
    assert len(drawn) == 24
    assert {row[2] for row in drawn} == {f"client {i}" for i in range(8)}


def test_requests_with_and_without_marks_and_tokens_are_drawn(tmp_path: Path) -> None:
    log = tmp_path / "made.log"
    log.write_bytes(encode(served(Random(5))))
    drawn, wanted = _compared(log, tmp_path)
    assert drawn == wanted
    assert {row[3] for row in drawn} == {0, 1}
    assert {bool(row[5]) for row in drawn} == {True, False}
    assert len(drawn) > 50


def test_a_request_has_flows_to_its_first_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, trace = tmp_path / "made.log", tmp_path / "made.pftrace"
    log.write_bytes(encode(served(Random(5))))
    monkeypatch.setattr(stream, "REQUEST_FLOWS", 3)
    with trace.open("wb") as file:
        write_perfetto(read_events(log), file, Options())
    (flows,) = ask(
        trace,
        f"select {args('first_step', 'last_step')}, min({arg('step', 'b')}), count(), b.category"
        " from flow f join slice s on s.id = f.slice_out join slice b on b.id = f.slice_in"
        " group by s.id",
    )
    steps, requests = find_requests(load_session(log))
    of = steps["step"].tolist()
    assert sorted(flows) == sorted(
        [of[r.steps[0]], of[r.steps[-1]], of[r.steps[0]], min(len(r.steps), 3), "step"]
        for r in requests
    )
    assert any(len(r.steps) > 3 for r in requests)
