"""Fifty viewers of a recording, one of them stopped: nobody else notices."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from llamacpp_instr.converters.live.server import IN_FLIGHT
from tests.kit.programs import line, program, say
from tests.live.test_viewers import see_frame, viewers, watched, what_they_got

pytestmark = pytest.mark.native
MIB = 2**20
KEPT = 20
"""frames, so that a test waits for those of two seconds and not of ten"""
SYSTEM = 4 * IN_FLIGHT
"""more bytes than the system and the server keep for a viewer that does not read"""
SERVER = f"""
import sys
from llamacpp_instr.converters.live import live_session
live_session.KEPT = {KEPT}
from llamacpp_instr.converters.live.show import serve
serve(sys.argv[1], 0, lambda address: print(address, flush=True))
"""


def resident(process: subprocess.Popen[str]) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_fifty_viewers_and_one_that_is_stopped(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    with ExitStack() as stack:
        application = stack.enter_context(program(*watched(log, "--requests", 10**6)))
        assert line(application) == "recording"
        server = stack.enter_context(program("-c", SERVER, log))
        address = line(server)
        others = stack.enter_context(program(*viewers(address, "--viewers", 50, "--leave", 7)))
        stopped = stack.enter_context(program(*viewers(address, "--viewers", 1, "--receive", 4096)))
        say(application)
        see_frame(stopped, 5)
        at = see_frame(others, 5)
        stopped.send_signal(signal.SIGSTOP)
        at = see_frame(others, at + 20)
        before = resident(server)
        at = see_frame(others, at + 4 * KEPT, SYSTEM)
        after = resident(server)
        stopped.send_signal(signal.SIGCONT)
        see_frame(stopped, at)
        (late,) = what_they_got(stopped)
        each = what_they_got(others)
        assert application.poll() is None
    assert after - before < 16 * MIB

    # the others: every frame, in order, the same for all; also the one that left and came back
    assert len(each) == 50
    known: dict[int, int] = {}
    for frames in each:
        assert [is_key for _, _, is_key, _, _ in frames] == [True] + [False] * (len(frames) - 1)
        numbers = [number for number, *_ in frames]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(numbers) > 4 * KEPT
        for number, _, is_key, _, checksum in frames:
            assert is_key or known.setdefault(number, checksum) == checksum

    # the stopped one: what the system kept, then a frame that says how many it lost, then all
    jump = next(i for i, (_, lost, *_) in enumerate(late) if lost)
    assert late[jump][2], "a key frame"
    assert late[jump][1] == late[jump][0] - late[jump - 1][0]
    assert sum(size for _, _, _, size, _ in late[5:jump]) < 8 * IN_FLIGHT
    for part in (late[:jump], late[jump:]):
        numbers = [number for number, *_ in part]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert sum(lost for _, lost, *_ in part[1:]) == 0
