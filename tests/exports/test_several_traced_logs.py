"""Several logs in one trace: each has tracks and flows of its own."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.reader import read_events
from tests.exports.test_perfetto import Back
from tests.exports.test_traced_steps import FACTS, T, begin, end, token
from tests.kit.made_log import encode, make_log

STEPS: list[s.Event] = [
    begin(0, 0, n_tokens=2, pos=0), end(100, 0), token(110, 0), begin(200, 1, pos=2), end(300, 1),
]  # fmt: skip


def logs(tmp_path: Path, later: int = 5000) -> list[Path]:
    """Two, of which the second began `later` ns after the first."""
    paths = [tmp_path / "one.log", tmp_path / "two.log"]
    start = FACTS[0]
    assert isinstance(start, s.SessionStart)
    for path, ns in zip(paths, (0, later), strict=True):
        path.write_bytes(encode([replace(start, wall=start.wall + ns), *FACTS[1:], *STEPS]))
    return paths


def perfetto(paths: list[Path], **options: Any) -> pb.Trace:
    output = io.BytesIO()
    first, *others = map(read_events, paths)
    left_out = write_perfetto(first, output, Options(flows=True, **options), others)
    data = output.getvalue()
    data = gzip.decompress(data) if options.get("gzip") else data
    assert left_out == 0
    return pb.Trace.FromString(data)


@pytest.mark.parametrize("compressed", [False, True])
def test_logs_of_a_perfetto_trace_share_no_track_and_no_flow(
    tmp_path: Path, compressed: bool
) -> None:
    one, two = logs(tmp_path)
    trace = perfetto([one, two], gzip=compressed)
    tracks = [p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")]
    assert [track.uuid for track in tracks] == list(range(1, len(tracks) + 1))
    names = [track.name for track in tracks]
    assert [name for name in names if name.startswith("session")] == [
        f"session, {one}", f"session, {two}",
    ]  # fmt: skip
    homes = [track.sibling_order_rank for track in tracks if track.name.startswith("session")]
    assert homes[0] == 0 < homes[1]
    assert f"sampler of context 0, {two}" in names
    flows = [f for p in trace.packet for f in p.track_event.flow_ids]
    into = [f for p in trace.packet for f in p.track_event.terminating_flow_ids]
    # of each log: from the token to the step that took it, from the request to both steps
    assert sorted(flows) == sorted(into) == [1, 2, 3, 4, 5, 6]


def test_one_log_alone_has_short_names(tmp_path: Path) -> None:
    trace = perfetto(logs(tmp_path)[:1])
    names = {p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}
    assert {"session", "sampler", "requests"} <= names


@pytest.mark.parametrize("swapped", [False, True])
def test_logs_of_a_chrome_trace_begin_where_their_clocks_say(tmp_path: Path, swapped: bool) -> None:
    paths = logs(tmp_path)
    output = io.BytesIO()
    first, other = map(read_events, paths[::-1] if swapped else paths)
    assert write_chrome(first, output, others=[other]) == 0
    whole = json.loads(output.getvalue())
    events = whole["traceEvents"]
    steps: dict[int, list[float]] = {}
    for of in events:
        if of.get("cat") == "step":
            steps.setdefault(of["pid"], []).append(of["ts"])
    at = (T - FACTS[0].t) / 1000
    expected = [[at, at + 0.2], [at + 5, at + 5.2]]
    assert list(steps.values()) == [
        pytest.approx(of) for of in (expected[::-1] if swapped else expected)
    ]
    names = {of["pid"]: of["args"]["name"] for of in events if of["name"] == "process_name"}
    ordered = paths[::-1] if swapped else paths
    assert [names[pid] for pid in steps] == [f"session, {path}" for path in ordered]
    tids = [of["tid"] for of in events if of["name"] == "thread_name"]
    assert tids == list(range(1, len(tids) + 1))


def test_a_chrome_trace_of_a_step_without_time_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(encode([*FACTS, begin(0, 0), end(0, 0, minflt=2, majflt=3)]))
    output = io.BytesIO()
    write_chrome(read_events(path), output)
    events = json.loads(output.getvalue())["traceEvents"]
    counters = [(of["name"], of["args"]["value"]) for of in events if of["ph"] == "C"]
    assert counters == [("page faults", 5), ("page faults", 0)]
    assert [of["dur"] for of in events if of.get("cat") == "step"] == [0]


@pytest.mark.parametrize("threads", [True, False])
def test_threads_have_tracks_if_they_are_wanted(tmp_path: Path, threads: bool) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(encode(make_log(lambda _, high: high, n_contexts=1, level="verbose")))
    output = io.BytesIO()
    write_chrome(read_events(path), output, Options(threads=threads))
    events = json.loads(output.getvalue())["traceEvents"]
    names = {of["args"]["name"] for of in events if of["name"] == "thread_name"}
    wanted = {f"thread {i}" for i in range(3)} if threads else set()
    assert {name for name in names if name.startswith("thread ")} == wanted
    output = io.BytesIO()
    write_perfetto(read_events(path), output, Options(threads=threads))
    tracks = Back(pb.Trace.FromString(output.getvalue())).tracks.values()
    assert {name for name in tracks if name.startswith("thread ")} == wanted
