"""A log that is read while it is written gives what the finished log gives."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log import runs as follow
from llamacpp_instr.log.runs import FollowedLog, NotWritten, find_runs, part_path, read_run
from llamacpp_instr.log.schema import Event, SessionStart
from tests.kit.made_log import encode, make_log
from tests.kit.split_log import split_log


def parts_of(seed: int, n: int, pid: int) -> list[bytes]:
    random = Random(seed)
    events = make_log(random.randint)
    assert isinstance(events[0], SessionStart)
    events[0].process.pid = pid
    return [encode(part) for part in split_log(events, n, random)]


def write_slowly(first: Path, parts: list[bytes], random: Random) -> None:
    """In pieces that end anywhere. A part begins before the previous one ends."""
    for number, data in enumerate(parts, 1):
        begin = data.index(b"\n") + 1
        with part_path(first, number).open("ab", buffering=0) as file:
            at = file.tell() or file.write(data[:begin])
            if number < len(parts):
                following = parts[number]
                part_path(first, number + 1).write_bytes(following[: following.index(b"\n") + 1])
            while at < len(data):
                at += file.write(data[at : at + random.randint(1, len(data))])
                time.sleep(0.002)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_it_gives_the_events_of_the_finished_log(tmp_path: Path, n: int) -> None:
    for seed in range(4):
        first = tmp_path / f"{n}-{seed}" / "it.log"
        first.parent.mkdir()
        parts = parts_of(seed, n, os.getpid())
        first.write_bytes(parts[0][: parts[0].index(b"\n") + 1])
        followed = FollowedLog(first, threading.Event())
        writer = threading.Thread(target=write_slowly, args=(first, parts, Random(seed)))
        writer.start()
        seen = [event for _, event in followed]
        writer.join()
        (run,) = find_runs([part_path(first, number) for number in range(1, len(parts) + 1)])
        finished: list[Event] = [event for _, event in read_run(run)]
        assert seen == finished
        assert followed.end is not None
        assert followed.end.state == "closed"


@pytest.mark.native
def test_it_ends_with_the_program_that_writes(tmp_path: Path) -> None:
    """A killed program leaves a log without an end."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    log = tmp_path / "it.log"
    (data,) = parts_of(1, 1, child)
    whole = data[: data.rindex(b"\n", 0, -1) + 1]
    log.write_bytes(whole)
    followed = FollowedLog(log, threading.Event())  # as young as one that is being written
    assert len(list(followed)) == whole.count(b"\n")
    assert followed.end is not None
    assert followed.end.state == "unclosed"
    os.utime(log, (0, 0))
    with pytest.raises(LogError, match=r"it\.log: no longer written"):
        FollowedLog(log, threading.Event())


def test_a_closed_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    log.write_bytes(parts_of(1, 1, os.getpid())[0])
    with pytest.raises(LogError, match=r"it\.log: no longer written"):
        FollowedLog(log, threading.Event())


def started(first: Path, n: int, pid: int) -> list[Path]:
    """The parts of a log, of which the last is still written."""
    parts = parts_of(3, n, pid)
    assert len(parts) == n
    paths = [part_path(first, number) for number in range(1, n + 1)]
    for path, data in zip(paths[:-1], parts, strict=False):
        path.write_bytes(data)
    last = parts[-1]
    paths[-1].write_bytes(last[: last.rindex(b"\n", 0, -1) + 1])
    return paths


def test_the_files_of_parts(tmp_path: Path) -> None:
    first = tmp_path / "it.x.log"
    assert part_path(first, 1) == first
    assert part_path(first, 2) == tmp_path / "it.x.part2.log"


def test_finished_parts_are_read_up_to_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = started(tmp_path / "it.log", 4, os.getpid())
    sizes = [path.stat().st_size for path in paths]
    both = sizes[1] + sizes[2]
    for most, begin in ((10**9, 0), (both, 1), (both - 1, 2), (sizes[2], 2), (0, 3)):
        monkeypatch.setattr(follow, "CATCH_UP", most)
        for named in paths:
            assert FollowedLog(named, threading.Event()).path == str(paths[begin])
    monkeypatch.setattr(follow, "CATCH_UP", 10**9)
    paths[1].unlink()
    assert FollowedLog(paths[3], threading.Event()).path == str(paths[2])


def test_which_parts_have_events_of_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = started(tmp_path / "it.log", 3, os.getpid())
    for number, path in enumerate(paths):
        begin, newline, rest = path.read_bytes().partition(b"\n")
        start = json.loads(begin)
        path.write_bytes(json.dumps(start | {"t": 100 * number}).encode() + newline + rest)
    monkeypatch.setattr(follow, "CATCH_UP", 0)
    log = FollowedLog(paths[2], threading.Event())
    for (begin, end), found in {
        (0, 999): [0, 1, 2], (0, 99): [0], (99, 100): [0, 1], (100, 100): [1], (150, 250): [1, 2],
        (200, 300): [2], (201, 300): [2], (101, 199): [1], (0, 199): [0, 1],
    }.items():  # fmt: skip
        assert log.parts_between(begin, end) == [paths[i] for i in found], (begin, end)
    paths[1].unlink()
    assert log.parts_between(0, 999) == [paths[2]]


@pytest.mark.parametrize(
    ("runs", "age", "written"),
    [(True, 10.0, True), (False, 2.0, True), (False, 4.0, False)],
)
def test_a_log_is_written_while_its_program_runs_or_if_it_is_young(
    runs: bool, age: float, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = started(tmp_path / "it.log", 1, 4242)
    monkeypatch.setattr(follow, "_runs", lambda pid: runs and pid == 4242)
    now = path.stat().st_mtime + age
    clock = SimpleNamespace(monotonic=time.monotonic, time=lambda: now)
    monkeypatch.setattr(follow, "time", clock)
    if written:
        assert FollowedLog(path, threading.Event()).is_catching_up
    else:
        with pytest.raises(NotWritten, match="no longer written"):
            FollowedLog(path, threading.Event())


def test_a_silent_program_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only after three seconds without a line, and again after three more."""
    (path,) = started(tmp_path / "it.log", 1, 4242)
    asked: list[float] = []
    now = 1000.0

    def runs(_: int) -> bool:
        asked.append(now)
        return len(asked) < 4

    monkeypatch.setattr(follow, "_runs", runs)
    monkeypatch.setattr(follow, "time", SimpleNamespace(
        monotonic=lambda: now, time=lambda: time.time() + 100))  # fmt: skip

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout == follow.LOOK_S == 0.05
            now += 1
            return False

    log = FollowedLog(path, Stop())
    assert list(log)
    assert asked == [1000.0, 1004.0, 1008.0, 1012.0]
    assert not log.is_catching_up
    assert log.end is not None
    assert log.end.state == "unclosed"


@pytest.mark.parametrize(
    ("last", "ends"),
    [
        (b'{"event":"session_end","t":1,"reason":"closed"}\n', True),
        (b'{"event":"session_end","t":1,"reason":"closed"}', True),
        (b'{"event":"session_end","t":1,"reason":"rotated"}\n', False),
        (b'{"event":"session_end","t":1,"reason":"closed"}\n{"event":"note"}\n', False),
        (b'{"event":"note"}\n', False),
        (b"", False),
    ],
)
def test_the_last_line_tells_whether_a_log_ends(last: bytes, ends: bool, tmp_path: Path) -> None:
    path = tmp_path / "it.log"
    for before in (b"", b"x" * 70_000 + b"\n"):
        path.write_bytes(before + last)
        assert follow._ends(path) is ends


def test_a_process_runs_if_it_may_not_be_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[int, type[Exception] | None] = {
        1: ProcessLookupError, 2: PermissionError, 3: OverflowError, 4: None
    }  # fmt: skip

    def kill(pid: int, signal: int) -> None:
        assert signal == 0
        if error := answers[pid]:
            raise error

    monkeypatch.setattr(follow.os, "kill", kill)
    assert [follow._runs(pid) for pid in answers] == [False, True, True, True]


def test_it_stops_when_asked(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    (data,) = parts_of(1, 1, os.getpid())
    log.write_bytes(data[: data.index(b"\n") + 1])
    stop = threading.Event()
    events = iter(FollowedLog(log, stop))
    assert isinstance(next(events)[1], SessionStart)
    stop.set()
    assert next(events, None) is None
