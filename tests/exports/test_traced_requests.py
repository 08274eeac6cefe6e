"""The requests of a written trace are those of `instr requests`, with flows to their steps."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.converters.exports.perfetto import Options, stream, write_perfetto
from llamacpp_instr.converters.exports.traced import RequestLanes
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.requests import Request, find_requests
from llamacpp_instr.log.session import load_session
from tests.exports import test_chrome as chrome
from tests.exports.test_perfetto import Back
from tests.kit.made_log import encode
from tests.kit.served_log import served


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "made.log"
    path.write_bytes(encode(served(Random(5))))
    return path


def trace_of(log: Path) -> pb.Trace:
    output = io.BytesIO()
    write_perfetto(read_events(log), output, Options())
    return pb.Trace.FromString(output.getvalue())


def wanted(log: Path) -> list[tuple[object, ...]]:
    """Start, duration, name and arguments; without an arrival, it starts before its first step."""
    steps, requests = find_requests(load_session(log))
    of = steps["step"].tolist()
    rows = []
    for r in requests:
        args = {
            "context": r.ctx, "sequence": r.seq, "mark": r.name or None, "prompt_tokens": r.prompt,
            "reused_tokens": r.reused, "output_tokens": len(r.token_times),
            "to_first_token_ns": r.to_first_token, "queued_ns": r.queued,
            "first_step": of[r.steps[0]], "last_step": of[r.steps[-1]],
        }  # fmt: skip
        begin = min(r.first, r.begin - 1)
        shown = {name: value for name, value in args.items() if value is not None}
        rows.append((begin, r.end - begin, r.name or "request", shown))
    return sorted(rows, key=str)


def test_each_request_is_a_slice_of_perfetto_s(log: Path) -> None:
    back = Back(trace_of(log))
    drawn = [of for of in back.slices if of["category"] == "request"]
    rows = [(of["ts"], of["dur"], of["name"], of["args"]) for of in drawn]
    assert sorted(rows, key=str) == wanted(log)
    assert {of["track"] for of in drawn} == {"requests"}
    assert back.open == []


def test_each_request_is_a_slice_of_chrome_s_that_overlaps_none(log: Path) -> None:
    events = chrome.convert(log, log.read_bytes())
    drawn = [event for event in events if event.get("cat") == "request"]
    rows = [(of["ts"], of["dur"], of["name"], of["args"]) for of in drawn]
    assert sorted(rows, key=str) == wanted(log)
    assert chrome.nested(drawn) == 1


@pytest.mark.parametrize("most", [1, 3, stream.REQUEST_FLOWS])
def test_a_request_leads_to_its_first_steps(
    log: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "REQUEST_FLOWS", most)
    back = Back(trace_of(log))
    _, requests = find_requests(load_session(log))
    n = sum(min(len(r.steps), most) for r in requests)
    assert len(back.flows_out) == n
    assert back.flows_out == back.flows_in
    assert set(back.flows_out) == set(range(1, n + 1))


def test_a_request_leads_to_the_steps_of_a_whole_long_context() -> None:
    assert stream.REQUEST_FLOWS == 131_072


def request(begin: int, end: int, arrival: int = -1, ctx: int = 0, seq: int = 0) -> Request:
    return Request(ctx, seq, begin=begin, end=end, arrival=arrival, prompt=1)


def test_requests_of_a_sequence_share_a_lane_unless_they_overlap() -> None:
    lanes = RequestLanes()
    spans = [(100, 200), (201, 300), (200, 260), (302, 310), (301, 400), (401, 402)]
    assert [lanes.slice(request(*span)).lane for span in spans] == [0, 0, 1, 1, 0, 1]


def test_each_sequence_of_each_context_has_lanes_of_its_own() -> None:
    lanes = RequestLanes()
    of = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    begins = range(100, 600, 100)
    drawn = [
        lanes.slice(request(begin, begin + 10, ctx=ctx, seq=seq)).lane
        for begin, (ctx, seq) in zip(begins, of, strict=True)
    ]
    assert drawn == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("begin", "end", "arrival", "drawn"),
    [
        (100, 200, -1, (99, 200)),
        (100, 200, 100, (99, 200)),
        (100, 200, 40, (40, 200)),
        (0, 5, -1, (0, 5)),
        (100, 90, -1, (99, 99)),
    ],
)
def test_a_request_is_drawn_from_its_arrival_or_just_before_its_first_step(
    begin: int, end: int, arrival: int, drawn: tuple[int, int]
) -> None:
    made = RequestLanes().slice(request(begin, end, arrival))
    assert (made.begin, made.end) == drawn
    assert ("queued_ns" in made.args) == (arrival >= 0)
    assert "to_first_token_ns" not in made.args


def test_a_prompt_longer_than_a_number_of_a_trace_has_the_largest_one() -> None:
    made = request(1, 2)
    made.prompt = s.MOST + 1
    assert RequestLanes().slice(made).args["prompt_tokens"] == s.MOST


def test_lanes_of_the_oldest_sequences_are_forgotten() -> None:
    lanes = RequestLanes()
    for seq in range(s.CONTEXTS_KEPT):
        lanes.slice(request(10, 20, seq=seq))
    assert lanes.slice(request(30, 40, seq=0)).lane == 0
    lanes.slice(request(10, 20, seq=s.CONTEXTS_KEPT))
    assert lanes.slice(request(50, 60, seq=1)).lane == 1
    assert lanes.slice(request(50, 60, seq=0)).lane == s.CONTEXTS_KEPT + 1
