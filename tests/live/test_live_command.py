"""`instr live`: what it shows of a real recording, and what it refuses."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import Instr, assert_refused
from tests.kit.commands_kit import Line, one_line
from tests.kit.native_kit import ROOT
from tests.live.followed_logs import open_log

pytestmark = pytest.mark.native
RECORDED = ROOT / "tests" / "fixtures" / "every-event.log"
RUNS = [
    one_line("docs/reference/commands.md", "instr live session.log"),
    one_line("docs/reference/commands.md", "instr live server.log --port 8123 --no-browser"),
]


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.text)
def test_the_examples_work(line: Line, tmp_path: Path) -> None:
    """As a reader types them, with a port that is free; a browser is a program that the environment
    names."""
    name = next(word for word in line.text.split() if word.endswith(".log"))
    log, _ = open_log(tmp_path, name)
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {opened}.part && mv {opened}.part {opened}\n")
    browser.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = line.text.replace("8123", str(port)).split()[1:]
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *words],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "BROWSER": str(browser), "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        metrics = process.stdout.readline().split()[-1]
        for url in (address, metrics):
            place = urlsplit(url)
            connection = http.client.HTTPConnection(place.netloc, timeout=100)
            connection.request("GET", place.path)
            assert connection.getresponse().status == 200
        end = time.monotonic() + 300
        while "--no-browser" not in line.text and not opened.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM if "--port" in line.text else signal.SIGINT)
        assert process.wait(120) == 0
    if "--no-browser" in line.text:
        assert not opened.exists()
    else:
        assert opened.read_text().strip() == address
    if "--port" in line.text:
        assert urlsplit(address).port == port
    assert log.stat().st_size > 0


def test_a_log_that_nobody_writes_is_refused(instr: Instr, tmp_path: Path) -> None:
    assert_refused(instr("live", RECORDED), "no longer written", "instr summary")
    assert_refused(instr("live", "nothing.log"), "nothing.log: no such file")
    (tmp_path / "text.log").write_text("Hello\n")
    assert_refused(instr("live", "text.log"), "text.log: not a log")
    assert_refused(instr("live", tmp_path), "is a directory, not a log")
    os.mkfifo(tmp_path / "pipe")
    for pipe in ("-", "pipe"):
        assert_refused(instr("live", pipe), f"{pipe}: only a file can be followed")


def test_a_port_in_use_is_refused(instr: Instr, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = instr("live", open_log(tmp_path)[0], "--port", port)
    assert_refused(refused, f"--port {port}: Address already in use")
