"""Chrome JSON: any log gives valid events that nest, with the numbers that the log holds."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamacpp_instr.base.errors import LogError, UsageError
from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.traced import Options
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.timeline import Lanes, Selection
from llamacpp_instr.log.reader import read_events as read_log
from tests.conftest import Instr, read_events
from tests.kit.made_log import encode, make_log
from tests.kit.perfetto_truth import Truth, truth
from tests.kit.strategies import logs, unclosed_logs

Record = dict[str, Any]


def convert(path: Path, data: bytes, **options: Any) -> list[Record]:
    """The events of a log's trace; times are exact, in ns of the log's clock."""
    path.write_bytes(data)
    output = io.BytesIO()
    write_chrome(read_log(path), output, Options(**options))
    whole = json.loads(output.getvalue(), parse_float=Decimal)
    for event in whole["traceEvents"]:
        for key in ("ts", "dur"):
            if key in event:
                ns = event[key] * 1000
                assert ns == int(ns), "nanoseconds are whole"
                event[key] = int(ns)
        if "ts" in event:
            event["ts"] += whole["otherData"]["t0_monotonic_ns"]
    return list(whole["traceEvents"])


def nested(events: list[Record]) -> int:
    """How deeply slices nest; an overlap is a failure."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    deepest = 0
    for slices in tracks.values():
        open_until: list[int] = []
        # stable, as in readers: equal times keep the order of the file
        for slice_ in sorted(slices, key=lambda event: event["ts"]):
            begin, end = slice_["ts"], slice_["ts"] + slice_["dur"]
            while open_until and open_until[-1] <= begin and (end > begin or open_until[-1] < end):
                open_until.pop()
            assert not open_until or end <= open_until[-1], slice_
            open_until.append(end)
            deepest = max(deepest, len(open_until))
    return deepest


def track_names(events: list[Record]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def assert_says(events: list[Record], wanted: Truth) -> None:
    """The events hold what the log holds, row by row."""
    names = track_names(events)
    slices = [event for event in events if event["ph"] == "X"]

    def rows(track: str, *not_of: str) -> Counter[Any]:
        return Counter(
            (e["ts"], e["dur"], e["name"].partition(" ")[0])
            for e in slices
            if names[e["tid"]] == track and e["cat"] not in not_of
        )

    assert rows("layers", "layer", "block") == Counter(row[:3] for row in wanted.rows["ops"])
    steps = Counter((e["ts"], e["dur"], e["name"]) for e in slices if e["cat"] == "step")
    assert steps == Counter(row[:3] for row in wanted.rows["steps"])
    threads = [e for e in slices if names[e["tid"]].startswith("thread ")]
    ran = Counter(
        (names[e["tid"]], e["ts"], e["dur"], e["name"].partition(" ")[0], e["args"]["wait_ns"])
        for e in threads
        if e["cat"] != "wait"
    )
    assert ran == Counter((f"thread {row[0]}", *row[1:]) for row in wanted.rows["threads"])
    waited = Counter[str]()
    for e in threads:
        waited[names[e["tid"]]] += e["dur"] * (e["cat"] == "wait")
    assert +waited == +Counter({f"thread {of}": gap for of, gap in wanted.gaps.items()})
    for key, cat in (("phases", "phase"), ("texts", "token")):
        found = Counter((e["ts"], e["dur"], e["name"]) for e in slices if e["cat"] == cat)
        assert found == Counter(wanted.rows[key])
    synced = Counter((e["ts"], e["dur"]) for e in slices if e["name"] == "synchronize")
    assert synced == Counter(wanted.rows["syncs"])
    sampled = Counter(
        (e["ts"], e["dur"], e["args"]["text"]) for e in slices if e["cat"] == "sampler"
    )
    assert sampled == Counter(row[:3] for row in wanted.rows["tokens"])
    used = sorted((e["ts"], e["args"]["value"]) for e in events if e["name"] == "KV cells")
    assert used == sorted(wanted.rows["kv"])


@given(events=logs())
@settings(max_examples=20)
def test_any_log_gives_its_own_numbers(
    events: list[s.Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = encode(events)
    found = convert(tmp_path_factory.getbasetemp() / "any.log", data)
    assert_says(found, truth([json.loads(line) for line in data.splitlines()]))
    nested([e for e in found if e.get("cat") not in ("step", "token", "model")])
    assert all(event.get("tid") != 0 and event["pid"] > 0 for event in found)
    of_tracks = {event["tid"]: event["pid"] for event in found if event["name"] == "thread_name"}
    assert all(event["pid"] == of_tracks[event["tid"]] for event in found if "tid" in event)


@given(events=logs())
@settings(max_examples=20)
def test_a_context_of_any_log_serves_one_request(
    events: list[s.Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All of its steps: the prompt, and one token after the other."""
    found = convert(tmp_path_factory.getbasetemp() / "any.log", encode(events))
    wanted = []
    for ctx in {event.ctx for event in events if isinstance(event, s.StepBegin)}:
        steps = [e for e in events if isinstance(e, s.StepBegin) and e.ctx == ctx]
        tokens = [e for e in events if isinstance(e, s.Token) and e.ctx == ctx]
        begin, ends = steps[0].t - 1, [of.t + of.dur for of in tokens]
        args = {
            "context": ctx, "sequence": 0, "prompt_tokens": steps[0].n_tokens,
            "reused_tokens": 0, "output_tokens": len(tokens), "first_step": steps[0].step,
            "to_first_token_ns": ends[0] - steps[0].t, "last_step": steps[-1].step,
        }  # fmt: skip
        wanted.append((begin, ends[-1] - begin, "request", args))
    drawn = [(e["ts"], e["dur"], e["name"], e["args"]) for e in found if e.get("cat") == "request"]
    assert sorted(drawn, key=str) == sorted(wanted, key=str)


@given(events=logs())
@settings(max_examples=10)
def test_computes_and_sums_of_ubatches_say_what_they_are(
    events: list[s.Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = convert(tmp_path_factory.getbasetemp() / "any.log", encode(events))
    names = ("compute", "graph", "source", "n_tokens", "n_threads", "status", "reused")
    of_phase = [event for event in found if event.get("cat") == "phase"]
    drawn = [event["args"] for event in of_phase if event["name"] == "compute"]
    key = lambda args: args["compute"]  # noqa: E731
    assert sorted(drawn, key=key) == [
        {name: getattr(event, name) for name in names}
        for event in sorted(
            (e for e in events if isinstance(e, s.Compute)), key=lambda e: e.compute
        )
    ]
    sums = Counter(str(event["args"]) for event in of_phase if event["name"] == "readback")
    assert sums == Counter(
        str({"sum_of_ubatches": event.n_ubatch} if event.n_ubatch > 1 else {})
        for event in events
        if isinstance(event, s.StepEnd) and event.readback
    )


def test_each_cache_of_a_context_has_a_counter(tmp_path: Path) -> None:
    """Models with a sliding window have two, with cells of their own."""
    made = make_log(Random(2).randint, n_contexts=1)
    first = [event for event in made if isinstance(event, s.Kv)]
    events: list[s.Event] = []
    for event in made:
        events += [event, replace(event, cache=1, used=9)] if event in first else [event]
    found = convert(tmp_path / "two.log", encode(events))
    for name, used in (("KV cells", [of.used for of in first]), ("KV cells of cache 1", None)):
        values = [e["args"]["value"] for e in found if e["name"] == name]
        assert values == (used or [9] * len(first))


@given(events=unclosed_logs())
@settings(max_examples=10)
def test_a_log_that_ended_unclosed_converts(
    events: list[s.Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = convert(tmp_path_factory.getbasetemp() / "unclosed.log", encode(events))
    begun = sum(isinstance(event, s.StepBegin) for event in events)
    assert sum(event.get("cat") == "step" for event in found) == begun


@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=12)
def test_a_log_that_lacks_an_event_is_one_line_or_leaves_events_out(
    seed: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = make_log(Random(seed).randint, n_contexts=1, level="detailed")
    missing = [i for i, e in enumerate(events) if isinstance(e, (s.Graph, s.Plan, s.Compute))]
    assume(missing)
    del events[data.draw(st.sampled_from(missing))]
    path = tmp_path_factory.getbasetemp() / "lacking.log"
    with pytest.raises(LogError, match=r":\d+: .* was never given"):
        convert(path, encode(events))
    assert write_chrome(read_log(path), io.BytesIO(), Options(lenient=True)) > 0


@pytest.fixture(scope="module", params=s.LEVELS)
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chrome") / "session.log"
    subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "run", "demo", "--prompt", "Once upon a time",
         "-n", "6", "--threads", "2", "--level", request.param, "--log", path],
        check=True, capture_output=True,
    )  # fmt: skip
    return path


@pytest.mark.native
def test_ops_lie_in_blocks_in_layers_and_say_what_they_achieved(log: Path, tmp_path: Path) -> None:
    data = log.read_bytes()
    events = convert(tmp_path / "copy.log", data)
    level = read_events(log, "session_start")[0]["level"]
    names = track_names(events)
    on_layers = [e for e in events if e["ph"] == "X" and names[e["tid"]] == "layers"]
    assert nested(on_layers) == (1 if level == "minimal" else 3)
    nested(events)
    for op in [e for e in on_layers if "flops" in e["args"] and e["dur"]]:
        achieved = Decimal(op["args"]["flops"]) / op["dur"]
        assert abs(op["args"]["GFLOP/s"] - achieved) <= Decimal("0.001")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "made.log"
    path.write_bytes(encode(make_log(Random(1).randint, n_contexts=1, level="verbose")))
    return path


def test_the_command_writes_json_plain_or_compressed(made: Path, instr: Instr) -> None:
    done = instr("to-perfetto", made, "--format", "json")
    assert (done.returncode, done.stdout.strip()) == (0, str(made.with_suffix(".json")))
    assert instr("to-perfetto", made, "--format", "json", "--gzip").returncode == 0
    plain = made.with_suffix(".json").read_bytes()
    assert gzip.decompress(made.with_suffix(".json.gz").read_bytes()) == plain
    assert json.loads(plain)["displayTimeUnit"] == "ns"


def test_selections_choose_steps_layers_and_ops(made: Path) -> None:
    def slices(**chosen: Any) -> list[Record]:
        found = convert(made, data, selection=Selection(**chosen))
        return [event for event in found if event["ph"] == "X"]

    data = made.read_bytes()
    steps = [event for event in slices(steps=(1, 1)) if event["cat"] == "step"]
    assert [event["args"]["step"] for event in steps] == [1]
    layers = {event["args"]["layer"] for event in slices(layers=(0, 0)) if "layer" in event["args"]}
    assert layers == {0}
    of_ops = [event for event in slices(ops={"ROPE"}) if "tensor" in event["args"]]
    assert of_ops
    assert all("ROPE" in event["args"]["op"].split("+") for event in of_ops)
    with pytest.raises(UsageError, match="nothing of the log was selected"):
        slices(layers=(900, 901))


def test_marks_reported_late_have_a_lane_of_their_own() -> None:
    # the second thread's mark overlaps the first one's and is reported after that one has ended
    lanes = Lanes()
    assert lanes.begin(0, 200) == 0
    assert lanes.end(0, 300) == (0, 200)
    assert lanes.begin(1, 100) == 1
    assert lanes.begin(2, 300) == 0
    assert lanes.end(1, 250) == (1, 100)
    assert lanes.end(2, 400) == (0, 300)


def test_marks_that_are_all_reported_late_still_have_lanes_of_their_own() -> None:
    lanes = Lanes()
    for mark in range(100):
        assert lanes.begin(mark, mark) == mark
    for mark in range(100):
        lanes.end(mark, 1000)
    assert [lanes.begin(mark, 500) for mark in range(5)] == [100, 101, 102, 103, 104]
    assert lanes.begin(5, 1000) == 0


def test_a_model_that_was_loaded_before_the_session_opened_is_drawn_from_there(tmp_path) -> None:
    # as instr exec records it: the library opens the session on its own, during loading
    events = make_log(Random(3).randint, n_contexts=1, level="minimal")
    start, model = events[0], next(event for event in events if isinstance(event, s.Model))
    model.t, model.dur = start.t - 300, 1000
    trace = convert(tmp_path / "a.log", encode(events))
    (load,) = [event for event in trace if event["name"] == "load"]
    assert (load["ts"], load["dur"]) == (start.t, 700)
    assert load["args"]["ns_before_session"] == 300
    nested(trace)
