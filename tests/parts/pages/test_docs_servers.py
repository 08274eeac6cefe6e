"""The servers that the pages start: each gets requests while it is recorded, and Ctrl-C ends it.

A line is run as written on its page. It uses the default port, which another program may have, so
a variable that the server reads sets a free one.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import read_events
from tests.kit.commands_kit import Line, Place, one_line
from tests.kit.native_kit import DEMO
from tests.load.server import PATIENCE_S

pytestmark = pytest.mark.native

LLAMA = one_line("docs/how-to/run-a-server-for-weeks.md", "instr exec --log server.log ")
WORKERS = one_line(
    "docs/reference/commands.md", "instr exec --level verbose --log server-%p.log -- uvicorn "
)

RUNS = [LLAMA, WORKERS]

TOKENS = 8

APP = f"""\
import json, os
import llama_cpp

model = llama_cpp.Llama("model.gguf", n_ctx=64, n_threads=1, verbose=False)

async def app(scope, receive, send):
    assert scope["type"] == "http"
    usage = model("Once upon a time", max_tokens={TOKENS})["usage"]
    body = json.dumps({{"pid": os.getpid(), "tokens": usage["completion_tokens"]}}).encode()
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    await send({{"type": "http.response.body", "body": body}})
"""


@dataclass(frozen=True)
class Running:
    """A server that a line has started."""

    process: subprocess.Popen[bytes]
    port: int
    output: Path

    def ask(self, method: str, path: str, body: str | None = None) -> bytes:
        """The body of its answer, which is asked for until there is one."""
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < end:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
                assert answer.status == 200, content
                return content
            except ConnectionError:
                time.sleep(0.05)  # it does not listen yet
            finally:
                connection.close()
        raise AssertionError(f"no answer:\n{self.output.read_text(errors='replace')[-3000:]}")

    def press_ctrl_c(self) -> int:
        """What a terminal does: everything that was started gets the signal. The exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout=PATIENCE_S)


@contextmanager
def serving(line: Line, place: Place, variable: str) -> Iterator[Running]:
    """A server on a free port, which `variable` tells it; nothing of it is left afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    output = place.directory / "printed.txt"
    process = place.start(line, output, **{variable: str(port)})
    try:
        yield Running(process, port, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def place(tmp_path: Path, environment: dict[str, str]) -> Place:
    stock = tmp_path / "stock"
    stock.mkdir()
    shutil.copyfile(DEMO, stock / "model-F16.gguf")
    return Place(tmp_path / "place", stock, environment)


def test_the_servers_own_program_is_recorded_until_ctrl_c(place: Place) -> None:
    with serving(LLAMA, place, "PORT") as server:
        story = json.dumps({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0})
        answer = json.loads(server.ask("POST", "/v1/completions", story))
        assert server.press_ctrl_c() == 0
    assert place.laid == ["model.gguf"]
    assert [path.name for path in place.directory.glob("*.log")] == ["server.log"]
    sampled = read_events(place.directory / "server.log", "token")
    text = "".join(token["text"] for token in sampled)
    assert text.strip() == answer["choices"][0]["text"].strip() != ""
    assert check(place, "server.log").returncode == 0


def test_every_worker_has_a_log_of_its_own(place: Place) -> None:
    """Ctrl-C reaches the workers, and their parent sends them SIGTERM as well: which of the two
    ends one is chance, and so is whether it closes its log (docs/explanation/accuracy.md)."""
    (place.directory / "app.py").write_text(APP)
    shutil.copyfile(DEMO, place.directory / "model.gguf")
    answers: Counter[str] = Counter()
    with serving(WORKERS, place, "UVICORN_PORT") as server:
        end = time.monotonic() + PATIENCE_S
        while len(answers) < 4 and time.monotonic() < end:
            answer = json.loads(server.ask("GET", "/"))
            assert answer["tokens"] == TOKENS
            answers[f"server-{answer['pid']}.log"] += TOKENS
        while tokens_in(place, answers) != answers and time.monotonic() < end:
            time.sleep(0.05)
        assert server.press_ctrl_c() == 0
    assert len(answers) == 4
    assert {path.name for path in place.directory.glob("*.log")} == set(answers)
    assert tokens_in(place, answers) == answers
    for log in answers:
        assert read_events(place.directory / log, "session_start")[0]["level"] == "verbose"
    found = check(place, *answers).stdout
    ends = [line.partition(":")[2].lstrip("0123456789: ") for line in found.splitlines()]
    assert set(ends) <= {"clean", "was not closed: no session_end"}, found


def tokens_in(place: Place, logs: Iterable[str]) -> dict[str, int]:
    """Also of logs whose last line is being written."""
    token = b'{"event":"token"'
    return {log: (place.directory / log).read_bytes().count(token) for log in logs}


def check(place: Place, *logs: str) -> subprocess.CompletedProcess[str]:
    return place.run_script(f"instr check {' '.join(logs)}")
