"""One debugged run for any number of browsers: an answer goes to who asked, an event to all.

Invariant: a browser that comes, or comes back, first gets `instr/state`, which sums up the
events so far; so a page that is loaded again shows the same stop.
"""

from __future__ import annotations

import shlex
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.dap.adapter import Adapter
from llamacpp_instr.debugger.dap.framing import ProtocolError

Json = dict[str, Any]
Send = Callable[[bytes], None]
"""gives a message to one browser; called from any thread, and never waits"""

TEXT_KEPT = 1 << 16
"""characters of the generated text, its end"""
LINES_KEPT = 200
_CHANGES = ("set", "zero", "scale", "noise", "replace", "ablate")
_GOES_ON = ("continue", "next", "stepIn", "stepOut")


class SharedRun:
    """A debug adapter that all browsers share; it is the adapter's client."""

    def __init__(
        self, make: Callable[[Callable[[Json], None]], Adapter], has_weights: bool = False
    ) -> None:
        self.adapter = make(self._send)
        self._has_weights = has_weights
        self.exit_code = 0
        """of the run, once it has ended"""
        self.problem = ""
        """why it failed, empty if it did not"""
        self.on_quit: Callable[[], None] = lambda: None
        """called when a browser ends the session, before the run is ended"""
        self._started = threading.Event()
        self._requests = threading.Lock()  # held by who is answered
        self._asking: Send | None = None
        self._latest: Json | None = None
        self._lock = threading.RLock()  # of what follows
        self._browsers: list[Send] = []
        self._text = ""
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        """about the run, not what the model generates"""
        self._stopped: Json | None = None
        self._over = False
        self._breakpoints: Json = {"lines": {}, "functions": [], "filters": []}
        self._changes: list[str] = []
        self._comparison: Json | None = None

    @property
    def is_over(self) -> bool:
        """Whether a browser has ended the session."""
        return self.adapter.is_over

    def start(self, arguments: Json, breakpoints: Sequence[str], wait: bool = True) -> None:
        """Launch the run and, to `wait`, wait until its first compute begins. Raises `UsageError`
        if it is refused, or ends before."""
        self._ask("initialize", {"supportsVariablePaging": True})
        self._ask("launch", arguments)
        wanted = [{"name": text} for text in breakpoints]
        self._ask("setFunctionBreakpoints", {"breakpoints": wanted})
        self._ask("configurationDone", {})
        if wait:
            self._started.wait()
        if self.problem:
            raise UsageError(self.problem)

    def close(self) -> None:
        """End the run, and wait until its log is whole."""
        self.adapter.close()

    def join(self, browser: Send) -> None:
        """Add a browser, and tell it what has happened so far."""
        with self._lock:
            self._browsers.append(browser)
            browser(_event("instr/state", self._state()))

    def leave(self, browser: Send) -> None:
        """It gets nothing any more."""
        with self._lock:
            self._browsers = [one for one in self._browsers if one is not browser]

    def handle(self, browser: Send, data: str) -> None:
        """Answer a message of a browser. Raises `ProtocolError` if it is none."""
        try:
            message = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"a message is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ProtocolError("a message is not a JSON object")
        answer = self._answer(message, browser)
        if answer is not None and answer["success"]:
            self._note(answer["command"], message.get("arguments"), browser)

    def tell(self, name: str, body: Json) -> None:
        """Send an event of our own to every browser."""
        with self._lock:
            if name == "instr/comparison":
                self._comparison = body
            for browser in self._browsers:
                browser(_event(name, body))

    # --- between the browsers and the adapter ---

    def _ask(self, command: str, arguments: Json) -> None:
        """Raises `UsageError` with the adapter's reason if it refuses."""
        message = {"seq": 0, "type": "request", "command": command, "arguments": arguments}
        answer = self._answer(message, lambda _data: None)
        assert answer is not None
        if not answer["success"]:
            raise UsageError(answer["message"].removeprefix("launch: "))
        self._note(command, arguments, None)

    def _answer(self, message: Json, browser: Send) -> Json | None:
        if message.get("command") == "disconnect":
            self.on_quit()
        with self._requests:
            self._asking, self._latest = browser, None
            try:
                self.adapter.handle(message)
            finally:
                self._asking = None
            return self._latest

    def _send(self, message: Json) -> None:
        """What the adapter says, from its own threads."""
        data = msgspec.json.encode(message)
        if message["type"] == "response":
            self._latest = message
            if message["success"] and message["command"] in _GOES_ON:
                # before it goes on: the next stop may come at once
                with self._lock:
                    self._stopped = None
                    self._tell_others("continued", {"threadId": 1}, self._asking)
            if self._asking is not None:
                self._asking(data)
            return
        with self._lock:
            self._keep(message["event"], message.get("body") or {})
            for browser in self._browsers:
                browser(data)

    def _keep(self, event: str, body: Json) -> None:
        if event == "output" and body["category"] == "stdout":
            self._text = (self._text + body["output"])[-TEXT_KEPT:]
        elif event == "output":
            self.lines.append(body["output"].rstrip("\n"))
            if body["category"] == "stderr" and not self._started.is_set():
                self.problem = body["output"].strip().removeprefix("Error: ")
        elif event == "stopped":
            self._stopped = body
        elif event == "continued":
            self._stopped = None
        elif event == "exited":
            self._over, self._stopped, self.exit_code = True, None, body["exitCode"]
        if event in ("loadedSource", "exited"):
            self._started.set()

    def _note(self, command: str, arguments: Any, browser: Send | None) -> None:
        """Keep what a request has done, and tell it to the other browsers."""
        given = arguments or {}
        with self._lock:
            if command == "setBreakpoints":
                reference = str(given["source"].get("sourceReference", ""))
                self._breakpoints["lines"][reference] = given.get("breakpoints", [])
            elif command == "setFunctionBreakpoints":
                self._breakpoints["functions"] = given.get("breakpoints", [])
            elif command == "setExceptionBreakpoints":
                self._breakpoints["filters"] = given.get("filters", [])
            elif command == "evaluate" and _first_word(given["expression"]) in _CHANGES:
                self._changes.append(given["expression"].strip())
                self.tell("instr/changes", {"changes": self._changes})
            if command.endswith("Breakpoints"):
                self._tell_others("instr/breakpoints", self._breakpoints, browser)

    def _tell_others(self, name: str, body: Json, browser: Send | None) -> None:
        for other in self._browsers:
            if other is not browser:
                other(_event(name, body))

    def _state(self) -> Json:
        return {
            "text": self._text, "lines": list(self.lines), "stopped": self._stopped,
            "over": self._over, "exitCode": self.exit_code, "breakpoints": self._breakpoints,
            "changes": self._changes, "comparison": self._comparison,
            "weights": self._has_weights,
        }  # fmt: skip


def _event(name: str, body: Json) -> bytes:
    return msgspec.json.encode({"seq": 0, "type": "event", "event": name, "body": body})


def _first_word(text: str) -> str:
    try:
        return (shlex.split(text) or [""])[0]
    except ValueError:
        return ""
