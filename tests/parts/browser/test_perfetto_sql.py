"""Perfetto's trace_processor reads from a trace of a session what the log contains."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.reader import read_events as read_log
from llamacpp_instr.log.schema import LEVELS
from tests.conftest import read_events
from tests.kit.perfetto_queries import HOW_ORDERED, ROWS, SUMS, TRACKS, WRONG
from tests.kit.perfetto_recordings import record
from tests.kit.perfetto_truth import Truth, truth
from tests.kit.trace_processor import ask, check

pytestmark = pytest.mark.native

# dense with a sliding window and soft-max, experts and latent attention, recurrent, hybrid,
# encoder and decoder
ARCHITECTURES = ("gemma3-dense", "deepseek2-moe", "mamba-dense", "jamba-dense", "t5")
RECORDED = [
    *((name, level) for name in ("demo", *ARCHITECTURES) for level in LEVELS),
    *((name, "verbose") for name in ("llama", "gpt2", "bert", "qwen3next-moe")),
    *((name, "verbose") for name in ("application", "sampled")),
    ("stats", "detailed"),
    ("device", "detailed"),
]
HAS = {
    "application": ("marks", "messages", "kv_changes", "loads", "memory", "args", "work"),
    "sampled": ("tokens", "texts", "rates", "kv_bytes"),
    "stats": ("stats", "tokens"),
    "device": ("splits", "syncs", "major_faults", "machine"),
}
"""what some of them are recorded for"""


@dataclass
class Recorded:
    """A trace with its flows, what was asked of it, and what has to be in it."""

    trace: Path
    start: dict[str, Any]
    expected: Truth
    answers: dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module", params=RECORDED, ids="-".join)
def recorded(request, tmp_path_factory, models) -> Recorded:
    name, level = request.param
    folder = tmp_path_factory.mktemp(name)
    log, trace = record(name, level, models, folder), folder / "session.pftrace"
    with trace.open("wb") as file:
        write_perfetto(read_log(log), file, Options(flows=True))
    events = read_events(log)
    expected = truth(events)
    for column in HAS.get(name, ("steps", "layers", "kv" if name != "bert" else "steps")):
        assert expected.rows[column], f"nothing to compare: {column}"
    queries = {**ROWS, **SUMS, **WRONG, "tracks": TRACKS, "how ordered": HOW_ORDERED}
    queries["mark depths"] = "select depth from slice where category = 'mark' and dur > 0"
    rows = (list(map(tuple, answer)) for answer in ask(trace, *queries.values()))
    return Recorded(trace, events[0], expected, dict(zip(queries, rows, strict=True)))


def test_it_imports_without_a_problem(recorded) -> None:
    (report,) = check(recorded.trace)
    assert report["problems"] == []
    assert report["slices"] > 0


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_that_of_the_log(recorded, name) -> None:
    rows = sorted(recorded.answers[name], key=lambda row: tuple(map(str, row)))
    wanted = recorded.expected.rows[name]
    assert len(rows) == len(wanted)
    assert rows == wanted


def test_the_sums_are_those_of_the_log(recorded) -> None:
    expected, answers = recorded.expected, recorded.answers
    spent, n = Counter[str](), Counter[str]()
    for _, dur, name, *_ in expected.rows["ops"]:
        spent[name] += dur
        n[name] += 1
    assert answers["spent"] == [(name, spent[name], n[name]) for name in sorted(n)]
    assert dict(answers["waits"]) == dict(expected.gaps)
    assert dict(answers["rates"]) == pytest.approx(dict(expected.rows["rates"]))


def test_what_an_op_achieved_is_its_work_by_its_time(recorded) -> None:
    for dur, n_bytes, gigabytes, n_flops, gigaflops in recorded.answers["op_rates"]:
        assert gigabytes == (n_bytes and pytest.approx(n_bytes / dur))
        assert gigaflops == (n_flops and pytest.approx(n_flops / dur))


def test_what_a_compute_achieved_is_the_work_of_its_ops_by_its_time(recorded) -> None:
    if recorded.expected.rows["ops"]:
        assert recorded.answers["achieved"]
    on_device = any(name != "CPU" for _, _, name, _ in recorded.expected.rows["splits"])
    for _, gigabytes, gigaflops, counted_bytes, counted_flops in recorded.answers["achieved"]:
        if on_device:
            assert (counted_bytes, counted_flops) == (None, None), "a device's work is not known"
            continue
        assert counted_bytes == pytest.approx(gigabytes or 0)
        assert counted_flops == pytest.approx(gigaflops or 0)  # moving the cache: none


@pytest.mark.parametrize("what", WRONG)
def test_slices_nest_exactly(recorded, what) -> None:
    assert recorded.answers[what] == []


def test_flows_lead_from_ops_to_their_readers(recorded) -> None:
    expected, answers = recorded.expected, recorded.answers
    assert answers["n_flows"] == [(expected.n_edges + expected.n_taken + expected.n_served,)]
    assert answers["token_flows"] == [(expected.n_taken,)]


def test_a_slice_has_its_wall_clock_time(recorded) -> None:
    t, wall = recorded.start["t"], recorded.start["wall"]
    assert recorded.answers["clock"]
    for ts, realtime in recorded.answers["clock"]:
        assert realtime - wall == ts - t


# from the session's own steps down to its counters
TRACKS_IN_ORDER = [
    "marks", "requests", "phases", "layers", "threads", "splits", "device waits", "sampler",
    "tokens/s", "KV", "memory", "achieved GB/s", "achieved GFLOP/s", "page faults",
    "machine", "tensor statistics", "messages",
]  # fmt: skip


def test_the_tracks_stand_in_their_order(recorded) -> None:
    (how,) = recorded.answers["how ordered"]
    tracks = [name for (name,) in recorded.answers["tracks"]]
    assert how == ("explicit",)
    assert tracks == [name for name in TRACKS_IN_ORDER if name in tracks]
    assert {"phases", "layers", "tokens/s"} <= set(tracks)


def test_marks_that_overlap_each_have_a_lane(recorded) -> None:
    open_at_once = [
        (one, other)
        for one in recorded.expected.rows["marks"]
        for other in recorded.expected.rows["marks"]
        if one[0] < other[0] < one[0] + one[1] < other[0] + other[1]
    ]
    if "retrieval" in {name for _, _, name, _ in recorded.expected.rows["marks"]}:
        assert open_at_once, "the application's do"
        changes = {name for _, name, *_ in recorded.answers["kv_changes"]}
        assert changes == {"KV seq_rm", "KV seq_add", "KV shift", "KV clear"}
    assert all(depth == 0 for (depth,) in recorded.answers["mark depths"])
