"""Runs a recorded server and a plain one under the same load, and reports the results.

Every client sends the same request to both servers, one after the other, so that both answer
equally many requests at the same time. The correct answers come from the unpatched library. Time
during which the machine was stopped does not count.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

from tests.kit.native_kit import ROOT, unpatched_library
from tests.load.account import Matched, Outcome, Recording, match_answers, read_recording
from tests.load.client import Answer, ask
from tests.load.live import LiveView
from tests.load.mix import EMBEDDINGS, Request, requests_of
from tests.load.server import Server

SAMPLE_S = 0.5
PENDING = 4 * 1024 * 1024
"""bytes by which a part may exceed the limit: what is recorded while the recorder's thread sleeps,
a tenth of a second, or has no CPU"""
SHOWN = 10
"""problems of one kind that are shown"""


def growth(values: Sequence[int]) -> int:
    """From the middle to the end; medians of tenths."""
    tenth, half = max(1, len(values) // 10), values[len(values) // 2 :]
    return round(statistics.median(half[-tenth:]) - statistics.median(half[:tenth])) if half else 0


@dataclass(frozen=True)
class Expected:
    """The unpatched library's answer to a request."""

    answer: Answer
    outcome: Outcome | None
    """what the log must contain about it; None for nothing"""


@dataclass
class Held:
    """What was done and observed."""

    clients: int
    seconds: float = 0
    requests: int = 0
    """requests to the recorded server; the plain one got the same"""
    hung_up: int = 0
    refused: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    differing: int = 0
    """answers of either server that differ from the unpatched library's"""
    memory: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    """samples of the servers `recorded` and `plain`"""
    recording: Recording | None = None
    matched: Matched | None = None
    live: LiveView | None = None
    """of the recorded server, if it was shown"""
    problems: list[str] = field(default_factory=list)

    def growth(self, server: str, what: str = "Private_Dirty") -> int:
        """Growth of a server in bytes in the second half, from medians of tenths of the samples."""
        return growth([sample[what] for sample in self.memory[server]])

    def last(self, server: str, what: str = "Private_Dirty") -> int:
        """Bytes at the end, as a median."""
        values = [sample[what] for sample in self.memory[server]]
        return round(statistics.median(values[-max(1, len(values) // 10) :]))


def hold(
    directory: Path, seconds: float, clients: int, rotate: int, tell: Callable[[str], None],
    live: bool = False,
) -> Held:  # fmt: skip
    """Run everything in the empty directory `directory`, with parts of `rotate` bytes: for
    `seconds`, and until every client has sent all its requests. `tell` gets a line per stage.
    `live` shows the recorded server meanwhile."""
    mix = [requests_of(client) for client in range(clients)]
    held = Held(clients)
    log = directory / "server.log"
    with ExitStack() as stack:
        under = ("exec", "--log", str(log), "--level", "detailed", "--rotate", str(rotate), "--")
        instr = (sys.executable, "-m", "llamacpp_instr", *under)
        unpatched, recorded, plain = (
            stack.enter_context(server)
            for server in (
                Server(directory / "unpatched.txt", library=unpatched_library()),
                Server(directory / "recorded.txt", under=instr),
                Server(directory / "plain.txt"),
            )
        )
        for server in (unpatched, recorded, plain):
            server.wait_until_it_answers()
        tell("asking the unpatched library")
        expected = ask_everything(unpatched, mix)
        unpatched.stop()
        if live:
            held.live = LiveView(directory)
            held.live.start(log)
        tell("asking the recorded server and the plain one")
        _load(held, {"recorded": recorded, "plain": plain}, mix, expected, seconds, tell)
        tell("stopping")
        for name, server in (("recorded", recorded), ("plain", plain)):
            if (code := server.stop(signal.SIGINT)) != 0:
                held.problems.append(f"the {name} server ended with {code}")
        if held.live:
            held.live.stop()
            held.memory["live"] = held.live.memory
    del held.problems[SHOWN:]
    tell("checking the log")
    held.recording = read_recording(log)
    held.problems += held.recording.wrong[:SHOWN]
    if held.live:
        held.live.check(held.recording)
        held.problems += held.live.problems[:SHOWN]
    held.matched = match_answers(held.recording, held.outcomes)
    held.problems += held.matched.wrong[:SHOWN]
    held.problems += check_sizes(held.recording.n_bytes, rotate)
    for part in held.recording.parts:
        checked = subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", "check", str(part)],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if checked.returncode != 0:
            held.problems.append(f"instr check {part.name}: {checked.stdout}{checked.stderr}")
    if "llama-instr:" in recorded.text():
        held.problems.append(f"the recorder complained:\n{recorded.text()}")
    return held


def check_sizes(n_bytes: list[int], rotate: int) -> list[str]:
    """The errors in the sizes of a log's parts."""
    return [
        f"part {number} has {size:,} bytes, for parts of {rotate:,}"
        for number, size in enumerate(n_bytes, 1)
        if size > rotate + PENDING or (size < rotate and number < len(n_bytes))
    ]


def ask_everything(server: Server, mix: list[list[Request]]) -> dict[Request, Expected]:
    """A server's answer to each request, with all clients at once."""
    expected: dict[Request, Expected] = {}

    def client(requests: list[Request]) -> None:
        for request in requests:
            answer = ask(server, replace(request, leave_after=None))
            outcome = None
            if answer.status == 200 and request.evaluates:
                whole = ask(server, request.whole()) if request.streams else answer
                assert whole.text == answer.text
                outcome = _outcome(request, whole)
            expected[request] = Expected(answer, outcome)

    with ThreadPoolExecutor(len(mix)) as clients:
        list(clients.map(client, mix))  # raises what one of them raised
    return expected


def _outcome(request: Request, whole: Answer) -> Outcome:
    if request.path == EMBEDDINGS:
        return Outcome(whole.usage("prompt_tokens"), 0, "", False)
    return Outcome(
        whole.usage("prompt_tokens"),
        whole.usage("completion_tokens"),
        whole.text,
        whole.finished == "stop",
    )


def _load(
    held: Held,
    servers: dict[str, Server],
    mix: list[list[Request]],
    expected: dict[Request, Expected],
    seconds: float,
    tell: Callable[[str], None],
) -> None:
    lock = threading.Lock()
    over, failed, finished = (threading.Event() for _ in range(3))

    def client(requests: list[Request]) -> None:
        try:
            for n, request in enumerate(cycle(requests)):
                if failed.is_set() or (over.is_set() and n >= len(requests)):
                    return
                for name in sorted(servers, reverse=n % 2 == 1):
                    answer = ask(servers[name], request)
                    with lock:
                        take_answer(held, name, request, answer, expected[request])
        except Exception as error:
            failed.set()
            with lock:
                held.problems.append(f"a client failed: {error!r}")

    def sampler() -> None:
        at, minute = time.monotonic(), 0
        while not finished.wait(SAMPLE_S):
            for name, server in servers.items():
                # the clients report a server that is gone
                with suppress(OSError):
                    held.memory.setdefault(name, []).append(server.memory())
            now = time.monotonic()
            # after a longer pause, this process or all of them had been stopped
            held.seconds += min(now - at, 4 * SAMPLE_S)
            at = now
            if held.seconds >= seconds:
                over.set()
            if held.seconds // 60 > minute:
                minute += 1
                tell(f"{minute} min, {held.requests:,} requests")

    watch = threading.Thread(target=sampler)
    watch.start()
    try:
        with ThreadPoolExecutor(len(mix)) as clients:
            list(clients.map(client, mix))  # raises what one of them raised
    finally:
        finished.set()
        watch.join()


def take_answer(
    held: Held, name: str, request: Request, answer: Answer, expected: Expected
) -> None:
    """Count an answer of the server `name`, and compare it with the expected one."""
    whole = expected.answer.pieces
    pieces = whole if request.leave_after is None else whole[: request.leave_after]
    if (answer.status, answer.pieces) != (expected.answer.status, pieces):
        held.problems.append(f"{name} answers {request} with {answer}, not {pieces}")
        held.differing += 1
    if name != "recorded":
        return
    held.requests += 1
    held.refused += answer.status >= 400
    held.hung_up += request.leave_after is not None
    if expected.outcome is not None:
        left = request.leave_after is not None
        seen = answer.text if left else ""
        held.outcomes[replace(expected.outcome, left=left, seen=seen)] += 1
