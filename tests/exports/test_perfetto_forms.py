"""Forms, the phases of steps that they draw, and the graphs that a trace keeps."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.converters.exports.perfetto import Options
from llamacpp_instr.converters.exports.perfetto.packets import (
    BEGIN,
    Packets,
)
from llamacpp_instr.log import schema as s
from tests.exports.test_perfetto import Back, convert
from tests.kit.made_log import encode, make_log

int64 = st.integers(-(2**63), 2**63 - 1)
times = st.integers(0, 2**63 - 1)
rows = st.lists(st.tuples(times, int64, st.floats(allow_nan=False), st.text(max_size=3)))


@settings(max_examples=30)
@given(rows)
@example([(2**63 - 1, -1, 0.5, "a"), (0, 2**56, -1e300, "ä"), (2**56 - 1, -(2**63), 0.0, "")])
def test_events_of_one_shape_share_a_form_and_no_value(made) -> None:
    packets = Packets()
    data = b""
    for row in made:
        t, number, *others = row
        one = (5, f"slice {number % 2}", "category", ("number", "double", "text"), "flow_ids")
        data += packets.fill((one, 7), (t, t, range(t % 3), number, *others, t, number))
    assert len(packets._forms) <= 2
    trace = pb.Trace.FromString(packets.take_interned() + data)
    begins = [q for q in trace.packet if q.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN]
    for packet, (t, number, real, text) in zip(begins, made, strict=True):
        values = packet.track_event.debug_annotations
        assert packet.timestamp == t
        assert [getattr(v, v.WhichOneof("value")) for v in values] == [number, real, text]
        assert list(packet.track_event.flow_ids) == list(range(t % 3))
    samples = [q for q in trace.packet if q.track_event.type == pb.TrackEvent.TYPE_COUNTER]
    found = [(q.timestamp, q.track_event.track_uuid, q.track_event.counter_value) for q in samples]
    assert found == [(t, 7, number) for t, number, *_ in made]


def test_forms_that_were_filled_often_are_made_again(monkeypatch) -> None:
    """A protobuf message keeps the memory of all values that it ever had."""
    monkeypatch.setattr("llamacpp_instr.converters.exports.perfetto.packets.FILLS", 2)
    packets, kept = Packets(), list[int]()
    filled = []
    for t in range(5):
        filled.append(packets.fill((t // 4,), (t, 5)))
        kept.append(len(packets._forms))
    assert kept == [1, 0, 1, 0, 1]
    assert [pb.Trace.FromString(data).packet[0].timestamp for data in filled] == [*range(5)]


def test_a_limited_number_of_forms_is_kept(monkeypatch) -> None:
    monkeypatch.setattr("llamacpp_instr.converters.exports.perfetto.packets.FORMS", 2)
    packets, kept = Packets(), list[int]()
    for track in (1, 1, 2, 3, 3):
        packets.fill((track,), (5, 6))
        kept.append(len(packets._forms))
    assert kept == [1, 1, 2, 0, 1]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**80])
def test_a_number_without_room_is_an_overflow(value) -> None:
    with pytest.raises(OverflowError):
        Packets().fill(((5, "slice", "category", ("number",), ""),), (1, 1, value))
    with pytest.raises(OverflowError):
        Packets().event(BEGIN, 5, "slice", "category", {"number": value})


# --- steps ---


def phases(back: Back) -> list[tuple[Any, ...]]:
    return sorted((c["ts"], c["dur"], c["name"]) for c in back.slices if c["track"] == "phases")


def changed(change: Any) -> list[s.Event]:
    """A small log of which `change` makes every event into another, or None."""
    events = make_log(Random(4).randint, n_contexts=1, level="minimal")
    return [new for event in events if (new := change(event)) is not None]


def test_a_step_that_never_computed_has_its_phases(tmp_path) -> None:
    def change(event: s.Event) -> s.Event | None:
        if isinstance(event, s.Compute | s.Layers):
            return None
        if isinstance(event, s.StepEnd):
            return msgspec.structs.replace(event, prepare=3, readback=0, status=-2)
        return event

    events = changed(change)
    back = Back(convert(tmp_path / "a.log", encode(events))[0])
    begins = [event.t for event in events if isinstance(event, s.StepBegin)]
    assert phases(back) == [(t, 3, "prepare") for t in begins]
    found = [c["args"]["status"] for c in back.slices if c["category"] == "step"]
    assert set(found) == {-2}, "a negative number keeps its sign"


def test_phases_that_touch_do_not_nest(tmp_path) -> None:
    begins: dict[int, int] = {}

    def change(event: s.Event) -> s.Event:
        if isinstance(event, s.StepBegin):
            begins[event.step] = event.t
        if isinstance(event, s.Compute):
            at = begins[event.step]
            times = {"t": at + 10, "apply": 2, "build": 3, "alloc": 0, "inputs": 5, "start": 10}
            return msgspec.structs.replace(event, dur=4, **times)
        if isinstance(event, s.StepEnd):
            at = begins[event.step] + 30
            new = {"t": at, "prepare": 10, "readback": 6, "n_ubatch": 1}
            return msgspec.structs.replace(event, **new)
        return event

    back = Back(convert(tmp_path / "a.log", encode(changed(change)))[0])
    expected = (
        (0, 10, "prepare"), (10, 2, "apply"), (12, 3, "build"), (15, 5, "inputs"),
        (20, 4, "compute"), (24, 6, "readback"),
    )  # fmt: skip
    assert phases(back) == sorted(
        (t + a, dur, n) for t in begins.values() for a, dur, n in expected
    )


def test_a_readback_that_is_the_sum_over_ubatches_says_so(tmp_path) -> None:
    def change(event: s.Event) -> s.Event:
        if isinstance(event, s.StepEnd):
            return msgspec.structs.replace(event, n_ubatch=1 + event.step % 3, readback=1)
        return event

    events = changed(change)
    back = Back(convert(tmp_path / "a.log", encode(events))[0])
    ends = [event.n_ubatch for event in events if isinstance(event, s.StepEnd)]
    found = [c["args"].get("sum_of_ubatches", 1) for c in back.slices if c["name"] == "readback"]
    assert sorted(found) == sorted(ends)


def test_what_a_step_computed_is_drawn_though_the_step_never_ended(tmp_path) -> None:
    events = make_log(Random(4).randint, n_contexts=1, level="minimal")
    last = max(i for i, event in enumerate(events) if isinstance(event, s.Compute))
    back = Back(convert(tmp_path / "a.log", encode(events[: last + 1]))[0])
    n = sum(isinstance(event, s.Compute) for event in events)
    assert sum(name == "compute" for _, _, name in phases(back)) == n
    assert back.open == []


@pytest.mark.parametrize(
    ("kind", "key"),
    [(s.Compute, "n_tokens"), (s.Kv, "used"), (s.Token, "id"), (s.StepEnd, "status")],
)
def test_a_number_beyond_64_bits_is_named_with_its_line(tmp_path, kind, key) -> None:
    events = make_log(Random(4).randint, n_contexts=1, level="minimal")
    at = max(i for i, event in enumerate(events) if isinstance(event, kind))
    lines = encode(events).splitlines(keepends=True)
    lines[at] = json.dumps({**json.loads(lines[at]), key: 2**70}).encode() + b"\n"
    with pytest.raises(LogError, match=rf":{at + 1}: "):
        convert(tmp_path / "a.log", b"".join(lines), Options())
