"""A child process that works on requests, and what it reports while it works.

Requests are lines of JSON on its standard input, answers are lines of JSON on its standard output;
what libraries print goes to its standard error. Invariant: nothing that happens to the child ends
this process. When its standard input ends, the child removes unfinished output and ends at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from llamacpp_instr.base.errors import InstrError, error_named
from llamacpp_instr.base.processes import no_core_dump
from llamacpp_instr.base.system import python
from llamacpp_instr.base.terminal import OnProgress, printable, shortened

_TICK_SECONDS = 0.5
_KEPT = 4000
"""characters that are kept from the end of standard error"""

Answer = Callable[..., None]
Request = dict[str, Any]
C = TypeVar("C", bound="Child")


class ChildFailed(Exception):
    """An exception ended the child's work. Its text is the reason, in one line."""

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
    """The child ended without an answer. Its text says how, and has the last line it printed."""


class Child:
    """The process, in a `with` block: `main` of `module` calls `serve`; `log` gets its stderr."""

    def __init__(self, module: str, log: Path | None = None) -> None:
        self._module, self._log = module, log
        self._stderr = ""

    def __enter__(self: C) -> C:
        log = self._log.open("wb", buffering=0) if self._log else None
        self.process = subprocess.Popen(
            python(f"from {self._module} import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            # Ctrl-C is for this process, which then ends the child
            start_new_session=True,
            env={
                **os.environ,
                # otherwise ggml starts a debugger to print the stack, which takes seconds
                "GGML_NO_BACKTRACE": "1",
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, args=(log,), daemon=True)
        self._listener.start()
        threading.Thread(target=self._receive, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self._listener.join()
        # closing the pipe would write a request that the child did not take
        with contextlib.suppress(BrokenPipeError), self.process:
            pass

    def ask(
        self,
        request: Request,
        on_progress: OnProgress,
        on_log: Callable[[int, str], object] = lambda _level, _line: None,
    ) -> Any:
        """What the work on a request returns.

        `on_progress` gets its progress, repeatedly while that does not change; `on_log` gets the
        level and the text of each line of its log. Raises `ChildFailed`, `ChildDied`, and the
        errors for the user that the work raises. By then, the child has ended.
        """
        try:
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):  # the child died: its answers say why
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            last, done, total = "", 0, 0
            while True:
                try:
                    line = self._lines.get(timeout=_TICK_SECONDS)
                except queue.Empty:
                    on_progress(done, total)
                    continue
                if not line:
                    raise self._death(last)
                kind, *values = json.loads(line)
                if kind == "log":
                    last = values[1]
                    on_log(*values)
                elif kind == "progress":
                    done, total = values
                    on_progress(done, total)
                elif kind == "error":
                    raise error_named(values[0])(values[1])
                elif kind == "failed":
                    raise ChildFailed(*values)
                else:
                    return values[0]
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _receive(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _listen(self, log: FileIO | None) -> None:
        assert self.process.stderr
        with log or contextlib.nullcontext():
            for line in self.process.stderr:
                self._stderr = (self._stderr + line)[-_KEPT:]
                if log:
                    with contextlib.suppress(OSError):  # the disk is full: the child goes on
                        log.write(line.encode())

    def _death(self, last: str) -> ChildDied:
        """`last` is the last line of its log, which is used if standard error is empty."""
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        self._listener.join()
        lines = [line.strip() for line in (last, *self._stderr.splitlines()) if line.strip()]
        words = printable(shortened(lines[-1])) if lines else "without a message"
        return ChildDied(f"({how}): {words}")


def serve(
    work: Callable[[Request, Answer], Any], remove_unfinished: Callable[[Request], object]
) -> None:
    """In the child: answers each request with what `work` returns, or with its error. The work may
    also answer `("progress", done, total)`, and for a line of its log `("log", level, text)`."""
    # libraries print to standard output; this descriptor is for answers only
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    no_core_dump()
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def receive() -> None:
        received = []
        for line in sys.stdin.buffer:  # UTF-8, whatever the locale says
            received.append(json.loads(line))
            requests.put(received[-1])
        for request in received:
            remove_unfinished(request)
        os._exit(0)

    def answer(kind: str, *values: Any) -> None:
        answers.write(json.dumps([kind, *values]) + "\n")
        answers.flush()

    threading.Thread(target=receive, daemon=True).start()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    while True:
        try:
            answer("done", work(requests.get(), answer))
        except InstrError as error:
            answer("error", type(error).__name__, str(error))
        except BaseException as error:
            traceback.print_exc()
            text = re.sub(r"^\[Errno \d+\] ", "", str(error))
            answer("failed", type(error).__name__, text, getattr(error, "errno", None))


def remove_output(request: Request) -> None:
    """Remove the file `output` of a request. The name is temporary: a complete file is renamed."""
    with contextlib.suppress(OSError):
        Path(request["output"]).unlink()
