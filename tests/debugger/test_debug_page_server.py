"""The server of `instr debug --page`: who gets what, who gets nothing, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.sync.client import connect

from tests.kit.browser_kit import WAIT, debugged
from tests.kit.commands_kit import Line, one_line
from tests.kit.native_kit import ROOT

pytestmark = pytest.mark.native

PROMPT = "Once upon a time"
HOSTILE = "<img src=x onerror=alert(1)>"
RUNS = [
    one_line("docs/reference/commands.md", 'instr debug demo --prompt "Once upon a time" --page')
]


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.text)
def test_the_example_opens_the_page(line: Line, tmp_path: Path) -> None:
    """As a reader types it; a browser is a program that the environment names."""
    shown, program = tmp_path / "shown", tmp_path / "browser"
    os.mkfifo(shown)
    program.write_text(f"#!/bin/sh\necho $1 > {shown}\n")
    program.chmod(0o700)
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *shlex.split(line.text)[1:]],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "BROWSER": str(program), "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        address = process.stdout.readline()
        assert shown.read_text() == address
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0


def test_nobody_else_gets_in_and_nonsense_ends_only_its_connection(tmp_path: Path) -> None:
    with debugged(tmp_path, "demo", "-p", PROMPT) as run:
        address = run.address.replace("http:", "ws:") + "dap"
        place = urlsplit(address)
        with pytest.raises(InvalidStatus):
            connect(f"ws://{place.netloc}/dap")
        with pytest.raises(InvalidStatus):
            connect(f"ws://{place.netloc}/AAAAAAAAAAAAAAAAAAAAAA/dap")
        for origin in ("http://evil.example", "null"):
            with pytest.raises(InvalidHandshake):
                connect(address, additional_headers={"Origin": origin})
        for nonsense in ("[]", "{", '{"type":"request"}', b"\0"):
            with connect(address) as browser:
                assert json.loads(browser.recv())["event"] == "instr/state"
                browser.send(nonsense)
                assert list(browser) == []
        with connect(address) as browser:
            assert json.loads(browser.recv())["body"]["stopped"]["reason"] == "entry"
            for seq, (command, arguments) in enumerate(WRONG):
                message = {"seq": seq, "type": "request", "command": command}
                browser.send(json.dumps(message | {"arguments": arguments}))
                answer = json.loads(browser.recv())
                assert (answer["request_seq"], answer["success"]) == (seq, False)
                assert len(answer["message"].splitlines()) == 1
        os.kill(run.process.pid, signal.SIGINT)
        run.ended()


def test_an_answer_goes_to_the_page_that_asked_and_an_event_to_every_page(tmp_path: Path) -> None:
    with debugged(tmp_path, "demo", "-p", PROMPT) as run:
        address = run.address.replace("http:", "ws:") + "dap"
        with connect(address) as one, connect(address) as other:
            assert one.recv() == other.recv()
            step = {"command": "stepIn", "arguments": {"threadId": 1}}
            one.send(json.dumps({"seq": 7, "type": "request", **step}))
            mine, theirs = ([json.loads(page.recv()) for _ in range(2)] for page in (one, other))
            assert [message.get("request_seq") for message in mine] == [7, None]
            assert [message.get("event") for message in theirs] == ["continued", "stopped"]
            assert mine[1] == theirs[1]
            with connect(address) as later:
                state = json.loads(later.recv())["body"]
            assert state["stopped"] == mine[1]["body"]
        run.process.send_signal(signal.SIGINT)
        run.ended()


def test_a_page_that_does_not_read_does_not_hold_the_end(tmp_path: Path) -> None:
    with (
        debugged(tmp_path, "demo", "-p", PROMPT) as run,
        connect(run.address.replace("http:", "ws:") + "dap") as browser,
    ):
        source = {"command": "source", "arguments": {"sourceReference": 1}}
        for seq in range(2000):  # more than the system keeps for it
            browser.send(json.dumps({"seq": seq, "type": "request", **source}))
        browser.send(json.dumps({"seq": 9999, "type": "request", "command": "disconnect"}))
        run.ended()


WRONG = [
    ("instr/lens", {"token": "x"}), ("instr/lens", {"token": 99}), ("instr/lens", {"top": 0}),
    ("instr/attention", {"layer": 99}), ("instr/attention", {"layer": []}), ("instr/next", {}),
    ("instr/tensor", {"name": HOSTILE}), ("launch", {}), ("nothing", None), ("setBreakpoints", []),
    ("evaluate", {"expression": "zero x[9]", "context": "repl"}),
]  # fmt: skip
