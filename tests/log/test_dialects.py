"""The earlier fork's two dialects come out as events of the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import (
    LATEST,
    Context,
    Event,
    Mark,
    Model,
    Note,
    SessionStart,
    StepBegin,
    StepEnd,
)

SAMPLES = Path(__file__).parent.parent / "fixtures" / "dialects"


def read(path: Path) -> list[Event]:
    return [event for _, event in read_events(path)]


def of_type(events: list[Event], kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


def test_flat_event_gives_a_step_with_its_duration():
    events = read(SAMPLES / "flat-event.log")
    (start,) = of_type(events, SessionStart)
    assert (start.id, start.time) == ("sess_bbfa46f5", "2025-08-19T04:32:43.685000Z")
    assert start.args["prompt"] == "Test prompt"
    (begin,), (end,) = of_type(events, StepBegin), of_type(events, StepEnd)
    assert end.t - begin.t == 10_000
    assert [note.data["step_name"] for note in of_type(events, Note)] == ["test_step"] * 2
    assert of_type(events, Note)[1].data["notes"] == "Test completed"


def test_flat_type_gives_layers_as_marks_inside_the_step():
    events = read(SAMPLES / "flat-type.log")
    assert of_type(events, Model)[0].arch == "llama"
    assert of_type(events, Model)[0].hparams == {"n_layer": 32, "n_embd": 4096}
    (begin,), (end,) = of_type(events, StepBegin), of_type(events, StepEnd)
    assert end.t - begin.t == 1_250_800_000
    layer_begin, layer_end = of_type(events, Mark)
    assert layer_begin.name == layer_end.name == "layer_0"
    assert layer_end.t - layer_begin.t == 15_200_000
    assert begin.t <= layer_begin.t < layer_end.t <= end.t


def test_the_key_that_stands_twice_keeps_both_meanings():
    (note,) = [
        event
        for event in read(SAMPLES / "flat-type.log")
        if isinstance(event, Note) and event.name == "tensor_log"
    ]
    assert note.data == {
        "tensor_name": "input_tokens",
        "shape": [1, 10],
        "tensor_type": "i32",
        "device": "CPU",
    }


START = '{"timestamp":"2024-01-15T10:30:00Z","type":"session_start","session_id":"a"}\n'


def line(kind: str, name: str, more: str = "", seconds: int = 0) -> str:
    stamp = f"2024-01-15T10:30:{seconds:02}Z"
    return f'{{"timestamp":"{stamp}","type":"{kind}","step_name":"{name}"{more}}}\n'


def test_steps_are_laid_end_to_end_and_pushed_apart_by_timestamps(tmp_path):
    path = tmp_path / "old.log"
    path.write_text(
        START
        + line("step_begin", "decode")
        + line("step_begin", "layer_0")
        + line("step_end", "layer_0", ',"duration_ms":2')
        + line("step_begin", "layer_1")
        + line("step_end", "layer_1", ',"duration_ms":3')
        + line("step_end", "decode", ',"duration_ms":4')
        + line("step_begin", "decode", seconds=1)
        + line("step_end", "decode", seconds=3)
    )
    events = read(path)
    ms = 1_000_000
    assert [m.t for m in of_type(events, Mark)] == [0, 2 * ms, 2 * ms, 5 * ms]
    # the inner steps took 5 ms: the outer one cannot have ended before them
    assert [s.t for s in of_type(events, StepEnd)] == [5 * ms, 3000 * ms]
    assert [s.t for s in of_type(events, StepBegin)] == [0, 1000 * ms]


def test_an_end_without_begin_still_is_a_step(tmp_path):
    path = tmp_path / "old.log"
    path.write_text(START + line("step_end", "decode", ',"duration_ms":4'))
    events = read(path)
    assert of_type(events, StepEnd)[0].t - of_type(events, StepBegin)[0].t == 4_000_000


def events_of(path: Path, *lines: str) -> list[Event]:
    path.write_text(START + "".join(lines))
    return read(path)


def test_what_the_dialect_does_not_tell_is_empty(tmp_path):
    """No number is invented."""
    start, model, context = events_of(tmp_path / "old.log")
    assert isinstance(start, SessionStart)
    assert (start.id, start.wall, start.level, start.t) == (
        "a", 1_705_314_600 * 10**9, "minimal", 0
    )  # fmt: skip
    assert start.args == {"dialect": "flat-type"}
    assert (start.host.cores, start.host.memory, start.process.pid, start.producer.abi) == (0,) * 4
    numbers = ["params", "bytes", "dur", "n_tensors", "model", "t"]
    assert [getattr(model, name) for name in numbers] == [0] * 6
    assert isinstance(context, Context)
    known = {name: getattr(context, name) for name in context.__struct_fields__}
    assert {name for name, value in known.items() if value not in (0, -1, "", [])} == {"causal"}


@pytest.mark.parametrize(
    ("name", "phase"),
    [("prefill", "prefill"), ("my prompt", "prefill"), ("decode", "decode"), ("step", "decode")],
)
def test_the_name_of_a_step_tells_its_phase(name, phase, tmp_path):
    (begin,) = of_type(events_of(tmp_path / "old.log", line("step_begin", name)), StepBegin)
    assert (begin.phase, begin.step, begin.n_tokens, begin.n_outputs, begin.n_seqs) == (
        phase, 0, 0, 0, 0
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "ns", "kept"),
    [
        (',"duration_ms":2.5', 2_500_000, {}),
        (',"execution_time_us":2.5', 2_500, {}),
        (',"metrics":{"execution_time_us":3}', 3_000, {}),
        (',"metrics":{"execution_time_us":3,"x":1},"y":2', 3_000, {"x": 1, "y": 2}),
        (',"metrics":7,"duration_ms":1', 1_000_000, {"metrics": 7}),
        (',"duration_ms":-5', 0, {}),
        (',"duration_ms":true', 2 * 10**9, {"duration_ms": True}),
        (',"duration_ms":"1"', 2 * 10**9, {"duration_ms": "1"}),
        (',"duration_ms":1e15', 2 * 10**9, {"duration_ms": 1e15}),
        (',"execution_time_us":1,"duration_ms":1', 1_000, {"duration_ms": 1}),
        ("", 2 * 10**9, {}),
    ],
)
def test_a_duration_is_a_number_of_one_of_two_units(more, ns, kept, tmp_path):
    """Otherwise the step ends at the time of its line, two seconds later; a note has the value."""
    lines = line("step_begin", "a"), line("step_end", "a", more, seconds=2)
    events = events_of(tmp_path / "old.log", *lines)
    (end,) = of_type(events, StepEnd)
    assert (end.t, end.step, end.status, end.n_ubatch) == (ns, 0, 0, 0)
    notes = [note.data for note in of_type(events, Note) if note.name == "step_end"]
    assert notes == [{"step_name": "a", **kept}] * bool(kept)


def test_steps_and_marks_are_numbered_each_on_their_own(tmp_path):
    one = [line("step_begin", "a"), line("step_begin", "b"), line("step_end", "b"),
           line("step_begin", "b"), line("step_end", "b"), line("step_end", "a")]  # fmt: skip
    events = events_of(tmp_path / "old.log", *one, *one)
    assert [of.step for of in of_type(events, StepBegin)] == [0, 1]
    assert [of.step for of in of_type(events, StepEnd)] == [0, 1]
    assert [(of.mark, of.phase) for of in of_type(events, Mark)] == [
        (mark, phase) for mark in range(4) for phase in ("begin", "end")
    ]


def test_the_end_of_an_outer_step_ends_those_inside(tmp_path):
    lines = line("step_begin", "a"), line("step_begin", "b"), line("step_end", "a", seconds=3)
    events = events_of(tmp_path / "old.log", *lines)
    (_, inner), (outer,) = of_type(events, Mark), of_type(events, StepEnd)
    assert (inner.name, inner.phase, inner.t, outer.t) == ("b", "end", 3 * 10**9, 3 * 10**9)


def test_a_log_is_closed_once_every_step_has_ended(tmp_path):
    path = tmp_path / "old.log"
    for lines, state in (([line("step_begin", "a")], "unclosed"),
                         ([line("step_begin", "a"), line("step_end", "a")], "closed")):  # fmt: skip
        path.write_text(START + "".join(lines))
        reader = read_events(path)
        list(reader)
        assert reader.end.state == state


def test_other_lines_and_lists_are_kept_as_notes(tmp_path):
    more = ',"of":[{"a":1,"a":2},[{"b":null}]],"type":"f16"'
    (note,) = of_type(events_of(tmp_path / "old.log", line("tensor", "x", more, seconds=1)), Note)
    assert (note.name, note.t) == ("tensor", 10**9)
    assert note.data == {"step_name": "x", "of": [{"a": 2}, [{"b": None}]], "tensor_type": "f16"}


@pytest.mark.parametrize(
    ("stamp", "t"),
    [
        ("2024-01-15T10:30:01Z", 10**9),
        ("2024-01-15 10:30:00.685", 685 * 10**6),
        ("2024-01-15T11:30:00.000001+01:00", 1_000),
        ("2024-01-16T10:30:00Z", 86_400 * 10**9),
        ("2023-01-15T10:30:00Z", 0),
    ],
)
def test_timestamps_are_utc_and_time_does_not_go_back(stamp, t, tmp_path):
    text = json.dumps({"type": "x", "timestamp": stamp}) + "\n"
    (note,) = of_type(events_of(tmp_path / "old.log", text), Note)
    assert note.t == t


def test_parameters_of_the_model_are_its_numbers(tmp_path):
    path = tmp_path / "old.log"
    given = {"a": 1, "b": 2.5, "c": True, "d": "4", "e": 1e15, "f": -999e12}
    start = {"type": "session_start", "timestamp": "2024-01-15T10:30:00Z", "model_arch": ["x"]}
    path.write_text(json.dumps(start | given) + "\n")
    (model,) = of_type(read(path), Model)
    assert model.hparams == {"a": 1, "b": 2.5, "f": -999e12}
    assert model.arch == ""


def test_a_line_may_have_a_mebibyte(tmp_path):
    path = tmp_path / "old.log"
    text = line("x", "").removesuffix("\n")
    for n, whole in ((1 << 20, True), ((1 << 20) + 1, False)):
        path.write_text(START + text + " " * (n - len(text)) + "\n")
        reader = read_events(path, lenient=True)
        assert len(of_type([event for _, event in reader], Note)) == whole
        assert reader.end.skipped == (not whole)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{}", "no key `type`"),
        ("[]", "not an object"),
        ("nonsense", "Expecting value"),
        ('{"type":"step_begin"}', "no timestamp"),
        ('{"type":"step_begin","timestamp":"yesterday"}', "Invalid isoformat string"),
    ],
)
def test_a_wrong_line_is_named(bad, why, tmp_path):
    path = tmp_path / "old.log"
    path.write_text(START + bad + "\n")
    with pytest.raises(LogError, match=f":2: flat-type: {why}"):
        read(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"timestamp": "0001-01-01T00:00:00Z"}, "a timestamp before 1970 or after 2116"),
        ({"timestamp": "9999-12-31T23:59:59Z"}, "a timestamp before 1970 or after 2116"),
    ],
)
def test_times_beyond_the_schemas_are_refused_at_their_line(line, reason, tmp_path):
    start = {"event": "session_start", "timestamp": "2025-01-01T00:00:00Z"}
    lines = [start, {"event": "other", **line}]
    path = tmp_path / "a.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LogError, match=f":2: flat-event: {reason}"):
        read(path)


def test_durations_end_where_the_schemas_times_do(tmp_path):
    stamp = {"timestamp": "2025-01-01T00:00:00Z"}
    lines = [{"event": "session_start", **stamp}]
    for _ in range(600):
        lines.append({"event": "step_begin", "step_name": "a", **stamp})
        lines.append({"event": "step_end", "step_name": "a", "duration_ms": 9.0e9, **stamp})
    path = tmp_path / "a.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LogError, match=r":\d+: flat-event: 146 years after the start of the log"):
        read(path)
    reader = read_events(path, lenient=True)
    times = [event.t for _, event in reader]
    assert times == sorted(times)
    assert times[-1] <= LATEST
    assert reader.end.skipped > 0
