"""Forms: many events at once, and the trace is as if each had been written on its own."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from converters.exports.perfetto import Options
from converters.exports.perfetto.forms import Form, Forms
from converters.exports.perfetto.packets import Packets
from llamacpp_instr import schema as s
from llamacpp_instr.errors import LogError
from tests.exports.test_perfetto import Back, convert
from tests.kit.made_log import encode, make_log

int64 = st.integers(-(2**63), 2**63 - 1)
times = st.integers(0, 2**63 - 1)
rows = st.lists(st.tuples(times, int64, st.floats(allow_nan=False), st.text(max_size=3)))


def write(made: list[tuple[int, int, float, str]]) -> tuple[bytes, pb.Trace]:
    """Slices with a number, a double and a text; texts of other lengths are other shapes."""
    packets, written = Packets(), list[bytes]()

    def make(length: int) -> Form:
        form = Form(packets)
        text = form.text(length)
        t, number = form.numbers(2)
        args = {"number": number, "double": form.double(), "text": text, "same": 7}
        form.slice(5, "slice", "category", t, t, args)
        return form

    forms = Forms(written.append)
    for t, number, real, text in made:
        data = text.encode("utf-8", "replace")
        forms.add(make, (len(data),), data, t, number, real)
    forms.flush()
    data = b"".join(written)
    return data, pb.Trace.FromString(packets.take_interned() + data)


@given(rows)
@example([(2**63 - 1, -1, 0.5, "a"), (0, 2**56, -1e300, "ä"), (2**56 - 1, -(2**63), 0.0, "b")])
def test_shapes_alternate_and_every_value_stands_in_its_place(made) -> None:
    _, trace = write(made)
    found = []
    for packet in trace.packet:
        if packet.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            number, real, text, same = packet.track_event.debug_annotations
            assert same.int_value == 7
            assert packet.track_event.track_uuid == 5
            t = packet.timestamp
            found.append((t, number.int_value, real.double_value, text.string_value))
    assert found == [(*row[:3], row[3].encode("utf-8", "replace").decode()) for row in made]


@given(rows)
def test_how_many_wait_changes_no_byte(made) -> None:
    large = write(made)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("converters.exports.perfetto.forms.WAITING", 1)
        patch.setattr("converters.exports.perfetto.forms.FORMS", 1)
        assert write(made)[0] == large


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**80])
def test_a_number_without_room_is_an_overflow_and_nothing_is_written(value) -> None:
    with pytest.raises(OverflowError):
        write([(1, value, 0.0, "")])
    with pytest.raises(struct.error):
        struct.pack("<q", value)


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
    line = msgspec.json.decode(lines[at])
    text = msgspec.json.encode({**line, key: 0}).replace(
        b'"%s":0' % key.encode(), b'"%s":%d' % (key.encode(), 2**70)
    )
    lines[at] = text + b"\n"
    with pytest.raises(LogError, match=rf":{at + 1}: "):
        convert(tmp_path / "a.log", b"".join(lines), Options())
