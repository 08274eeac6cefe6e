"""`instr to-torch`: the trace of PyTorch's profiler and the scalars.

tests/peers/torch_suite.py reads both with the tools that they are for."""

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

from converters.exports.torch.stream import write_torch
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import Session, load_session
from tests.conftest import Instr, assert_refused
from tests.kit.told import Row

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
    assert len(ops) == len(launches) == len(kernels) == sum(len(of.dur) for of in ran)
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


def test_a_scalar_has_the_time_of_the_wall(folder: Path, session: Session) -> None:
    """To the precision of a number of seconds since 1970; the file begins with the session."""
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
