"""The server of a live session: what it sends, to whom, and to whom not."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidHandshake, WebSocketException
from websockets.sync.client import ClientConnection, connect

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.live import live_session
from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.converters.live.server import LiveServer
from llamacpp_instr.log import runs
from llamacpp_instr.log.runs import FollowedLog
from llamacpp_instr.log.schema import SessionStart
from tests.kit.made_log import encode
from tests.live.followed_logs import events_of_this_process, followed
from tests.live.test_state import metrics_of


@dataclass
class Served:
    """A server of a log that is being written."""

    log: Path
    lines: list[bytes]
    """that are not yet written"""
    server: LiveServer

    def write(self, n: int) -> None:
        with self.log.open("ab") as file:
            file.write(b"".join(self.lines[:n]))
        del self.lines[:n]

    def frames(self, after: int = -1, **headers: str) -> ClientConnection:
        address = self.server.address.replace("http:", "ws:")
        return connect(f"{address}frames?after={after}", additional_headers=headers)

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        connection.putrequest("GET", path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse()

    @property
    def name(self) -> str:
        return "/" + self.server.address.split("/", 3)[3]


def a_range(first: int, last: int) -> str | Path:
    """Opens a range in place of the server: 1 is shown, 2 is a file, 3 is not known."""
    if first == 3:
        raise UsageError(f"no step ended from second {first} to {last}")
    return f"http://127.0.0.1:1/{last}" if first == 1 else Path(__file__)


PATIENCE_S = 100
KEPT = 5
"""frames, so that a test does not wait for those of ten seconds"""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(live_session, "KEPT", KEPT)
    lines = encode(events_of_this_process(3)).splitlines(keepends=True)
    log = tmp_path / "it.log"
    log.write_bytes(lines.pop(0))
    started = threading.Event()
    with followed(log) as (session, _):
        server = LiveServer(session, a_range)
        thread = threading.Thread(target=server.run, args=(started.set,), daemon=True)
        thread.start()
        assert started.wait(PATIENCE_S)
        yield Served(log, lines, server)
    server.stop()
    thread.join()


def read(viewer: ClientConnection) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(viewer.recv(timeout=PATIENCE_S))
    return frame


def read_to_the_end(viewer: ClientConnection) -> list[dict[str, Any]]:
    frames = []
    try:
        while True:
            frames.append(read(viewer))
    except WebSocketException:
        return frames


def test_a_viewer_gets_a_key_frame_and_then_what_is_new(served: Served) -> None:
    with served.frames() as viewer:
        assert read(viewer)["key"]
        served.write(len(served.lines) // 2)
        frame = read(viewer)
        assert "key" not in frame
        served.write(len(served.lines))
        frames = [frame, *read_to_the_end(viewer)]
    assert [f["frame"] for f in frames] == list(range(frame["frame"], frame["frame"] + len(frames)))
    assert frames[-1]["over"] == "closed"
    with served.frames() as viewer:
        key = read(viewer)
    assert key["over"] == "closed"
    assert [step for f in frames for step in f["steps"]] == key["steps"]


def test_a_viewer_that_comes_back_goes_on(served: Served) -> None:
    with served.frames() as viewer:
        first = read(viewer)
    served.write(len(served.lines) // 2)
    with served.frames(first["frame"]) as viewer:
        assert read(viewer)["frame"] == first["frame"] + 1
    with served.frames(10**6) as viewer:  # of another server
        assert read(viewer)["key"]


def test_a_viewer_that_was_away_too_long_is_told_what_it_lost(served: Served) -> None:
    with served.frames() as viewer:
        first = read(viewer)
        for _ in range(KEPT + 5):
            served.write(1)
            frame = read(viewer)
    with served.frames(first["frame"]) as viewer:
        key = read(viewer)
    assert key["key"]
    assert key["lost"] >= frame["frame"] - first["frame"] > KEPT


def test_the_page_and_its_parts_are_served(served: Served) -> None:
    for path in ("", "page.js", "page.css", "draw.js", "common.js", "uplot.js", "uplot.css"):
        answer = served.get(served.name + path)
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-store"
    assert served.get("/metrics").status == 200


def test_a_step_is_served_or_named(served: Served) -> None:
    served.write(len(served.lines))
    with served.frames() as viewer:
        steps = [step for frame in read_to_the_end(viewer) for step in frame["steps"]]
    answer = served.get(f"{served.name}step/{steps[-1][0]}")
    assert json.loads(answer.read())["step"] == steps[-1]
    answer = served.get(f"{served.name}step/99999999")
    assert answer.status == 404
    assert answer.read() == b"step 99999999 is no longer kept"


def test_a_range_is_shown_sent_or_named(served: Served) -> None:
    shown = served.get(f"{served.name}perfetto/1/7")
    assert (shown.status, shown.headers["Location"]) == (303, "http://127.0.0.1:1/7")
    sent = served.get(f"{served.name}perfetto/2/7")
    assert sent.read() == Path(__file__).read_bytes()
    assert sent.headers["Content-Disposition"] == 'attachment; filename="2-7.py"'
    unknown = served.get(f"{served.name}perfetto/3/7")
    assert (unknown.status, unknown.read()) == (404, b"no step ended from second 3 to 7")
    for wrong in ("perfetto/1/x", "perfetto/-1/2", "perfetto/1", "perfetto/../page.js"):
        assert served.get(served.name + wrong).status == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1.evil.example"},
    ],
)
def test_other_pages_and_names_get_nothing(served: Served, headers: dict[str, str]) -> None:
    for path in (served.name, "/metrics", f"{served.name}step/1", f"{served.name}perfetto/1/2"):
        assert served.get(path, **headers).status == 421
    if "Origin" in headers:
        with pytest.raises(InvalidHandshake):
            served.frames(**headers)


def test_without_its_name_nothing_of_the_session_is_served(served: Served) -> None:
    for path in ("/", "/page.js", "/frames", "/step/1", "/perfetto/1/2", "/../etc/passwd"):
        assert served.get(path).status == 404
    with pytest.raises(InvalidHandshake):
        connect(f"ws://127.0.0.1:{served.server.port}/frames")


def test_what_a_viewer_sends_is_ignored(served: Served) -> None:
    with served.frames() as viewer:
        read(viewer)
        viewer.send("text")
        viewer.send(b"bytes")
        served.write(1)
        assert read(viewer)["frame"] > 0


@pytest.mark.native
def test_nothing_is_up_once_the_program_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody closed its log."""
    monkeypatch.setattr(runs, "SILENT_S", 0.1)
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as writer:
        events = events_of_this_process(3)
        assert isinstance(events[0], SessionStart)
        events[0].process.pid = writer.pid
        log = tmp_path / "it.log"
        log.write_bytes(encode(events[:-1]))
        with followed(log) as (session, _):
            while session.is_catching_up:
                time.sleep(0.01)
            while_it_runs = session.look(metrics_of)
            writer.communicate(b"\n")
            while session.over is None:
                time.sleep(0.01)
            afterwards = session.look(metrics_of)
    assert session.over == "not closed"
    assert while_it_runs["up",] == 1
    assert (afterwards["up",], afterwards["active_requests", "running"]) == (0, 0)
    assert afterwards["requests_total",] == while_it_runs["requests_total",] > 0


def test_a_port_in_use_is_named(served: Served) -> None:
    with pytest.raises(UsageError, match=r"--port \d+: Address already in use"):
        LiveServer(
            LiveSession(FollowedLog(served.log, threading.Event())), a_range, served.server.port
        )
