"""A log that is read while it is written gives what the finished log gives."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from random import Random

import pytest

from llamacpp_instr.errors import LogError
from llamacpp_instr.log.follow import FollowedLog, part_path
from llamacpp_instr.log.parts import read_run
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.schema import Event, SessionStart
from tests.kit.made_log import encode, make_log
from tests.kit.split_log import split_log


def parts_of(seed: int, n: int, pid: int) -> list[bytes]:
    random = Random(seed)
    events = make_log(random.randint)
    assert isinstance(events[0], SessionStart)
    events[0].process.pid = pid
    return [encode(part) for part in split_log(events, n, random)]


def write_slowly(first: Path, parts: list[bytes], random: Random) -> None:
    """In pieces that end anywhere. A part begins before the one before it ends."""
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


def test_it_stops_when_asked(tmp_path: Path) -> None:
    log = tmp_path / "it.log"
    (data,) = parts_of(1, 1, os.getpid())
    log.write_bytes(data[: data.index(b"\n") + 1])
    stop = threading.Event()
    events = iter(FollowedLog(log, stop))
    assert isinstance(next(events)[1], SessionStart)
    stop.set()
    assert next(events, None) is None
