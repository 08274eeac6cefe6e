"""Forks one `instr` per request, with all modules already imported, so a command takes
milliseconds: for tests of what a command does to files, not of how a process starts.

Requests and answers are lines of JSON: {"args", "cwd", "out", ...} -> {"pid"}, then {"status"}.
Standard output goes to the file "out", or to a pipe without a reader if it is null; standard error
to the file "errors", by default to "out" too. "input" is a file for standard input, "environment"
replaces that of this process.

`start_shell_nursery` is for the command lines of pages: the shell starts a small client, which
hands its three standard files over, and ends with the status of the forked command.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import llamacpp_instr

LIBRARIES = (
    "matplotlib.backends.backend_svg",
    "matplotlib.colors",
    "pandas",
    "pyarrow.parquet",
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
    "rich.console",
    "rich.table",
)


class Nursery:
    """Runs commands in forked processes that have already imported everything."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._input, self._out, self._errors = (directory / n for n in ("input", "out", "errors"))

    def start(
        self, args: Sequence[str], directory: Path, out: str | None = "printed", **more: Any
    ) -> int:
        """The process id of a command that runs in a directory; `more` is added to the request."""
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
        outputs = (path.read_text("utf-8", "surrogateescape") for path in (self._out, self._errors))
        return subprocess.CompletedProcess(args, status, *outputs)

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


# without a module that takes milliseconds to import
CLIENT = """
import _socket, os, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
request = repr((sys.argv[2:], os.getcwd(), dict(os.environ))).encode()
files = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
server.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
os._exit(int(server.recv(9) or 1))
"""


@contextmanager
def start_shell_nursery(environment: dict[str, str]) -> Iterator[str]:
    """A command of the shell that has the status and output of `instr`, but starts faster."""
    with tempfile.TemporaryDirectory() as directory:
        path, client = Path(directory) / "socket", Path(directory) / "client.py"
        client.write_text(CLIENT, "utf-8")
        with subprocess.Popen(
            [sys.executable, "-m", __name__, path], cwd=Path(__file__).parents[2], env=environment,
            stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()  # it is ready
            yield f'"{sys.executable}" -IS "{client}" "{path}"'
            process.terminate()


# --- the process that forks ---


def import_all() -> None:
    ours = pkgutil.walk_packages(llamacpp_instr.__path__, "llamacpp_instr.")
    for name in (*LIBRARIES, *(module.name for module in ours)):
        if not name.endswith("__main__"):
            with suppress(ImportError):  # one module needs PyTorch
                importlib.import_module(name)
    # it may start threads, which a forked process does not have
    assert "llama_cpp" not in sys.modules
    # a collection in a child looks at its own objects alone, and copies no page of the others
    gc.collect()
    gc.freeze()


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        # an interruption waits until the child has reached the command
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child does not need the modules' threads
            child = os.fork()
        if child == 0:
            _open_files(**request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        print(json.dumps({"pid": child}), flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), flush=True)


def serve_shell(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()
        print(flush=True)
        while True:
            client, _ = server.accept()
            request, files, *_ = socket.recv_fds(client, 1 << 18, 3)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                args, cwd, environment = ast.literal_eval(request.decode())
                _become_instr(args, cwd, files, environment, client)
            for number in (client.detach(), *files):
                os.close(number)


def _open_files(
    args: list[str],
    cwd: str,
    out: str | None,
    errors: str | None = None,
    input: str = os.devnull,
    environment: dict[str, str] | None = None,
) -> NoReturn:
    os.chdir(cwd)
    if out is None:
        reader, number = os.pipe()
        os.close(reader)
    else:
        number = _opened(out)
    files = (os.open(input, os.O_RDONLY), number, _opened(errors) if errors else number)
    _become_instr(args, cwd, files, environment)


def _become_instr(
    args: list[str],
    cwd: str,
    files: Sequence[int],
    environment: dict[str, str] | None,
    client: socket.socket | None = None,
) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(300)  # a command that hangs is killed
    os.chdir(cwd)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    tempfile.tempdir = None  # there it may be another one
    # the parent's exit functions may wait for threads that only the parent has (pyarrow 14 does)
    atexit._clear()
    for standard, number in enumerate(files):
        os.dup2(number, standard)
    for number in set(files):
        os.close(number)
    sys.argv = ["instr", *args]
    status = 130  # click no longer catches an interruption
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
        if client:
            client.send(b"%d" % status)
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
    import_all()
    serve_shell(*sys.argv[1:]) if sys.argv[1:] else serve()
