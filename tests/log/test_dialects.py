"""The earlier fork's two dialects come out as events of the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamacpp_instr.errors import LogError
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.schema import LATEST, Event, Mark, Model, Note, SessionStart, StepBegin, StepEnd

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
    with pytest.raises(LogError, match=r":\d+: flat-event: 146 years after the log's begin"):
        read(path)
    reader = read_events(path, lenient=True)
    times = [event.t for _, event in reader]
    assert times == sorted(times)
    assert times[-1] <= LATEST
    assert reader.end.skipped > 0
