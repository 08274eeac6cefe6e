"""llama.cpp's own programs for tests: the recorded ones, a server, and its clients, which note the
answers and the times by their own clock."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from llamacpp_instr.llama.build.programs import build_programs

Prompt: TypeAlias = "str | dict[str, Any]"


@functools.cache
def programs() -> Path:
    """Directory of the recorded programs: that of `make test-edited`, or those of the patches;
    takes minutes unless they are in the cache."""
    edited = os.environ.get("EDITED_PROGRAMS")
    return Path(edited) if edited else build_programs()


@dataclass(frozen=True)
class Answer:
    """What a client saw of its request; times in ns, by the clock of the logs."""

    begin: int
    first: int
    """when the first text arrived, 0 for none"""
    end: int
    text: str
    timings: dict[str, Any]
    """of the server's last message, empty for a client that left"""


@dataclass(frozen=True)
class Server:
    port: int
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(
        self, prompt: Prompt, n: int, leave_after: float = math.inf, trace: str = "",
        leave: threading.Event | None = None, **options: Any,
    ) -> Answer:  # fmt: skip
        """Streams `n` tokens, greedily; the client leaves after `leave_after` s, or when
        `leave` is set. `trace` is its `traceparent`, `options` are the server's."""
        body = {
            "prompt": prompt, "n_predict": n, "temperature": 0, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            json.dumps(body | options).encode(),
            {"Content-Type": "application/json", "Traceparent": trace},
        )
        begin, first, end, text, timings = time.monotonic_ns(), 0, 0, [], {}
        with urllib.request.urlopen(asked, timeout=120) as lines:
            for line in lines:
                if line.startswith(b"data: "):
                    piece, end = json.loads(line[6:]), time.monotonic_ns()
                    if piece["content"]:
                        text.append(piece["content"])
                        first = first or end
                    timings = piece.get("timings", {}) if piece["stop"] else {}
                late = time.monotonic_ns() - begin > leave_after * 1e9
                if late or (leave is not None and leave.is_set()):
                    break
        return Answer(begin, first, end, "".join(text), timings)

    def with_images(self, prompt: str, *images: bytes) -> Prompt:
        """A prompt in which <image> stands for each of the images."""
        marker = json.loads(self.get("/props"))["media_marker"]
        data = [base64.b64encode(image).decode() for image in images]
        text = prompt.replace("<image>", marker)
        return {"prompt_string": text, "multimodal_data": data}

    def complete_all(
        self, prompts: Sequence[Sequence[Prompt]], n: Sequence[Sequence[int]]
    ) -> list[Answer]:
        """The answers to the prompts of each client, which asks one after the other."""

        def client(i: int) -> list[Answer]:
            return [self.complete(*of) for of in zip(prompts[i], n[i], strict=True)]

        with ThreadPoolExecutor(len(prompts)) as pool:
            return [answer for of in pool.map(client, range(len(prompts))) for answer in of]


@contextlib.contextmanager
def llama_server(
    model: Path,
    log: Path | None,
    *options: str,
    end: signal.Signals = signal.SIGTERM,
    rotate: int = 0,
) -> Iterator[Server]:
    """A llama-server that answers, recorded to `log` if one is given, in parts of `rotate` bytes,
    and ended by a signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        programs() / "llama-server",
        "-m",
        model,
        "--port",
        str(port),
        "--metrics",
        "-t",
        "2",
    ]
    settings = {"LLAMA_INSTR_LOG": str(log), "LLAMA_INSTR_ROTATE": str(rotate)} if log else {}
    with subprocess.Popen(
        [*command, *options], env={**os.environ, **settings}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        server = Server(port, process)
        assert process.stdout is not None
        with ThreadPoolExecutor(1) as reader:
            output = reader.submit(process.stdout.read)
            try:
                while True:
                    with contextlib.suppress(urllib.error.URLError, ConnectionError):
                        server.get("/health")
                        break
                    assert process.poll() is None, output.result().decode()
                    time.sleep(0.02)
                yield server
            finally:
                process.send_signal(end)
                process.wait(60)
