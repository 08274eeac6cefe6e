"""Clients of the debug adapter: Microsoft's own for tests, and one that writes its own bytes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from llamacpp_instr.log.check import check_log
from llamacpp_instr.recording.session import shortcoming
from tests.kit import ui_kit
from tests.kit.native_kit import ROOT

WAIT = 120
"""seconds that an answer may take on a busy machine; no test passes or fails by speed"""
Json = dict[str, Any]


class Refused(Exception):
    """The adapter answered a request with an error."""


class _Inbox:
    """The events of an adapter in order, and its answers by number."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Json]] = []
        self._answers: dict[int, Json] = {}
        self._changed = threading.Condition()
        self._seen = 0
        self.is_closed = False

    def event(self, name: str, body: Json) -> None:
        with self._changed:
            self.events.append((name, body))
            self._changed.notify_all()

    def answer(self, number: int, answer: Json) -> None:
        with self._changed:
            self._answers[number] = answer
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def wait_for(self, *names: str) -> Json:
        """The next event with one of these names, after the last one returned."""

        def at() -> int | None:
            later = range(self._seen, len(self.events))
            return next((i for i in later if self.events[i][0] in names), None)

        with self._changed:
            assert self._changed.wait_for(lambda: at() is not None or self.is_closed, WAIT)
            found = at()
            assert found is not None, f"the adapter ended without {names}: {self.events[-3:]}"
            self._seen = found + 1
            return self.events[found][1]

    def take(self, number: int) -> Json:
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers or self.is_closed, WAIT)
            assert number in self._answers, "the adapter ended without an answer"
            return self._answers.pop(number)


class Client(_Inbox):
    """A client over a pair of streams."""

    def __init__(self, source: BinaryIO, out: BinaryIO) -> None:
        super().__init__()
        self._source, self._out, self._seq = source, out, 0
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, command: str, arguments: Json | None = None) -> int:
        """Send a request; returns its number."""
        self._seq += 1
        message = {"seq": self._seq, "type": "request", "command": command}
        body = json.dumps(
            message | ({} if arguments is None else {"arguments": arguments})
        ).encode()
        self._out.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._out.flush()
        return self._seq

    def request(self, command: str, **arguments: Any) -> Json:
        """The body of the answer. Raises `Refused`."""
        answer = self.take(self.ask(command, arguments))
        if not answer["success"]:
            raise Refused(answer["message"])
        return answer.get("body") or {}

    def _listen(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while line := self._source.readline():
                assert line.startswith(b"Content-Length: "), line
                assert self._source.readline() == b"\r\n"
                message = json.loads(self._source.read(int(line.split()[1])))
                if message["type"] == "event":
                    self.event(message["event"], message.get("body") or {})
                else:
                    self.answer(message["request_seq"], message)
        self.close()


class MicrosoftClient(_Inbox):
    """`DebugClient` of `@vscode/debugadapter-testsupport`, in node."""

    def __init__(self, executable: Path) -> None:
        super().__init__()
        self._process = subprocess.Popen(
            ["node", "dap.mjs", "/bin/sh", str(executable)],
            cwd=ui_kit.KIT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._id = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, method: str, *arguments: Any) -> int:
        """Call a method of the client, without waiting for its end; returns its number."""
        assert self._process.stdin is not None
        self._id += 1
        call = {"id": self._id, "call": method, "arguments": arguments}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._id

    def end(self, number: int) -> Json:
        answer = self.take(number)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["body"] or {}

    def call(self, method: str, *arguments: Any) -> Json:
        return self.end(self.begin(method, *arguments))

    def request(self, command: str, **arguments: Any) -> Json:
        return self.call(f"{command}Request", arguments)

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "event" in message:
                self.event(message["event"], message.get("body") or {})
            else:
                self.answer(message["id"], message)
        self.close()


def command(model: str = "demo", *options: str) -> list[str]:
    """The adapter for a model, as an editor starts it."""
    return [sys.executable, "-m", "llamacpp_instr", "debug", model, *options]


@contextlib.contextmanager
def microsoft(directory: Path) -> Iterator[MicrosoftClient]:
    """Microsoft's client with an adapter that it has started in `directory`."""
    script = directory / "adapter.sh"
    words = " ".join(f"'{word}'" for word in command("demo", "--dap"))
    script.write_text(f"cd '{directory}' && PYTHONPATH='{ROOT}' exec {words} 2>adapter.txt\n")
    client = MicrosoftClient(script)
    try:
        client.call("start")
        yield client
    finally:
        client.leave()


@contextlib.contextmanager
def piped(directory: Path, *options: str) -> Iterator[tuple[Client, subprocess.Popen[bytes]]]:
    """A client of an adapter at pipes, and the adapter's process."""
    with subprocess.Popen(
        command("demo", "--dap", *options), cwd=directory, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Client(process.stdout, process.stdin), process
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait(WAIT)


def launch(client: Client | MicrosoftClient, **arguments: Any) -> Json:
    """Run the demo model on its usual prompt; returns the first event `stopped`."""
    can = {"supportsVariablePaging": True, "supportsVariableType": True}
    client.request("initialize", adapterID="llamacpp-instr", **can)
    client.wait_for("initialized")
    client.request("launch", **{"prompt": "Once upon a time", "n": 3, "threads": 1} | arguments)
    client.request("configurationDone")
    return client.wait_for("stopped", "terminated")


def is_whole(log: Path) -> bool:
    """Whether a log has an end and passes `instr check`."""
    return list(check_log(log)) == [] and shortcoming(log) == ""


def scope(client: Client | MicrosoftClient, name: str, frame: int = 1) -> Json:
    scopes = client.request("scopes", frameId=frame)["scopes"]
    return next(one for one in scopes if one["name"] == name)


def figures(client: Client | MicrosoftClient) -> dict[str, str]:
    """The named variables of the result."""
    reference = scope(client, "Result")["variablesReference"]
    found = client.request("variables", variablesReference=reference, filter="named")
    return {variable["name"]: variable["value"] for variable in found["variables"]}


@contextlib.contextmanager
def served(directory: Path, words: Sequence[str] = ()) -> Iterator[int]:
    """The port of an adapter that serves TCP; it is interrupted at the end."""
    with subprocess.Popen(
        words or command("demo", "--dap-port", "0"), cwd=directory, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT) == 0
