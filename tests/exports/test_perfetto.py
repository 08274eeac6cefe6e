"""The writer of traces: its bytes are Perfetto's, and any log gives the numbers that it holds."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.base.errors import LogError, UsageError
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.converters.exports.perfetto import packets as p
from llamacpp_instr.converters.exports.perfetto.kernels import ComputeTemplate, padded_words
from llamacpp_instr.converters.exports.traced import Span
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.timeline import OpSlice, Selection
from llamacpp_instr.log.reader import read_events
from tests.kit.made_log import encode, make_log
from tests.kit.perfetto_truth import truth
from tests.kit.strategies import logs, unclosed_logs

DIALECTS = Path(__file__).parent.parent / "fixtures" / "dialects"
FLOWS = Options(flows=True)


def convert(path: Path, data: bytes, options: Options = FLOWS) -> tuple[pb.Trace, int]:
    """The trace of a log, read with the perfetto package's own classes."""
    path.write_bytes(data)
    output = io.BytesIO()
    left_out = write_perfetto(read_events(path, options.lenient), output, options)
    return pb.Trace.FromString(output.getvalue()), left_out


class Back:
    """What a trace says: slices by track, counters, and flows."""

    def __init__(self, trace: pb.Trace) -> None:
        names: dict[str, dict[int, str]] = {}
        self.tracks: dict[int, str] = {}
        self.slices: list[dict[str, Any]] = []
        self.counters: list[tuple[str, int, float]] = []
        self.flows_out: Counter[int] = Counter()
        self.flows_in: Counter[int] = Counter()
        events = []
        for packet in trace.packet:
            for field, entries in packet.interned_data.ListFields():
                for entry in entries:
                    text = entry.str if field.name == "debug_annotation_string_values" else ""
                    text = text or getattr(entry, "name", "") or entry.str
                    text = text.decode() if isinstance(text, bytes) else text
                    names.setdefault(field.name, {})[entry.iid] = text
            if packet.HasField("track_descriptor"):
                described = packet.track_descriptor
                self.tracks[described.uuid] = described.name.partition(" of context ")[0]
            if packet.HasField("track_event"):
                events.append((packet.timestamp, packet.track_event))
        stacks: dict[int, list[dict[str, Any]]] = {}
        # stable, as in trace_processor: equal times keep the order of the file
        for t, event in sorted(events, key=lambda pair: pair[0]):
            track = self.tracks[event.track_uuid]
            self.flows_out.update(event.flow_ids)
            self.flows_in.update(event.terminating_flow_ids)
            if event.type == pb.TrackEvent.TYPE_COUNTER:
                value = event.double_counter_value or event.counter_value
                self.counters.append((track, t, value))
            elif event.type == pb.TrackEvent.TYPE_SLICE_END:
                opened = stacks[event.track_uuid].pop()
                opened["dur"] = t - opened["ts"]
            else:
                args = {}
                for arg in event.debug_annotations:
                    kind = arg.WhichOneof("value")
                    value = getattr(arg, kind)
                    if kind == "string_value_iid":
                        value = names["debug_annotation_string_values"][value]
                    args[names["debug_annotation_names"][arg.name_iid]] = value
                name = event.name or names["event_names"][event.name_iid]
                (category,) = (names["event_categories"][iid] for iid in event.category_iids)
                made = {"ts": t, "dur": 0, "name": name, "category": category, "track": track}
                made["args"] = args
                if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
                    stacks.setdefault(event.track_uuid, []).append(made)
                self.slices.append(made)
        self.open = [opened for stack in stacks.values() for opened in stack]

    def rows(self, track: str, *args: str, but: tuple[str, ...] = ()) -> list[tuple[Any, ...]]:
        found = [
            (c["ts"], c["dur"], c["name"], *(c["args"].get(arg) for arg in args))
            for c in self.slices
            if c["track"] == track and c["category"] not in but
        ]
        return sorted(found, key=lambda row: tuple(map(str, row)))


# --- bytes ---


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**63 - 1), min_size=1))
@example([0, 2**56 - 1, 2**56, 2**63 - 1])
def test_a_padded_varint_is_the_number(values: list[int]) -> None:
    words = padded_words(np.array(values))
    for value, word in zip(values, words.tolist(), strict=True):
        data = b"\x40" + word.to_bytes(8, "little") + bytes([value >> 56])
        assert pb.TracePacket.FromString(data).timestamp == value


def test_packets_parse_to_what_was_written() -> None:
    packets = p.Packets()
    args = {"text": "ä", "whole": -5, "real": 0.25, "truth": True, "big": 2**60}
    event = packets.event(p.BEGIN, 300, "MUL_MAT", "attention", args, colour="attention")
    packets.add_args(event, {"kept": "once"}, keep=True)
    data = packets.take_interned() + p.event_packet(2**40, event)
    assert packets.take_interned() == b""
    data += p.sample(5, 9, -3) + p.event_packet(6, p.closing(300))
    data += p.track(300, "layers", parent=1, rank=4, note="why", unit="bytes")
    interned, begin, sample, end, track = pb.Trace.FromString(data).packet
    assert interned.interned_data.event_names[0].name == "MUL_MAT"
    assert interned.interned_data.correlation_id_str[0].str == b"attention"
    event = begin.track_event
    assert (begin.timestamp, event.type, event.track_uuid) == (2**40, 1, 300)
    values = [getattr(a, a.WhichOneof("value")) for a in event.debug_annotations]
    assert values == [*args.values(), 1]
    assert sample.track_event.counter_value == -3
    assert (end.timestamp, end.track_event.type, end.track_event.track_uuid) == (6, 2, 300)
    described = track.track_descriptor
    assert (described.uuid, described.parent_uuid, described.name) == (300, 1, "layers")
    assert (described.sibling_order_rank, described.description) == (4, "why")
    assert described.counter.unit == pb.CounterDescriptor.UNIT_SIZE_BYTES


def test_the_clock_is_monotonic_and_tied_to_the_wall() -> None:
    snapshot, defaults = pb.Trace.FromString(p.first_packets(5, 7)).packet
    assert [(c.clock_id, c.timestamp) for c in snapshot.clock_snapshot.clocks] == [(3, 5), (1, 7)]
    assert snapshot.clock_snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_MONOTONIC
    assert defaults.trace_packet_defaults.timestamp_clock_id == pb.BUILTIN_CLOCK_MONOTONIC


def test_a_template_has_each_value_in_its_place() -> None:
    """Also beside args that equal what marks the places, and for times that need all bytes."""
    args = {"number": 2**63 - 1, "real": -sys.float_info.max, "text": "ä"}
    op = OpSlice("ADD", "other", 0, args, flops=8, bytes=4)
    numbers = {"wait_ns": 0}, {"GB/s": 1, "GFLOP/s": 2}
    span = Span(0, 1, op.title, op.block, args, op, *numbers)
    filled = ComputeTemplate(p.Packets(), 5, 1, [span], edges=[(-1, 0), (0, -1), (-1, 0)])
    t = np.array([[2**57], [3]])
    amounts = np.array([[0, 4, 8], [2**62, 4, 8]])
    data = filled.fill(t, t + 2, t[:, 0], amounts, 10).tobytes()
    begin, end, later, _ = pb.Trace.FromString(data).packet
    assert (begin.timestamp, end.timestamp, later.timestamp) == (2**57, 2**57 + 2, 3)
    for event, wait, flow in ((begin.track_event, 0, 10), (later.track_event, 2**62, 13)):
        found = [getattr(a, a.WhichOneof("value")) for a in event.debug_annotations]
        assert found == [2**63 - 1, -sys.float_info.max, 1, wait, 2, 4]
        assert list(event.flow_ids) == [flow + 1]
        assert list(event.terminating_flow_ids) == [flow, flow + 2]


# --- any log ---


@given(events=logs())
@settings(max_examples=20)
def test_any_log_reads_back_to_the_same_numbers(events, tmp_path_factory) -> None:
    trace, left_out = convert(tmp_path_factory.mktemp("log") / "a.log", encode(events))
    assert left_out == 0
    back = Back(trace)
    expected = truth([msgspec.to_builtins(event) for event in events])
    assert back.open == []
    roots = [name for name in back.tracks.values() if name == "session" or "context" in name]
    steps = [row for name in set(roots) for row in back.rows(name, "step", "tokens", "status")]
    names = ("prefill", "decode", "encode")
    key = lambda row: tuple(map(str, row))  # noqa: E731
    assert sorted((r for r in steps if r[2] in names), key=key) == expected.rows["steps"]
    layers = [r for r in back.rows("layers") if r[2].startswith(("layer ", "no layer"))]
    assert layers == expected.rows["layers"]
    ops = [
        (t, dur, name.partition(" ")[0], tensor)
        for t, dur, name, tensor in back.rows("layers", "tensor", but=("layer", "block"))
    ]
    assert sorted(ops, key=key) == [row[:4] for row in expected.rows["ops"]]
    threads = {name for name in back.tracks.values() if name.startswith("thread ")}
    found = [
        (int(name[7:]), t, dur, op.partition(" ")[0], wait)
        for name in threads
        for t, dur, op, wait in back.rows(name, "wait_ns", but=("wait",))
    ]
    assert sorted(found, key=key) == expected.rows["threads"]
    cells = sorted((t, v) for name, t, v in back.counters if name.startswith("KV cells"))
    assert cells == sorted(expected.rows["kv"])
    samples = [(r[0], r[1], *r[3:]) for r in back.rows("sampler", "text", "id", "p")]
    assert sorted(samples, key=key) == expected.rows["tokens"]
    n_flows = expected.n_edges + expected.n_taken + expected.n_served
    assert len(back.flows_out) == n_flows, "each with a beginning"
    assert back.flows_out == back.flows_in, "and an end"
    assert set(back.flows_out.values()) <= {1}


@given(events=unclosed_logs())
@settings(max_examples=15)
def test_a_log_that_stopped_anywhere_converts(events, tmp_path_factory) -> None:
    back = Back(convert(tmp_path_factory.mktemp("log") / "a.log", encode(events))[0])
    assert back.open == [], "what had not ended is ended with the log"
    n = sum(isinstance(event, s.StepBegin) for event in events)
    assert sum(slice["category"] == "step" for slice in back.slices) == n


@given(events=logs(), data=st.data())
@settings(max_examples=20)
def test_a_damaged_line_is_named_or_left_out(events, data, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("log") / "a.log"
    lines = encode(events).splitlines(keepends=True)
    at = data.draw(st.integers(1, len(lines) - 1))
    lines[at] = b"{" + lines[at]
    with pytest.raises(LogError, match=f":{at + 1}: "):
        convert(path, b"".join(lines))
    path.write_bytes(b"".join(lines))
    reader = read_events(path, lenient=True)
    left_out = write_perfetto(reader, io.BytesIO(), Options(lenient=True))
    assert reader.end is not None
    assert reader.end.skipped == 1
    assert left_out <= len(lines) - 2


LONG = {"layer": [0, 1] * 300, "dur": [s.MOST] * 600}


@pytest.mark.parametrize("change", [{"t": -5}, {"dur": [-1]}, {"dur": [2**70]}, LONG])
def test_impossible_times_are_wrong_input(change, tmp_path) -> None:
    events = make_log(Random(3).randint, n_contexts=1, level="minimal")
    layers = next(i for i, event in enumerate(events) if isinstance(event, s.Layers))
    lines = encode(events).splitlines(keepends=True)
    wrong = {"event": "layers", "t": events[0].t, "compute": 0, "layer": [0], "dur": [1], **change}
    lines[layers] = json.dumps(wrong).encode() + b"\n"
    with pytest.raises(LogError, match=rf":{layers + 1}: layers: "):
        convert(tmp_path / "a.log", b"".join(lines))


def test_large_batches_are_the_same_as_small_ones(tmp_path, monkeypatch) -> None:
    events = make_log(Random(8).randint, n_contexts=2, level="verbose")
    large = Back(convert(tmp_path / "a.log", encode(events), Options())[0])
    monkeypatch.setattr("llamacpp_instr.converters.exports.perfetto.kernels.BATCH", 1)
    small = Back(convert(tmp_path / "a.log", encode(events), Options())[0])
    for track in {"layers", *(n for n in large.tracks.values() if n.startswith("thread "))}:
        assert large.rows(track, "tensor") == small.rows(track, "tensor")


# --- selections ---


def selected(tmp_path: Path, level: s.Level = "detailed", **chosen: Any) -> Back:
    events = make_log(Random(4).randint, n_contexts=1, level=level)
    return Back(convert(tmp_path / "a.log", encode(events), Options(Selection(**chosen)))[0])


def test_steps_are_chosen_with_both_ends(tmp_path) -> None:
    back = selected(tmp_path, steps=(1, 2))
    steps = [c["args"]["step"] for c in back.slices if c["category"] == "step"]
    assert sorted(steps) == [1, 2]
    within = [c for c in back.slices if c["track"] == "layers"]
    begin = min(c["ts"] for c in back.slices if c["category"] == "step")
    assert within
    assert all(c["ts"] >= begin for c in back.slices)


@pytest.mark.parametrize("level", ["minimal", "detailed"])
def test_one_layer_alone(tmp_path, level) -> None:
    back = selected(tmp_path, level=level, layers=(0, 0))
    drawn = [c for c in back.slices if c["track"] == "layers"]
    assert {c["args"]["layer"] for c in drawn} == {0}
    if level == "detailed":
        assert {c["name"] for c in drawn if c["category"] == "block"} >= {"attention", "norm"}


def test_ops_are_chosen_by_name_even_when_fused(tmp_path) -> None:
    back = selected(tmp_path, ops={"RMS_NORM"})
    drawn = [c for c in back.slices if c["track"] == "layers" and "tensor" in c["args"]]
    assert drawn
    assert all("RMS_NORM" in c["args"]["op"].split("+") for c in drawn)


@pytest.mark.parametrize(
    ("chosen", "level", "words"),
    [
        ({"steps": (90, 99)}, "detailed", "no step was selected; the log has steps 0 to"),
        ({"layers": (90, 99)}, "detailed", "nothing was selected; the log has layers 0 to"),
        ({"layers": (90, 99)}, "minimal", "nothing was selected; the log has layers 0 to"),
        ({"ops": {"NO_OP"}}, "detailed", "ADD, FLASH_ATTN_EXT"),
        ({"ops": {"MUL_MAT"}}, "minimal", "no ops to select: recorded at level minimal"),
    ],
)
def test_a_selection_that_matches_nothing_says_what_there_is(
    tmp_path, chosen, level, words
) -> None:
    with pytest.raises(UsageError, match=words):
        selected(tmp_path, level=level, **chosen)


@pytest.mark.parametrize("level", ["minimal", "detailed"])
@pytest.mark.parametrize(("n_layers", "has"), [(1, "layers 0 to 0"), (3, "layers 0 to 2")])
def test_a_choice_of_no_layer_says_the_first_and_the_last(tmp_path, level, n_layers, has) -> None:
    made = make_log(lambda _, high: high, n_contexts=1, level=level, n_layers=n_layers)
    with pytest.raises(UsageError, match=f"nothing was selected; the log has {has}$"):
        convert(tmp_path / "a.log", encode(made), Options(Selection(layers=(7, 9))))


def test_a_log_of_which_nothing_is_in_a_layer_has_no_layers(tmp_path) -> None:
    made = make_log(lambda _, high: high, n_contexts=1, level="minimal")
    for event in made:
        if isinstance(event, s.Layers):
            event.layer = [-1] * len(event.layer)
    with pytest.raises(UsageError, match=r"nothing was selected; the log has no layers$"):
        convert(tmp_path / "a.log", encode(made), Options(Selection(layers=(0, 9))))


def test_a_choice_of_no_op_names_each_op_once_with_those_of_fused_kernels(tmp_path) -> None:
    made = (Path(__file__).parent.parent / "fixtures" / "every-event.log").read_bytes()
    message = "the log has layers 0 to 0 and the ops GET_ROWS, MUL, MUL_MAT, RMS_NORM$"
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / "a.log", made, Options(Selection(ops={"NO_OP"})))


@pytest.mark.parametrize("kept", [1, 2])
def test_templates_that_were_dropped_are_made_again(tmp_path, monkeypatch, kept) -> None:
    events = make_log(Random(8).randint, n_contexts=3, level="verbose")
    whole = Back(convert(tmp_path / "a.log", encode(events))[0])
    monkeypatch.setattr("llamacpp_instr.converters.exports.perfetto.kernels.TEMPLATES", kept)
    few = Back(convert(tmp_path / "a.log", encode(events))[0])
    for track in {"layers", *(n for n in whole.tracks.values() if n.startswith("thread "))}:
        assert few.rows(track, "tensor") == whole.rows(track, "tensor")
    assert sorted(few.flows_out.values()) == sorted(whole.flows_out.values())


@pytest.mark.parametrize("log", sorted(DIALECTS.glob("*.log")), ids=lambda log: log.stem)
def test_an_earlier_forks_log_converts(log, tmp_path) -> None:
    back = Back(convert(tmp_path / "a.log", log.read_bytes())[0])
    events = [event for _, event in read_events(log)]
    assert sum(c["category"] == "step" for c in back.slices) == sum(
        isinstance(event, s.StepBegin) for event in events
    )
    marks = sum(isinstance(e, s.Mark) and e.phase == "begin" for e in events)
    assert sum(c["category"] == "mark" for c in back.slices) == marks
