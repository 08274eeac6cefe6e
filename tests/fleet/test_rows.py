"""The rows that a log becomes, from logs whose times are known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.base.errors import LogError, UsageError
from llamacpp_instr.converters.fleet import rows as rows_module
from llamacpp_instr.converters.fleet.collect import Source, find_sources
from llamacpp_instr.converters.fleet.dataset import GROWTH, N_BUCKETS, RELATIVE_ERROR, bucket_of
from llamacpp_instr.converters.fleet.rows import LogRows, write_rows
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import WAITED, load_parts
from tests.kit.made_log import encode
from tests.kit.sketched_log import Sketch

Written = list[tuple[str, list[dict[str, Any]]]]


def rows_of(path: Path, events: Sequence[s.Event]) -> tuple[LogRows, Written]:
    """What was read, and the pieces that were written, in order."""
    path.write_bytes(encode([*events]))
    written: Written = []
    found = write_rows(
        path, "the log", lambda name, rows: written.append((name, rows)), lenient=False
    )
    return found, written


def table(written: Written, name: str) -> list[dict[str, Any]]:
    return [row for of, rows in written for row in rows if of == name]


def decoding() -> Sketch:
    """A log of a context with two threads for decodes and seven for batches."""
    sketch = Sketch()
    for event in sketch.events:
        if isinstance(event, s.Context):
            event.n_threads, event.n_threads_batch = 2, 7
    sketch.step(9000, 6, sampled=10, ops=([4000, 500], [0, 0]))
    for _ in range(2):
        sketch.step(1000, sampled=10, ops=([600, 30], [0, 0]))
    return sketch


def test_a_step_has_its_times(tmp_path: Path) -> None:
    sketch = decoding()
    for event in sketch.events:
        if isinstance(event, s.StepEnd):
            event.prepare, event.readback = 11, 7
    found, written = rows_of(tmp_path / "a.log", sketch.events)
    prefill, decode, _ = table(written, "steps")
    wall = found.session.start.wall // 1000
    assert prefill == {
        "log": "the log", "ctx": 0, "model": prefill["model"], "threads": 7, "step": 0,
        "phase": "prefill", "tokens": 6, "outputs": 1, "sequences": 1, "position": 0, "time": wall,
        "ns": 9000, "prepare_ns": 11, "readback_ns": 7, "counted": True,
    }  # fmt: skip
    assert (decode["phase"], decode["threads"], decode["position"]) == ("decode", 2, 6)
    assert (decode["time"], decode["ns"]) == (wall + 9, 1000)
    (request,) = table(written, "requests")
    assert request == {
        "log": "the log", "ctx": 0, "model": prefill["model"], "threads": 2, "sequence": 0,
        "name": None, "time": wall, "ns": 11_030, "queued_ns": None, "first_token_ns": 9010,
        "between_tokens_ns": 1010.0, "prompt": 6, "reused": 0, "output": 3,
    }  # fmt: skip
    assert (found.steps, found.failed, found.warm_up) == (3, 0, 0)
    assert (found.kernels, found.requests) == (6, 1)


def test_a_request_of_one_token_has_no_time_between_tokens(tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.step(9000, 6, sampled=10)
    (request,) = table(rows_of(tmp_path / "a.log", sketch.events)[1], "requests")
    assert request["between_tokens_ns"] is None
    assert request["output"] == 1


@pytest.mark.parametrize(("seq", "name"), [(0, "chat"), (-1, None)])
def test_a_mark_of_a_sequence_names_its_request(seq: int, name: str | None, tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.events.append(s.Mark(t=0, mark=1, name="chat", phase="begin"))
    sketch.pause(500)
    sketch.step(9000, 6, sampled=10)
    sketch.events.append(s.Mark(t=sketch.t + 90, mark=1, name="chat", phase="end", seq=seq))
    (request,) = table(rows_of(tmp_path / "a.log", sketch.events)[1], "requests")
    assert request["name"] == name
    assert request["queued_ns"] == (500 if name else None)


def test_ops_are_counted_by_phase_and_bucket(tmp_path: Path) -> None:
    _, written = rows_of(tmp_path / "a.log", decoding().events)
    ops = table(written, "ops")
    found = {(row["phase"], row["kernels"], row["ns"], row["bucket"]) for row in ops}
    wanted = [("prefill", 1, 4000), ("prefill", 1, 500), ("decode", 2, 1200), ("decode", 2, 60)]
    buckets = bucket_of(np.array([4000, 500, 600, 30])).tolist()
    assert found == {(*of, bucket) for of, bucket in zip(wanted, buckets, strict=True)}
    assert {row["threads"] for row in ops if row["phase"] == "decode"} == {2}
    assert len({row["op"] for row in ops}) == 2


@pytest.mark.parametrize("left_out", ["failed", "warm-up", "failed in a warm-up"])
def test_kernels_of_steps_that_do_not_count_are_left_out(left_out: str, tmp_path: Path) -> None:
    sketch = decoding()
    if "warm-up" in left_out:
        sketch.events.append(s.Mark(t=sketch.t, mark=1, name="warm-up", phase="begin"))
    sketch.step(5000, sampled=None, ops=([1000, 1000], [0, 0]))
    end = sketch.events[-1]
    assert isinstance(end, s.StepEnd)
    end.status = int("failed" in left_out)
    if "warm-up" in left_out:
        sketch.events.append(s.Mark(t=sketch.t, mark=1, name="warm-up", phase="end"))
    found, written = rows_of(tmp_path / "a.log", sketch.events)
    assert [row["counted"] for row in table(written, "steps")] == [True] * 3 + [False]
    assert sum(row["ns"] for row in table(written, "ops")) == 4500 + 2 * 630
    failed = "failed" in left_out
    assert (found.steps, found.failed, found.warm_up) == (4, failed, not failed)
    assert found.kernels == 8, "all that the log has"


def test_another_mark_is_no_warm_up(tmp_path: Path) -> None:
    sketch = decoding()
    sketch.events.append(s.Mark(t=sketch.t, mark=1, name="turn", phase="begin"))
    sketch.step(5000, sampled=1)
    found, _ = rows_of(tmp_path / "a.log", sketch.events)
    assert (found.steps, found.warm_up) == (4, 0)


def test_other_threads_take_part_in_the_same_kernels(tmp_path: Path) -> None:
    sketch = decoding()
    other = s.Ops(t=sketch.t, compute=2, plan=0, thread=1, dur=[9, 9], wait=[0, 0])
    sketch.events.insert(-2, other)
    found, written = rows_of(tmp_path / "a.log", sketch.events)
    assert found.kernels == 6
    assert sum(row["kernels"] for row in table(written, "ops")) == 6


@pytest.mark.parametrize(("piece", "pieces"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (4, [3])])
def test_steps_are_written_in_pieces(
    piece: int, pieces: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "PIECE", piece)
    _, written = rows_of(tmp_path / "a.log", decoding().events)
    assert [len(rows) for name, rows in written if name == "steps"] == pieces
    assert [row["step"] for row in table(written, "steps")] == [0, 1, 2]
    assert all(rows for _, rows in written)


@pytest.mark.parametrize("part_rows", [1, 5, 1 << 17])
def test_rows_do_not_depend_on_the_parts_in_which_the_log_is_read(
    part_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up is open where a part could end; the wait for its last step comes after its end."""
    sketch = decoding()
    sketch.events.append(s.Mark(t=sketch.t, mark=1, name="warm-up", phase="begin"))
    for _ in range(3):
        sketch.step(5000, sampled=1, ops=([1000, 1000], [0, 0]))
    sketch.events.append(s.Mark(t=sketch.t, mark=1, name="warm-up", phase="end"))
    waited, n_events = sketch.t, len(sketch.events)
    sketch.step(700, sampled=1, ops=([300, 300], [0, 0]))
    begin = next(i for i in range(n_events, len(sketch.events)) if sketch.events[i].t > waited)
    sketch.events.insert(begin, s.Sync(t=waited - 100, ctx=0, dur=WAITED))
    monkeypatch.setattr(rows_module, "load_parts", partial(load_parts, part_rows=part_rows))
    found, written = rows_of(tmp_path / "a.log", sketch.events)
    assert (found.steps, found.warm_up, found.kernels) == (7, 3, 14)
    ns = [row["ns"] for row in table(written, "steps")]
    assert ns[-1] == 700
    assert ns[-2] > WAITED - 100
    assert sorted((row["kernels"], row["ns"]) for row in table(written, "ops")) == [
        (1, 300), (1, 300), (1, 500), (1, 4000), (2, 60), (2, 1200),
    ]  # fmt: skip


# --- buckets ---


def test_bounds_of_buckets() -> None:
    """Bucket 0 is for 0 ns and less, 1 for 1 ns; each later one reaches GROWTH times as far."""
    ns = np.array([-5, 0, 1, 2, 3, 2**63 - 1])
    found = bucket_of(ns).tolist()
    assert found[:3] == [0, 0, 1]
    assert max(found) == N_BUCKETS - 1, "no bucket is unused"
    for value, bucket in zip(ns[3:5].tolist(), found[3:5], strict=True):
        assert GROWTH ** (bucket - 2) < value <= GROWTH ** (bucket - 1)
    assert pytest.approx((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)) == GROWTH


# --- sources ---


def test_a_name_means_each_file_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["b.log", "a.ndjson.gz", "c.jsonl.zst", "deep/d.log", "e.txt", "f.log.bz2"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * len(name))
    (tmp_path / "folder.log").mkdir()
    found = find_sources([str(tmp_path)])
    logs = ["a.ndjson.gz", "b.log", "c.jsonl.zst", "deep/d.log"]
    assert [of.name for of in found] == [str(tmp_path / name) for name in logs]
    assert [of.size for of in found] == [len(name) for name in logs]
    status = (tmp_path / "b.log").stat()
    assert found[1].version == str(status.st_mtime_ns)
    # a file may have any name, a pattern may be relative, and both name the same file once
    assert [of.name for of in find_sources(["e.txt", "e.txt"])] == ["e.txt"]
    assert [of.name for of in find_sources(["*.log"])] == ["b.log"]
    assert [of.name for of in find_sources([f"{tmp_path}/*/*.log"])] == [f"{tmp_path}/deep/d.log"]
    assert [of.name for of in find_sources(["b.log", "*.log"])] == ["b.log"]
    with pytest.raises(UsageError, match=r"^x\*: no such file, or a folder without logs$"):
        find_sources(["b.log", "x*"])


def test_objects_of_a_store_have_their_size_and_a_local_copy() -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("b.log", "a.log", "notes.txt", "deep/c.jsonl"):
        store.pipe(f"/of-rows/{name}", name.encode())
    found = find_sources(["memory://of-rows"])
    names = ["a.log", "b.log", "deep/c.jsonl"]
    assert [of.name for of in found] == [f"memory://of-rows/{name}" for name in names]
    assert [of.size for of in found] == [5, 5, 12]
    assert all(of.version for of in found)
    (one,) = find_sources(["memory://of-rows/notes.txt"])
    with one.local() as path:
        assert (path.name, path.read_bytes()) == ("notes.txt", b"notes.txt")
    assert not path.exists()
    assert [of.size for of in find_sources(["memory://of-rows/?.log"])] == [5, 5]
    for name in ("memory://of-rows/z.log", "memory://of-rows/z*"):
        with pytest.raises(UsageError, match="no such file, or a folder without logs"):
            find_sources([name])
    gone = Source("memory://of-rows/gone.log", 5, "")
    with pytest.raises(LogError, match="cannot be fetched"), gone.local():
        pass
