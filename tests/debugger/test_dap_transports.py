"""The debug adapter at its pipes and ports: who is served, what leaves it, and how it ends."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from llamacpp_instr.debugger.dap.transports import read_message, write_message
from llamacpp_instr.recording.session import shortcoming
from tests.conftest import Instr
from tests.kit import dap_kit
from tests.kit.dap_kit import Client, Refused, is_whole, launch, piped, served

pytestmark = pytest.mark.native


def test_the_text_is_output_and_nothing_else_leaves_the_program(
    instr: Instr, tmp_path: Path
) -> None:
    text = instr("run", "demo", "--prompt", "Once upon a time", "-n", 8).stdout
    assert text
    with piped(tmp_path) as (client, process):
        launch(client, n=8)  # the client fails on any other byte
        printed = [
            body["output"]
            for name, body in client.events
            if name == "output"
            if body["category"] == "stdout"
        ]
        client.request("disconnect")
        assert process.wait(dap_kit.WAIT) == 0
    assert "".join(printed) == text


@pytest.mark.parametrize("how", ["end of input", "SIGTERM"])
def test_the_log_is_whole_however_the_client_leaves(how: str, tmp_path: Path) -> None:
    with piped(tmp_path) as (client, process):
        launch(client, stopOnEntry=True, n=100_000, ctx=16384)
        client.request("continue")
        client.wait_for("output")
        if how == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            assert process.stdin is not None
            process.stdin.close()
        process.wait(dap_kit.WAIT)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    assert is_whole(tmp_path / "debug.log")


def test_a_launch_is_refused_with_one_line_and_can_be_tried_again(tmp_path: Path) -> None:
    with piped(tmp_path) as (client, _):
        client.request("initialize")
        with pytest.raises(Refused, match=r"^absent\.gguf does not exist; give a GGUF file"):
            client.request("launch", prompt="a", model="absent.gguf")
        assert list(tmp_path.iterdir()) == []
        client.request("launch", prompt="a", n=1)
        client.request("configurationDone")
        assert client.wait_for("exited") == {"exitCode": 0}


def test_a_client_that_does_not_page_gets_long_tensors_in_groups(tmp_path: Path) -> None:
    with piped(tmp_path) as (client, _):
        client.request("initialize")
        client.request("setFunctionBreakpoints", breakpoints=[{"name": "result_output"}])
        client.request("launch", prompt="a", n=1)
        client.request("configurationDone")
        client.wait_for("stopped")
        result = dap_kit.scope(client, "Result")
        found = client.request("variables", variablesReference=result["variablesReference"])
        groups = [one for one in found["variables"] if one["name"].startswith("[")]
        assert groups[0]["name"] == "[0…99]"
        assert groups[-1]["name"] == "[1000…1023]"
        last = client.request("variables", variablesReference=groups[-1]["variablesReference"])
        assert [one["name"] for one in last["variables"]] == [f"[{i}]" for i in range(1000, 1024)]
        reference = groups[-1]["variablesReference"]
        client.request("setVariable", variablesReference=reference, name="[1001]", value="5")
        with pytest.raises(Refused, match="cannot be set; an element"):
            client.request("setVariable", variablesReference=reference, name="[3]", value="5")


def test_a_run_without_debugging_never_stops(tmp_path: Path) -> None:
    with piped(tmp_path) as (client, _):
        client.request("initialize")
        client.request("setFunctionBreakpoints", breakpoints=[{"name": "ffn_out-*"}])
        client.request("launch", prompt="a", n=3, stopOnEntry=True, noDebug=True)
        client.request("configurationDone")
        client.wait_for("terminated")
        assert [name for name, _ in client.events if name == "stopped"] == []


def test_terminating_ends_the_run_and_reports_it(tmp_path: Path) -> None:
    with piped(tmp_path) as (client, process):
        launch(client, stopOnEntry=True, n=100_000, ctx=16384)
        client.request("terminate")
        assert client.wait_for("exited") == {"exitCode": 0}
        assert client.wait_for("terminated") == {}
        assert is_whole(tmp_path / "debug.log")
        client.request("disconnect")
        assert process.wait(dap_kit.WAIT) == 0


def test_requests_out_of_place_are_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    with piped(tmp_path) as (client, _):
        with pytest.raises(Refused, match="not stopped"):
            client.request("stackTrace")
        with pytest.raises(Refused, match="no request is called 'frobnicate'"):
            client.request("frobnicate")
        launch(client, stopOnEntry=True)
        for command, arguments, why in (
            ("variables", {"variablesReference": 99999}, "not belong to this stop"),
            ("scopes", {"frameId": 9}, "no frame 9"),
            ("source", {"sourceReference": 9}, "does not exist"),
            ("next", {"granularity": "page"}, "'page' is not one of"),
            ("setExceptionBreakpoints", {"filters": ["all"]}, "no exception filter 'all'"),
            ("evaluate", {"expression": "__import__('os')"}, "no tensor"),
            ("launch", {"prompt": "a"}, "is already running"),
        ):
            with pytest.raises(Refused, match=why):
                client.request(command, **arguments)
        points = [{"name": "nothing-7"}, {"name": "block=head"}, {"name": "* if x > 1"}]
        placed = client.request("setFunctionBreakpoints", breakpoints=points)["breakpoints"]
        assert [one["verified"] for one in placed] == [False] * 3
        assert "no op of the graph matches" in placed[0]["message"]


def test_a_wrong_message_ends_the_connection_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        dap_kit.command("demo", "--dap"), cwd=tmp_path, input=b"GET / HTTP/1.1\r\n\r\n",
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert b"is not the header of a message" in done.stderr


def _ask_without_reading(out: BinaryIO | socket.SocketIO, n: int, **options: object) -> None:
    launched = {"prompt": "Once upon a time", "n": n, "ctx": 16384, "threads": 1, **options}
    for number, (command, arguments) in enumerate(
        [("initialize", {}), ("launch", launched), ("configurationDone", {})]
    ):
        request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        write_message(out, request)


def test_a_client_that_does_not_read_does_not_hold_the_run(tmp_path: Path) -> None:
    log = tmp_path / "debug.log"
    with subprocess.Popen(
        dap_kit.command("demo", "--dap"), cwd=tmp_path, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, bufsize=0,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        _ask_without_reading(process.stdin, 1500)
        until = time.monotonic() + dap_kit.WAIT
        while not log.exists() or shortcoming(log):
            assert time.monotonic() < until, "the run is held up"
            time.sleep(0.1)
        process.stdin.close()
        assert process.wait(dap_kit.WAIT) == 0
    assert is_whole(log)


def test_a_client_of_a_port_that_does_not_read_leaves_it_to_the_next(tmp_path: Path) -> None:
    with served(tmp_path) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(dap_kit.WAIT)
        source, out = connection.makefile("rb"), connection.makefile("wb", buffering=0)
        _ask_without_reading(out, 3, stopOnEntry=True)
        while (message := read_message(source)) and message.get("event") != "stopped":
            pass
        request = {"type": "request", "command": "source", "arguments": {"sourceReference": 1}}
        with contextlib.suppress(ConnectionError):
            for number in range(12_000):  # more than the system and the adapter keep for it
                write_message(out, request | {"seq": number})
        with (
            socket.create_connection(("127.0.0.1", port)) as other,
            other.makefile("rb") as source,
            other.makefile("wb") as out,
        ):
            client = Client(source, out)
            assert client.request("initialize")
            client.request("disconnect")
    assert is_whole(tmp_path / "debug.log")


def test_a_port_serves_one_client_after_the_other_and_no_browser(tmp_path: Path) -> None:
    with served(tmp_path) as port:
        with socket.create_connection(("127.0.0.1", port)) as browser:
            browser.sendall(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert browser.recv(1) == b"", "closed without a word"
        for log in ("a.log", "b.log"):
            with (
                socket.create_connection(("127.0.0.1", port)) as connection,
                connection.makefile("rb") as source,
                connection.makefile("wb") as out,
            ):
                client = Client(source, out)
                launch(client, stopOnEntry=True, log=log)
                client.request("disconnect")
            assert is_whole(tmp_path / log)


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            dap_kit.command("demo", "--dap-port", str(port)), cwd=tmp_path,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"port {port} cannot be used" in done.stderr
    assert done.stderr.count("\n") == 1
