"""`instr to-torch`: the trace of PyTorch's profiler and the scalars.

tests/parts/peers/test_torch.py reads both with the tools that they are for."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tensorboardX.proto.event_pb2 import Event

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.torch import write_torch
from llamacpp_instr.converters.exports.traced import Options
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.timeline import Selection
from llamacpp_instr.log.memory import MemoryInUse
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import Session, load_session
from tests.conftest import Instr, assert_refused
from tests.kit.reported import Row

LOG = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"
EVERY_EVENT = LOG.with_name("every-event.log")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    write_torch(read_events(LOG), folder)
    return folder


@pytest.fixture(scope="module")
def session() -> Session:
    return load_session(LOG)


@cache
def trace_of(folder: Path) -> Row:
    (path,) = folder.glob("*.pt.trace.json.gz")
    whole: Row = json.loads(gzip.decompress(path.read_bytes()))
    return whole


def events_of(folder: Path, category: str) -> list[Row]:
    return [of for of in trace_of(folder)["traceEvents"] if of.get("cat") == category]


def events(folder: Path) -> Iterator[Any]:
    """Records: the length in 8 bytes, its checksum in 4, the message, its checksum in 4."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_each_kernel_is_an_operator_a_launch_and_a_kernel(folder: Path, session: Session) -> None:
    ops, launches, kernels = (events_of(folder, of) for of in ("cpu_op", "Runtime", "kernel"))
    ran = [of for of in session.ops if of.thread == 0]
    assert len(ops) == len(launches) == len(kernels) == sum(of.dur.size for of in ran)
    for op, launch, kernel in zip(ops, launches, kernels, strict=True):
        ids = {of["args"]["External id"] for of in (op, launch, kernel)}
        assert len(ids) == 1
        assert launch["args"]["correlation"] == kernel["args"]["correlation"]
        assert (op["name"], op["ts"], op["dur"]) == (kernel["name"], kernel["ts"], kernel["dur"])
    spent = sum(round(of["dur"] * 1000) for of in kernels)
    assert spent == sum(int(of.dur.sum()) for of in ran)
    assert len({of["args"]["External id"] for of in ops}) == len(ops)


def test_a_column_of_ids_has_room_for_the_numbers_of_all_events(folder: Path) -> None:
    """Trace analysis puts numbers of events into a column as narrow as the ids."""
    for kernel in events_of(folder, "kernel"):
        ids = pd.Series([kernel["args"]["correlation"]])
        assert pd.to_numeric(ids, downcast="integer").dtype == "int32"


def test_kernels_of_a_stream_do_not_overlap(folder: Path) -> None:
    kernels = sorted(events_of(folder, "kernel"), key=lambda of: of["ts"])
    for before, after in pairwise(kernels):
        assert round((before["ts"] + before["dur"]) * 1000) <= round(after["ts"] * 1000)


def test_times_by_op_are_those_of_stats(folder: Path, instr: Instr) -> None:
    stats, *_ = json.loads(instr("stats", LOG, "--json").stdout)
    spent: Counter[str] = Counter()
    for of in events_of(folder, "cpu_op"):
        spent[of["name"]] += round(of["dur"] * 1000)
    assert dict(spent) == {row["op"]: row["total"] for row in stats["rows"]}


def test_an_operator_has_the_shapes_of_its_inputs(folder: Path) -> None:
    of = next(of for of in events_of(folder, "cpu_op") if of["args"]["node"] == "ffn_gate-0")
    assert of["args"]["Input Dims"] == [[768, 256], [5, 256]]
    assert of["args"]["Input type"] == ["f16", "f32"]
    assert (of["args"]["layer"], of["args"]["block"]) == (0, "feed-forward")


def test_steps_are_those_of_the_log(folder: Path, session: Session) -> None:
    steps = [of for of in events_of(folder, "user_annotation") if "Profiler" in of["name"]]
    assert [of["name"] for of in steps] == [f"ProfilerStep#{n}" for n in session.steps["step"]]
    begin = session.start.t
    for of, first, last in zip(steps, session.steps["begin"], session.steps["end"], strict=True):
        assert round(of["ts"] * 1000) == first - begin
        assert round(of["dur"] * 1000) == last - first
        kernels = [k for k in events_of(folder, "kernel")
                   if of["ts"] <= k["ts"] < of["ts"] + of["dur"]]  # fmt: skip
        assert kernels
        assert all(k["ts"] + k["dur"] <= of["ts"] + of["dur"] for k in kernels)


def test_memory_adds_up_to_the_breakdown_of_llama_cpp(folder: Path, session: Session) -> None:
    events = [of for of in trace_of(folder)["traceEvents"] if of["name"] == "[memory]"]
    held = sum(use.model + use.context + use.compute for use in session.memory[-1].buffers)
    assert sum(of["args"]["Bytes"] for of in events) == held
    assert events[-1]["args"]["Total Allocated"] == held


def test_the_scalars_are_those_of_the_log(folder: Path, session: Session) -> None:
    found = scalars_of(folder)
    steps = session.steps
    decodes = steps.rows(steps["phase"] == "decode")
    rates = (decodes["n_tokens"] * 1e9 / (decodes["end"] - decodes["begin"])).tolist()
    speed = found["tokens per second/decode"]
    assert [step for step, _ in speed] == decodes["step"].tolist()
    assert [value for _, value in speed] == pytest.approx(rates, rel=1e-6)
    assert [value for _, value in found["KV cells/cache 0 of context 0"]] == session.kv[
        "used"
    ].tolist()
    assert found["memory in bytes/weights"][-1][1] == sum(of.bytes for of in session.tensors)


def test_a_scalar_has_its_wall_clock_time(folder: Path, session: Session) -> None:
    """To the precision of seconds since 1970 as a number; the file begins with the session."""
    start = session.start
    records = [(of.wall_time, of.step, [v.tag for v in of.summary.value]) for of in events(folder)]
    assert records[0][0] == pytest.approx(start.wall / 1e9, abs=1e-6)
    speeds = [of for of in records if of[2] == ["tokens per second/decode"]]
    ends = dict(zip(session.steps["step"].tolist(), session.steps["end"].tolist(), strict=True))
    for wall, step, _ in speeds:
        assert wall == pytest.approx((start.wall + ends[step] - start.t) / 1e9, abs=1e-6)
    assert len(speeds) > 2


def test_the_same_log_gives_the_same_files(folder: Path, instr: Instr, tmp_path: Path) -> None:
    instr("to-torch", LOG, "-o", "again")
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_only_files_of_an_earlier_call_are_replaced(instr: Instr, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    assert instr("to-torch", LOG, "-o", folder).returncode == 0
    assert_refused(instr("to-torch", LOG, "-o", folder), "use --force")
    assert instr("to-torch", LOG, "-o", folder, "--force").returncode == 0
    (folder / "notes.txt").write_text("mine")
    refused = instr("to-torch", LOG, "-o", folder, "--force")
    assert_refused(refused, "contains another file (notes.txt)")


def test_two_sessions_need_two_directories(instr: Instr, tmp_path: Path) -> None:
    refused = instr("to-torch", LOG, EVERY_EVENT, "-o", "profile")
    assert_refused(refused, "2 sessions; a directory is for one")
    assert not (tmp_path / "profile").exists()


def test_a_log_of_every_event_is_converted(instr: Instr, tmp_path: Path) -> None:
    done = instr("to-torch", EVERY_EVENT, "-o", "profile")
    assert done.returncode == 0, done.stderr
    assert events_of(tmp_path / "profile", "kernel")


# --- a log of known figures ---


def written(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The files of a log with some texts replaced."""
    text = EVERY_EVENT.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    log, made = tmp_path / "a.log", tmp_path / "made"
    log.write_text(text)
    made.mkdir()
    write_torch(read_events(log), made)
    return made


def test_the_trace_says_what_it_is_of(tmp_path: Path) -> None:
    made = written(tmp_path)
    start = load_session(EVERY_EVENT).start
    whole = trace_of(made)
    assert {key: value for key, value in whole.items() if key != "traceEvents"} == {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": start.host.cpu, "totalGlobalMem": start.host.memory}
        ],
        "distributedInfo": {"rank": 0, "world_size": 1},
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": start.wall,
        "recorded": start.time,
    }
    pid = start.process.pid
    metadata = [(of["name"], of["pid"], of["tid"], of["args"])
            for of in whole["traceEvents"] if of["ph"] == "M"]  # fmt: skip
    assert metadata == [
        ("process_name", pid, 0, {"name": "llama.cpp"}),
        ("process_labels", pid, 0, {"labels": "CPU"}),
        ("process_name", 0, 0, {"name": f"ggml's kernels on {start.host.cpu}"}),
        ("process_labels", 0, 0, {"labels": "GPU 0"}),
        ("thread_name", pid, 0, {"name": "context 0"}),
        ("thread_name", 0, 0, {"name": "context 0"}),
    ]


def test_a_host_without_a_name_is_a_cpu(tmp_path: Path) -> None:
    cpu = load_session(EVERY_EVENT).start.host.cpu
    made = written(tmp_path, (f'"cpu":"{cpu}"', '"cpu":""'))
    assert trace_of(made)["deviceProperties"][0]["name"] == "CPU"


def test_kernels_have_the_times_and_the_numbers_of_the_log(tmp_path: Path) -> None:
    made = written(tmp_path)
    first = 1 << 16
    begins, durs = [5050.1, 5051.15, 5052.5], [0.9, 1.14, 24]
    for category in ("cpu_op", "Runtime", "kernel"):
        events = events_of(made, category)
        assert [of["ts"] for of in events] == begins
        assert [of["dur"] for of in events] == ([0] * 3 if category == "Runtime" else durs)
        assert [of["args"]["External id"] for of in events] == [first, first + 1, first + 2]
    kernels = events_of(made, "kernel")
    assert [of["args"]["correlation"] for of in kernels] == [first, first + 1, first + 2]
    assert {(of["args"]["device"], of["args"]["context"], of["args"]["stream"], of["pid"])
            for of in kernels} == {(0, 0, 0, 0)}  # fmt: skip
    (_, norm, product) = events_of(made, "cpu_op")
    assert norm["args"] == {
        "External id": first + 1, "Input Dims": [[256]], "Input type": ["f32"],
        "node": "norm-0", "layer": 0, "block": "norm",
    }  # fmt: skip
    assert product["args"]["Input Dims"] == [[256, 256], [256]]
    assert product["args"]["Input type"] == ["f16", "f32"]


def test_a_step_is_two_annotations_with_its_figures(tmp_path: Path) -> None:
    found = events_of(written(tmp_path), "user_annotation")
    args = {"tokens": 1, "outputs": 1, "status": 0}
    assert [(of["name"], of["ts"], of["dur"], of["args"]) for of in found] == [
        ("ProfilerStep#0", 5000, 100, args),
        ("prefill", 5000, 100, args),
    ]


RESIDENT, HELD = 52_428_800, {"weights": 644_096, "KV cache": 524_288, "compute": 1_048_576}


def test_scalars_have_the_figures_and_times_of_the_log(tmp_path: Path) -> None:
    made = written(tmp_path)
    assert scalars_of(made) == {
        **{f"memory in bytes/{kind}": [(0, n)] for kind, n in HELD.items()},
        "memory in bytes/resident": [(0, RESIDENT)],
        "KV cells/cache 0 of context 0": [(0, 1)],
        "tokens per second/prefill": [(0, 10_000)],
        "ms per step/prefill": [(0, pytest.approx(0.1))],
    }
    wall = load_session(EVERY_EVENT).start.wall
    times = {of.summary.value[0].tag: of.wall_time for of in list(events(made))[1:]}
    for tag, t in (
        ("memory in bytes/weights", 3_000_000),
        ("KV cells/cache 0 of context 0", 5_010_000),
        ("ms per step/prefill", 5_100_000),
    ):
        assert times[tag] == pytest.approx((wall + t) / 1e9, abs=1e-6)
    head = next(events(made))
    assert head.file_version == "brain.Event:2"
    assert head.wall_time == pytest.approx(wall / 1e9, abs=1e-6)


@pytest.mark.parametrize(
    "change",
    [('"status":0,"n_ubatch"', '"status":1,"n_ubatch"'), ('"t":81005100000', '"t":81005000000')],
)
def test_a_step_that_failed_or_took_no_time_has_no_rate(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    made = written(tmp_path, change)
    assert not [name for name in scalars_of(made) if "per s" in name]
    dur = 100 if "status" in change[0] else 0
    assert [of["dur"] for of in events_of(made, "user_annotation")] == [dur, dur]


def test_without_resident_memory_there_is_no_scalar_of_it(tmp_path: Path) -> None:
    made = written(tmp_path, (',"rss":52428800', ""))
    assert "memory in bytes/resident" not in scalars_of(made)


def test_memory_that_is_held_is_reported_with_its_place(tmp_path: Path) -> None:
    found = [of for of in trace_of(written(tmp_path))["traceEvents"] if of["name"] == "[memory]"]
    held = 0
    for of, (buffer, kind) in zip(
        found, [("CPU_Mapped", "weights"), ("CPU", "KV cache"), ("CPU", "compute")], strict=True
    ):
        held += HELD[kind]
        args = of["args"]
        assert (args["buffer"], args["kind"], args["Bytes"]) == (buffer, kind, HELD[kind])
        assert args["Total Allocated"] == args["Total Reserved"] == held
        assert (args["Device Type"], args["Device Id"]) == (0, -1)
        assert (of["ts"], of["ph"], of["s"]) == (3000, "i", "t")
    assert len({of["args"]["Addr"] for of in found}) == 3


def test_memory_of_a_device_is_counted_apart(tmp_path: Path) -> None:
    made = written(tmp_path, ('"buffer":"CPU","context"', '"buffer":"CUDA0","context"'))
    found = [of["args"] for of in trace_of(made)["traceEvents"] if of["name"] == "[memory]"]
    assert [(of["Device Type"], of["Device Id"], of["Total Allocated"]) for of in found] == [
        (0, -1, 644_096), (1, 0, 524_288), (1, 0, 524_288 + 1_048_576),
    ]  # fmt: skip


def test_only_chosen_steps_are_written(tmp_path: Path) -> None:
    write_torch(read_events(EVERY_EVENT), tmp_path, Options(Selection(steps=(0, 0))))
    assert len(events_of(tmp_path, "kernel")) == 3
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UsageError, match="no step was selected"):
        write_torch(read_events(EVERY_EVENT), other, Options(Selection(steps=(1, 9))))


def test_what_is_before_compression_is_counted(tmp_path: Path) -> None:
    taken: list[int] = []
    write_torch(read_events(EVERY_EVENT), tmp_path, take=taken.append)
    (path,) = tmp_path.glob("*.pt.trace.json.gz")
    assert sum(taken) == len(gzip.decompress(path.read_bytes())) - len(b"\n]}\n")


def use(buffer: str, model: int = 0, context: int = 0, compute: int = 0) -> s.BufferUse:
    return s.BufferUse(buffer=buffer, model=model, context=context, compute=compute)


def test_contexts_of_one_model_hold_its_weights_once() -> None:
    held = MemoryInUse()
    first = s.Memory(t=0, ctx=0, buffers=[use("CPU", 100, 20, 3)], rss=0)
    second = s.Memory(t=1, ctx=1, buffers=[use("CPU", 100, 40, 5)], rss=0)
    assert held.take(first, 0) == {("CPU", "weights"): 100, ("CPU", "KV cache"): 20,
                                   ("CPU", "compute"): 3}  # fmt: skip
    assert held.take(second, 0) == {("CPU", "KV cache"): 40, ("CPU", "compute"): 5}
    assert held.held == {("CPU", "weights"): 100, ("CPU", "KV cache"): 60,
                            ("CPU", "compute"): 8}  # fmt: skip
    smaller = s.Memory(t=2, ctx=0, buffers=[use("CPU", 100, 20, 1)], rss=0)
    assert held.take(smaller, 0) == {("CPU", "compute"): -2}
    other = s.Memory(t=3, ctx=2, buffers=[use("CPU", 7)], rss=0)
    assert held.take(other, 1) == {("CPU", "weights"): 7}
