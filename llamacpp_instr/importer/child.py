"""A child process for work with PyTorch: it gets a request, and what it answers is followed.

Invariant: nothing that happens to the child ends this process. `importer.serving` is the other
side: the request is a line of JSON on the child's standard input, answers are lines of JSON on its
standard output, what libraries say goes to a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamacpp_instr.errors import InstrError, UsageError
from llamacpp_instr.isolated import python
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.terminal import printable, shortened

_TICK_SECONDS = 0.5


class ChildFailed(Exception):
    """An exception ended the child's work. As text, its reason in one line."""

    def __init__(self, name: str, text: str, number: int | None) -> None:
        reason = next((line.strip() for line in text.splitlines() if line.strip()), name)
        if name in ("KeyError", "AssertionError", "AttributeError", "TypeError", "IndexError"):
            reason = f"{name}: {reason}" if reason != name else name
        super().__init__(printable(shortened(reason)))
        self.text = text
        """the whole text of the exception"""
        self.number = number
        """`errno` of the exception, if it has one"""


class ChildDied(Exception):
    """The child ended without an answer. As text, how it ended and the last line of its log."""


def run_child(module: str, request: dict[str, Any], log: Path, on_progress: OnProgress) -> Any:
    """Runs `main` of a module in a child process, and returns what its work returned.

    `log` gets what the child writes to standard error. Raises `ChildFailed`, `ChildDied`, and the
    UsageError or InstrError that the child raised.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            python(f"from {module} import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Ctrl-C is for this process, which then ends the child
            start_new_session=True,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
    assert process.stdin
    try:
        with contextlib.suppress(BrokenPipeError):  # the child died: its answers tell why
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        done = total = 0
        for kind, *values in _answers(process):
            if kind == "progress":
                done, total = values
            elif kind == "error":
                raise (UsageError if values[1] == 2 else InstrError)(values[0])
            elif kind == "failed":
                raise ChildFailed(*values)
            elif kind == "done":
                return values[0]
            on_progress(done, total)
        raise ChildDied(_death(process.wait(), log))
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass


def _answers(process: subprocess.Popen[bytes]) -> Iterator[list[Any]]:
    """The answers of the child until it ends, and `["tick"]` while there is none."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            yield ["tick"]
            continue
        if not line:
            return
        yield json.loads(line)


def _death(code: int, log: Path) -> str:
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = printable(shortened(said[-1].strip())) if said else "without a message"
    return f"({how}): {last}"
