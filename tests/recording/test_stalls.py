"""A reader, a disk or a terminal that stalls holds neither decoding nor the end of a program."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import python

pytestmark = pytest.mark.native
STALLED = """
    import os, signal, sys, llama_cpp
    from llamacpp_instr.llama import native
    from llamacpp_instr.recording.session import record
    signal.alarm(240)  # instead of waiting forever
    recorder = native.load()
    def note(number):
        assert recorder.note("large", f'"{number} {"x" * (1 << 20)}"') == 0
    def decode():
        for _ in range(30):
            llm.reset()
            llm.eval([7])
"""
OPEN = f"llm = llama_cpp.Llama({str(DEMO)!r}, n_ctx=64, n_threads=1, verbose=False)"


def run_stalled(
    body: str, *arguments: object, namespace: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with the helpers of STALLED; with `namespace`, in one where that directory is a
    file system that stops answering when `stop` is looked up."""
    command = python(textwrap.dedent(STALLED) + textwrap.dedent(body), *arguments)
    if namespace:
        namespace.mkdir()
        disk = [sys.executable, "-m", "tests.kit.stopping_disk", str(namespace)]
        command = ["unshare", "--map-root-user", "--mount", *disk, *command]
    return subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@contextmanager
def unread_pipe(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A named pipe, and its end that nobody reads."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    yield pipe, reader
    os.close(reader)


@pytest.mark.parametrize("closing", ["llm.close(); session.close()", "session.close()"])
def test_a_stalled_reader_holds_neither_decoding_nor_the_end(tmp_path: Path, closing: str) -> None:
    body = f"""
        session = record(sys.argv[1], level="verbose")
        {OPEN}
        decode()
        for number in range(80): note(number)
        decode()
        assert session.dropped > 60
        {closing}
        print(session.problem)
        {OPEN}
        with record(sys.argv[2]): decode()
    """
    with unread_pipe(tmp_path) as (pipe, _):
        done = run_stalled(body, pipe, tmp_path / "next.log")
    assert done.returncode == 0, done.stderr
    assert "the disk or the reader of the pipe has stalled; " in done.stdout
    assert " events are missing" in done.stdout
    assert done.stderr.count("inference goes on, events are dropped and counted") == 1
    assert list(check_log(tmp_path / "next.log")) == []


def test_a_stalled_reader_does_not_hold_the_end_of_the_program(tmp_path: Path) -> None:
    with unread_pipe(tmp_path) as (pipe, _):
        body = f"{OPEN}\ndecode()\nfor number in range(2): note(number)\nprint('done')"
        done = run_stalled(body, LLAMA_INSTR_LOG=str(pipe))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert f"{pipe}: the log is not complete" in done.stderr


def test_what_a_slow_reader_misses_is_counted_at_the_end_of_the_log(tmp_path: Path) -> None:
    body = """
        with record(sys.argv[1]):
            for number in range(80): note(number)
            print("added", flush=True)
            sys.stdin.readline()
    """
    command = python(textwrap.dedent(STALLED) + textwrap.dedent(body), tmp_path / "pipe")
    log, pipes = tmp_path / "session.log", subprocess.PIPE
    with (
        unread_pipe(tmp_path) as (_, reader),
        subprocess.Popen(command, stdin=pipes, stdout=pipes, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "added\n"
        os.set_blocking(reader, True)
        process.stdin.write("\n")
        process.stdin.flush()
        with open(reader, "rb", closefd=False) as source:
            log.write_bytes(source.read())
    events = [event for _, event in read_events(log)]
    numbers = [int(event.data.split()[0]) for event in events if isinstance(event, schema.Note)]
    assert numbers == list(range(len(numbers)))
    end = events[-1]
    assert isinstance(end, schema.SessionEnd)
    assert 0 < end.dropped == 80 - len(numbers)
    assert sum(end.events.values()) == len(events) - 1


def test_a_pipe_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = run_stalled("record(sys.argv[1])", tmp_path / "pipe")
    assert done.stderr.endswith("pipe: nothing reads it\n")


def test_standard_output_that_nothing_reads_does_not_hold_the_run() -> None:
    command = ["run", "demo", "-p", "Once upon a time", "-n", "300", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *command, "--log", "-"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        stderr = process.stderr.read()  # nobody reads the log
        assert process.wait(300) == 1
    assert b"Error: " in stderr
    assert b"Traceback" not in stderr


def test_standard_error_that_nothing_reads_does_not_hold_the_program() -> None:
    body = f"""
        {OPEN}
        os.set_blocking(2, False)
        try:
            while True: os.write(2, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(2, True)
        decode()
        print("done")
    """
    command = python(textwrap.dedent(STALLED) + textwrap.dedent(body))
    with subprocess.Popen(
        command, env=os.environ | {"LLAMA_INSTR_LOG": "/dev/full"}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.read() == "done\n"
        assert process.wait(300) == 0
