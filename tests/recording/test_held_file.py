"""The recorder keeps a file open in a foreign program. The tests change the program's descriptors,
its standard error and existing logs."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import StepEnd
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import line, python, run_python, say

pytestmark = pytest.mark.native
# decodes `n` tokens one by one
DECODE = f"""
    import ctypes, os, subprocess, sys, time
    import llama_cpp, llama_cpp.llama_cpp as api
    from pathlib import Path
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    model = api.llama_model_load_from_file({str(DEMO).encode()!r}, api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_threads = 64, 1
    context = api.llama_init_from_model(model, params)
    token = (ctypes.c_int32 * 1)(7)
    def decode(n):
        for _ in range(n):
            api.llama_memory_clear(api.llama_get_memory(context), False)
            assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0
"""


def run_program(
    body: str, log: Path | None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that decodes; with `log` it is recorded as by `instr exec`. It gets its own
    text as an argument."""
    text = textwrap.dedent(DECODE) + textwrap.dedent(body)
    asked = {"LLAMA_INSTR_LOG": str(log)} if log else {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked, **environment}
    return run_python(text, text, env=environment)


def count_steps(log: Path) -> int:
    return sum(isinstance(event, StepEnd) for _, event in read_events(log))


def test_a_log_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    done = run_program("os.umask(0); decode(1)", log)
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_the_log_goes_on_after_a_daemon_closed_all_descriptors(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    body = f"""
        decode(5)
        os.closerange(3, 4096)
        files = [os.open(f"{tmp_path}/own-{{n}}", os.O_RDWR | os.O_CREAT) for n in range(100)]
        decode(300)
        time.sleep(0.4)
        decode(5)
    """
    done = run_program(body, log)
    assert done.returncode == 0, done.stderr
    assert sum(path.stat().st_size for path in tmp_path.glob("own-*")) == 0
    assert not list(check_log(log))
    assert count_steps(log) == 310


def test_a_log_that_was_removed_meanwhile_is_not_created_anew(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    body = f"""
        decode(5)
        os.closerange(3, 4096)
        os.unlink({str(log)!r})
        Path({str(log)!r}).write_text("the application's own")
        decode(5)
    """
    done = run_program(body, log)
    assert done.returncode == 0
    assert log.read_text() == "the application's own"
    assert done.stderr.count("cannot be written (Bad file descriptor)") == 1


FULL = """
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    room = Path(os.environ["LLAMA_INSTR_LOG"]).stat().st_size + 60_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # as Llama(verbose=False) does
"""


def test_a_full_disk_is_reported_where_standard_error_is_redirected(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    done = run_program(FULL + "    decode(500)", log)
    assert done.returncode == 0
    assert done.stderr.count("cannot be written (File too large)") == 1
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("on_error", "code"), [("continue", 0), ("stop", 74)])
def test_a_failure_at_the_very_end_is_reported(tmp_path: Path, on_error: str, code: int) -> None:
    log = tmp_path / "s.log"
    # steps that were decoded last are written when the program ends
    body = FULL.replace("60_000", "0") + "    print('done'); decode(2)"
    done = run_program(body, log, LLAMA_INSTR_ON_ERROR=on_error)
    assert (done.returncode, done.stdout) == (code, "done\n")
    assert done.stderr.count("cannot be written (File too large)") == 1


def test_a_failure_at_the_end_of_a_session_keeps_what_was_printed(tmp_path: Path) -> None:
    body = f"""
        import llamacpp_instr, resource, signal
        session = llamacpp_instr.record({str(tmp_path / "s.log")!r}, on_log_error="stop")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        decode(2)
        print("done")
        session.close()
        print("not reached")
    """
    done = run_program(body, None)
    assert (done.returncode, done.stdout) == (74, "done\n")
    assert done.stderr.count("stopping, as asked") == 1


def test_a_disk_that_is_full_from_the_start_leaves_no_empty_log(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    text = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    text += "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
    text += textwrap.dedent(DECODE) + "decode(1); print('done')"
    done = run_python(text, env={**os.environ, "LLAMA_INSTR_LOG": str(log)})
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == f"llama-instr: nothing is recorded: {log}: File too large\n"
    assert not log.exists()


def test_only_a_log_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "app.py"
    log.write_text("print('mine')\n")
    found = log.stat()
    done = run_program("decode(1)", log, LLAMA_INSTR_OVERWRITE=f"{found.st_dev}:{found.st_ino}")
    assert done.returncode == 0
    assert "exists and is not a log, so it is not overwritten" in done.stderr
    assert log.read_text() == "print('mine')\n"
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]


@pytest.mark.parametrize("link", [False, True], ids=["file", "link"])
def test_a_log_is_replaced_whole_and_by_one_process_of_a_command(
    tmp_path: Path, link: bool
) -> None:
    log = tmp_path / "s.log"
    target = tmp_path / "elsewhere.log" if link else log
    if link:
        log.symlink_to(target)
    target.write_text('{"event":"session_start", an older one')
    for part in (2, 7, 30):
        (tmp_path / f"s.part{part}.log").write_text('{"event":"session_start", an older one')
    bystanders = ["s2.part2.log", "s.part.log", "s.part2x.log", "s.part2.log.txt", "s.1.part2.log"]
    for name in bystanders:
        (tmp_path / name).write_text('{"event":"session_start", of another')
    (tmp_path / "s.part3.log").write_text("no log")
    found = log.stat()
    body = """
        children = [subprocess.Popen([sys.executable, "-c", sys.argv[1]]) for _ in range(2)] if len(
            sys.argv) > 1 else []
        decode(3)
        assert [child.wait() for child in children] in ([], [0, 0])
    """
    done = run_program(
        body, log, LLAMA_INSTR_ROTATE="100000000",
        LLAMA_INSTR_OVERWRITE=f"{found.st_dev}:{found.st_ino}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert log.is_symlink() == link
    written = [log, *(path for path in tmp_path.glob("s.[0-9]*.log") if "part" not in path.name)]
    assert len(written) == 3, "each process has a log of its own"
    for path in written:
        assert not list(check_log(path))
        assert count_steps(path) == 3
    left = {path.name for path in tmp_path.iterdir()} - {path.name for path in (*written, target)}
    assert left == {*bystanders, "s.part3.log"}


def test_the_programs_standard_input_stays_open_after_a_log_replaced_another(
    tmp_path: Path,
) -> None:
    body = """
        import llamacpp_instr
        for _ in range(2):
            with llamacpp_instr.record(os.environ["LOG"], force=True):
                decode(1)
        os.fstat(0)
    """
    assert run_program(body, None, LOG=str(tmp_path / "s.log")).returncode == 0
    assert count_steps(tmp_path / "s.log") == 1


def test_a_recorded_program_has_one_file_more_open(tmp_path: Path) -> None:
    body = """
        import llamacpp_instr
        opened = lambda: {os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if
                          os.path.exists(fd.path)}
        decode(1)
        before = opened()
        with llamacpp_instr.record(os.environ["LOG"]):
            decode(1)
            assert opened() - before == {os.environ["LOG"]}, opened()
        assert opened() == before
    """
    assert run_program(body, None, LOG=str(tmp_path / "s.log")).returncode == 0


def test_two_sessions_at_once_do_not_write_into_one_file(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text('{"event":"session_start", an older one')
    body = f"""
        print("ready", flush=True)
        sys.stdin.readline()
        assert api._lib.llama_instr_begin({str(log).encode()!r}, b"verbose", None, None, 1) == 0
        print("recording", flush=True)
        sys.stdin.read()
        decode(300)
        assert api._lib.llama_instr_end() == 0
    """
    text = textwrap.dedent(DECODE) + textwrap.dedent(body)
    pipe = subprocess.PIPE
    with log.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        both = [
            subprocess.Popen(python(text), stdin=pipe, stdout=pipe, text=True) for _ in range(2)
        ]
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in both:
            say(process)
        while _waiting_for(log) < 2:
            assert not [process for process in both if process.poll() is not None]
            time.sleep(0.01)
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "recording\n"
    for process in both:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert not list(check_log(log))
    assert count_steps(log) == 300
    assert list(tmp_path.iterdir()) == [log]


def test_a_message_does_not_wait_until_a_log_is_opened(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text('{"event":"session_start", an older one')
    found = log.stat()
    code = """
        import signal, sys, threading
        import llama_cpp.llama_cpp as api
        signal.alarm(120)  # instead of waiting forever
        load = lambda path: api.llama_model_load_from_file(path, api.llama_model_default_params())
        opening = threading.Thread(target=load, args=(sys.argv[1].encode(),))
        opening.start()
        sys.stdin.readline()
        load(b"absent.gguf")  # an error of llama.cpp
        print("said", flush=True)
        opening.join()
    """
    asked = {
        "LLAMA_INSTR_LOG": str(log), "LLAMA_INSTR_OVERWRITE": f"{found.st_dev}:{found.st_ino}"
    }  # fmt: skip
    with (
        log.open() as held,
        subprocess.Popen(
            python(code, DEMO), env=os.environ | asked, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        ) as process,
    ):  # fmt: skip
        fcntl.flock(held, fcntl.LOCK_EX)
        while _waiting_for(log) < 1:
            assert process.poll() is None
            time.sleep(0.01)
        say(process)
        assert line(process) == "said"
        fcntl.flock(held, fcntl.LOCK_UN)


def _waiting_for(path: Path) -> int:
    """How many processes wait for a lock on a file."""
    locks = Path("/proc/locks").read_text().splitlines()
    return sum("-> FLOCK" in line and f":{path.stat().st_ino} " in line for line in locks)
