"""Limits, signals and libraries of processes. What Linux does not need runs here for real, too: it
asks the system for nothing that only macOS has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamacpp_instr.base import processes
from tests.kit.native_kit import ROOT


def python(code: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, **options
    )  # type: ignore[call-overload, no-any-return]


@pytest.mark.native
def test_a_watched_process_ends_with_its_parent() -> None:
    child = """if True:
        import os, threading, time
        from llamacpp_instr.base.processes import _end_when
        parent = os.getppid()
        _end_when(lambda: os.getppid() != parent, 1, threading.Event())
        print(os.getpid(), flush=True)
        time.sleep(600)
    """
    code = f"""if True:
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {child!r}])
        time.sleep(600)
    """
    parent = python(code)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    assert parent.stdout.read() == ""  # the child, which has the other end, has ended
    parent.wait()


def test_signals_wake_who_waits_for_them() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)]
    with processes.waking([signal.SIGUSR1, signal.SIGINT]) as (_, wait):
        assert wait(0) == (0, True)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wait(60) == (signal.SIGUSR1, False)
        assert wait(0) == (0, True)
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)] == before


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with processes.waking([signal.SIGUSR1]) as (_, wait):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert wait(0.1) == (0, True)
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


EXEC = """if True:
    import sys
    from llamacpp_instr.base.processes import waking
    from llamacpp_instr.run import exec as run
    run.awaited = waking
    sys.exit(run.execute(sys.argv[1:]))
"""


@pytest.mark.native
@pytest.mark.parametrize("how", ["key", "process"])
def test_exec_without_sigtimedwait(how: str, tmp_path: Path) -> None:
    """Ctrl-C on the terminal, and SIGTERM of a process, reach the program once."""
    program = (
        "import signal, time\n"
        "seen = []\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(1)\n"  # for a second one
        "print('seen', len(seen), flush=True); raise SystemExit(7)"
    )
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(tmp_path)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-c", EXEC, sys.executable, "-c", program]
        os.execve(sys.executable, argv, environment)
    seen = b""
    deadline = time.monotonic() + 300
    while b"ready" not in seen and time.monotonic() < deadline:
        seen += os.read(terminal, 1000)
    if how == "key":
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.SIGTERM)
    try:
        while chunk := os.read(terminal, 1000):
            seen += chunk
    except OSError:
        pass  # the other end is closed
    _, status = os.waitpid(pid, 0)
    assert b"seen 1\r\n" in seen
    assert os.waitstatus_to_exitcode(status) == 7


# of a llama.cpp that CMake installed on a Mac
LIBRARIES = """\
/opt/llama/bin/llama-server:
\t@rpath/libllama.0.dylib (compatibility version 0.0.0, current version 0.0.0)
\t@rpath/libggml.0.dylib (compatibility version 0.0.0, current version 0.9.5)
\t/usr/lib/libc++.1.dylib (compatibility version 1.0.0, current version 1700.255.5)
\t/usr/lib/libSystem.B.dylib (compatibility version 1.0.0, current version 1351.0.0)
"""
COMMANDS = """\
Load command 19
          cmd LC_LOAD_DYLIB
      cmdsize 56
         name /usr/lib/libSystem.B.dylib (offset 24)
   time stamp 2 Thu Jan  1 01:00:02 1970
Load command 20
          cmd LC_RPATH
      cmdsize 40
         path /opt/My Models/lib (offset 12)
Load command 21
          cmd LC_RPATH
      cmdsize 32
         path @loader_path/../lib (offset 12)
"""


def test_a_macs_program_has_its_library_in_one_of_its_paths() -> None:
    program = "/opt/llama/bin/llama-server"
    found = processes.linked_on_macos(LIBRARIES, COMMANDS, program, "libllama")
    assert found == [
        Path("/opt/My Models/lib/libllama.0.dylib"),
        Path("/opt/llama/bin/../lib/libllama.0.dylib"),
    ]


def test_a_macs_library_may_have_a_whole_path_or_not_be_there() -> None:
    whole = LIBRARIES.replace("@rpath/libllama.0", "/opt/homebrew/lib/libllama")
    place = Path("/opt/homebrew/lib/libllama.dylib")
    assert processes.linked_on_macos(whole, COMMANDS, "/bin/x", "libllama") == [place]
    assert processes.linked_on_macos(LIBRARIES, COMMANDS, "/bin/x", "libllava") == []
    assert processes.linked_on_macos("", "", "/bin/x", "libllama") == []
