"""Forks one `instr` per request, with all modules already imported, so a command takes
milliseconds: for tests of what a command does to files, not of how a process starts.

Requests and answers are lines of JSON: {"args", "cwd", "out", ...} -> {"pid"}, then {"status"}.
Standard output goes to the file "out", or to a pipe without a reader if it is null; standard error
to the file "errors", by default to "out" too. "input" is a file for standard input, "environment"
replaces that of this process.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMONLY_USED = (
    "matplotlib.backends.backend_svg",
    "matplotlib.colors",
    "pandas",
    "pyarrow.parquet",
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
    "rich.console",
    "rich.table",
    "llamacpp_instr.converters.analyses.blocks",
    "llamacpp_instr.converters.exports.chrome",
    "llamacpp_instr.converters.analyses.compare",
    "llamacpp_instr.converters.analyses.memory",
    "llamacpp_instr.converters.analyses.diff",
    "llamacpp_instr.converters.exports.table_files",
    "llamacpp_instr.converters.analyses.inspect",
    "llamacpp_instr.converters.exports.perfetto",
    "llamacpp_instr.report.render",
    "llamacpp_instr.converters.exports.tables",
    "llamacpp_instr.lab.weights.measure",
)


class Nursery:
    """Runs commands in forked processes that have already imported everything."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._input, self._out, self._errors = (directory / n for n in ("input", "out", "errors"))

    def start(
        self, args: Sequence[str], directory: Path, out: str | None = "said", **more: Any
    ) -> int:
        """The process id of a command that runs in a directory; `more` is of the request."""
        request = {"args": list(args), "cwd": str(directory), "out": out, **more}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid: int = self._answer()["pid"]
        return pid

    def status(self) -> int:
        """The exit status of the last command, negative for a signal."""
        status: int = self._answer()["status"]
        return status

    def run(
        self,
        args: Sequence[str],
        directory: Path,
        input: str | None = None,
        reader: bool = True,
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command that has ended. Without a `reader`, its standard output is a pipe that nobody
        reads."""
        files = {"errors": str(self._errors)}
        if input is not None:
            self._input.write_text(input, "utf-8")
            files["input"] = str(self._input)
        self._out.write_text("")
        out = str(self._out) if reader else None
        self.start(args, directory, out, environment=environment, **files)
        status = self.status()
        said = (path.read_text("utf-8", "surrogateescape") for path in (self._out, self._errors))
        return subprocess.CompletedProcess(args, status, *said)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def start_nursery(environment: dict[str, str]) -> Iterator[Nursery]:
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=Path(__file__).parents[2], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process,
    ):  # fmt: skip
        yield Nursery(process, Path(directory))
        assert process.stdin is not None
        process.stdin.close()


# --- the process that forks ---


def serve() -> None:
    for name in COMMONLY_USED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        # an interruption waits until the child has reached the command
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some modules have threads, which the child needs not
            child = os.fork()
        if child == 0:
            _become_instr(**request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        print(json.dumps({"pid": child}), flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), flush=True)


def _become_instr(
    args: list[str],
    cwd: str,
    out: str | None,
    errors: str | None = None,
    input: str = os.devnull,
    environment: dict[str, str] | None = None,
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(300)  # a command that hangs is killed
    os.chdir(cwd)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    tempfile.tempdir = None  # it may be another one there
    # the parent's exit functions may wait for threads that only the parent has (pyarrow 14 does)
    atexit._clear()
    if out is None:
        reader, number = os.pipe()
        os.close(reader)
    else:
        number = _opened(out)
    os.dup2(os.open(input, os.O_RDONLY), 0)
    os.dup2(number, 1)
    os.dup2(_opened(errors) if errors else number, 2)
    sys.argv = ["instr", *args]
    status = 130  # click is not there to catch an interruption
    try:
        status = _run_main()
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        pass
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_main() -> int:
    """The exit status of the command."""
    from llamacpp_instr.cli import main

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        main()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    finally:
        # what comes after the command is as uninterrupted as the end of an interpreter
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    return 0


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


if __name__ == "__main__":
    serve()
