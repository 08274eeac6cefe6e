"""Forks one `instr` per request, with all modules already imported, so a command takes
milliseconds: for tests of what a command does to files, not of how a process starts.

Requests and answers are lines of JSON: {"args", "cwd", "out", "errors"} -> {"pid"}, then
{"status"}. Standard output goes to the file "out", or to a pipe without a reader if it is null;
standard error to the file "errors", or to "out" if it is null.
"""

from __future__ import annotations

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
    "pandas",
    "pyarrow.parquet",
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
    "rich.console",
    "rich.table",
    "converters.analyses.blocks",
    "converters.exports.chrome",
    "converters.analyses.compare",
    "converters.analyses.memory",
    "converters.analyses.diff",
    "converters.exports.table_files",
    "converters.analyses.inspect",
    "converters.exports.perfetto",
    "converters.report.render",
    "converters.exports.tables",
    "llamacpp_instr.weights.compare",
)


class Nursery:
    """Runs commands in forked processes that have already imported everything."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._out, self._errors = directory / "out", directory / "errors"

    def start(
        self,
        args: Sequence[str],
        directory: Path,
        out: Path | str | None = "said",
        errors: Path | str | None = None,
    ) -> int:
        """The process id of a command that runs in a directory."""
        files = {"out": out and str(out), "errors": errors and str(errors)}
        request = {"args": list(args), "cwd": str(directory), **files}
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
        self, args: Sequence[str], directory: Path, reader: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A command that has ended. Without a `reader`, its standard output is a pipe that nobody
        reads."""
        self.start(args, directory, self._out if reader else None, self._errors)
        status = self.status()
        said, errors = (
            path.read_text("utf-8", "surrogateescape") if path.exists() else ""
            for path in (self._out, self._errors)
        )
        return subprocess.CompletedProcess(args, status, said if reader else "", errors)

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
    _import_everything()
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        request = json.loads(line)
        # an interruption waits until the child has reached the command
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        child = os.fork()
        if child == 0:
            _become_instr(**request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        print(json.dumps({"pid": child}), flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), flush=True)


def _import_everything() -> None:
    for name in COMMONLY_USED:
        importlib.import_module(name)


def _become_instr(args: list[str], cwd: str, out: str | None, errors: str | None) -> None:
    from llamacpp_instr.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    if out is None:
        reader, number = os.pipe()
        os.close(reader)
    else:
        number = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    told = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if errors else number
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(number, 1)
    os.dup2(told, 2)
    sys.argv = ["instr", *args]
    status = 130  # click is not there to catch an interruption
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:
        pass
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
