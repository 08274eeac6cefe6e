"""`instr exec`: programs that do not know the recorder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import Instr, assert_refused, read_events

pytestmark = pytest.mark.native
APPLICATION = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
done = model.create_completion("Once upon a time", max_tokens=8, temperature=0)
print(done["choices"][0]["text"])
"""
EIGHT = """
import subprocess, sys
started = [subprocess.Popen([sys.executable, "app.py", sys.argv[1]]) for _ in range(8)]
sys.exit(sum(process.wait() for process in started))
"""


@pytest.fixture
def instr(started_instr: Instr) -> Instr:
    """A process from its start to its end, which are tested here."""
    return started_instr


@pytest.fixture
def application(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APPLICATION)
    (tmp_path / "eight.py").write_text(EIGHT)
    return path


def logs_of(done: subprocess.CompletedProcess[str]) -> list[Path]:
    return [
        Path(line.removeprefix("log: "))
        for line in done.stderr.splitlines()
        if line.startswith("log: ")
    ]


def test_standard_output_is_the_commands(instr: Instr, tmp_path: Path) -> None:
    assert_refused(instr("exec", "--log", "-", "--", "true"), "standard output", "--log")
    assert list(tmp_path.iterdir()) == []


def test_a_program_is_recorded_unchanged(
    instr: Instr, application: Path, demo_model: Path, environment: dict[str, str]
) -> None:
    command = [sys.executable, str(application), str(demo_model)]
    plain = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    done = instr("exec", "--level", "minimal", "--", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    [log] = logs_of(done)
    assert log.parent == application.parent
    assert log.name.startswith(Path(sys.executable).stem)
    events = read_events(log)
    assert events[0]["level"] == "minimal"
    assert events[0]["process"]["argv"] == command
    assert (events[-1]["event"], events[-1]["reason"]) == ("session_end", "exit")


# the last lines are formatted after the decoding thread has destroyed its thread-locals
LEAVES_AT_ONCE = """
import ctypes, sys
import llama_cpp.llama_cpp as api
api.llama_backend_init()
model = api.llama_model_load_from_file(sys.argv[1].encode(), api.llama_model_default_params())
context = api.llama_init_from_model(model, api.llama_context_default_params())
token = (ctypes.c_int32 * 1)(7)
for _ in range(150):
    assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) == 0
"""


def test_a_program_that_frees_nothing_ends_as_it_would(
    instr: Instr, demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES_AT_ONCE)
    done = instr("exec", "--log", "it.log", "--", sys.executable, "leaves.py", demo_model)
    assert done.returncode == 0, done.stderr
    events = read_events(tmp_path / "it.log")
    assert events[-1]["reason"] == "exit"
    assert len([event for event in events if event["event"] == "step_end"]) == 150


# how a Python program may end; with SIGINT it kills itself, and exit() is not called
ENDINGS = {
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)": -2,
    "raise RuntimeError": 1,
    "sys.exit(3)": 3,
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("how", ["exec", "detailed", "verbose"])
def test_however_a_python_program_ends_its_log_is_closed(
    instr: Instr, application: Path, demo_model: Path, environment: dict[str, str], ending: str,
    how: str,
) -> None:  # fmt: skip
    """Under `instr exec`, or if it records itself, at a level."""
    recorded = f"import llamacpp_instr; session = llamacpp_instr.record('a.log', level={how!r})\n"
    application.write_text((recorded if how != "exec" else "") + f"{APPLICATION}\n{ending}")
    command = [sys.executable, str(application), str(demo_model)]
    if how == "exec":
        done = instr("exec", "--log", "a.log", "--", *command)
        status = ENDINGS[ending] if ENDINGS[ending] > 0 else 128 - ENDINGS[ending]
    else:
        done = subprocess.run(
            command, cwd=application.parent, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        status = ENDINGS[ending]
    assert done.returncode == status, done.stderr
    end = read_events(application.parent / "a.log")[-1]
    assert (end["event"], end["reason"]) == ("session_end", "exit")


@pytest.mark.usefixtures("application")
@pytest.mark.parametrize("name", ["e-%p.log", "one.log"])
def test_eight_processes_write_eight_logs(
    instr: Instr, demo_model: Path, tmp_path: Path, name: str
) -> None:
    done = instr("exec", "--log", name, "--", sys.executable, "eight.py", demo_model)
    assert done.returncode == 0, done.stderr
    logs = logs_of(done)
    assert len(logs) == 8
    assert sorted(tmp_path.glob("*.log")) == sorted(logs)
    assert name == "e-%p.log" or tmp_path / name in logs
    for log in logs:
        events = read_events(log)
        assert name == "one.log" or log.name == f"e-{events[0]['process']['pid']}.log"
        assert events[-1]["event"] == "session_end"
        assert events[-1]["dropped"] == 0
        assert len([event for event in events if event["event"] == "token"]) == 8


def test_a_program_that_moves_away_leaves_its_log_here(
    instr: Instr, application: Path, demo_model: Path, tmp_path: Path
) -> None:
    application.write_text("import os; os.chdir('/')\n" + APPLICATION)
    done = instr("exec", "--log", "here.log", "--", sys.executable, "app.py", demo_model)
    assert logs_of(done) == [tmp_path / "here.log"], done.stderr


def test_what_the_program_gets_and_gives_is_its_own(instr: Instr) -> None:
    code = "import sys; print(sys.stdin.read()[::-1]); print(sys.argv[1:]); sys.exit(7)"
    done = instr("exec", "--", sys.executable, "-c", code, "--level", "-x", input="abc")
    assert done.returncode == 7
    assert done.stdout == "cba\n['--level', '-x']\n"
    assert done.stderr.splitlines() == [
        "no log was written: no process of the command loaded a model with the llama_cpp of "
        "`instr build`, or it does its own recording, or no log could be created"
    ]


SHORT = """
#include <dlfcn.h>
#include <unistd.h>
int main(void) { return dlopen("./libllama.so", RTLD_NOW) ? usleep(50000) : 1; }
"""


def test_a_library_in_a_program_of_half_a_tenth_of_a_second_is_named(
    instr: Instr, tmp_path: Path
) -> None:
    (tmp_path / "short.c").write_text(SHORT)
    (tmp_path / "empty.c").write_text("")
    for words in ("-shared -o libllama.so empty.c", "-o short short.c -ldl"):
        subprocess.run(["cc", *words.split()], cwd=tmp_path, check=True)
    named = f"the program loaded {tmp_path}/libllama.so, which is not the instrumented library"
    # other work may take all its time from `instr exec`, but not every time
    assert any(named in instr("exec", "--", "./short").stderr for _ in range(100))


def test_a_program_that_records_itself_is_told_who_records(
    instr: Instr, application: Path, demo_model: Path, tmp_path: Path
) -> None:
    begin = "import llamacpp_instr; llamacpp_instr.record('own.log')\n"
    command = ("exec", "--log", "exec.log", "--", sys.executable, "app.py", demo_model)
    application.write_text(begin + APPLICATION)
    done = instr(*command)
    assert done.returncode == 0, done.stderr
    assert "llama-instr: the program records itself, to own.log; `instr exec` adds" in done.stderr
    assert logs_of(done) == []
    (tmp_path / "own.log").unlink()
    application.write_text(APPLICATION + begin)
    done = instr(*command)
    assert done.returncode == 1
    message = f"this process is already being recorded, to {tmp_path}/exec.log; close that session"
    assert message in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_program(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    # short sleeps: Python calls the handler of a signal that came just before a sleep after it
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(40))\n"
        "print('ready', flush=True)\n"
        "for _ in range(600): time.sleep(0.1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "exec", "--", sys.executable, "-c", code],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 40, errors
    assert b"Traceback" not in errors


def test_ctrl_c_on_the_terminal_reaches_the_program_once(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The terminal signals the whole group; the program must not get the signal twice."""
    code = (
        "import signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(1)\n"  # for a second one
        "print('seen', len(seen), flush=True)"
    )
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(tmp_path)
        argv = [sys.executable, "-m", "llamacpp_instr", "exec", "--", sys.executable, "-c", code]
        os.execve(sys.executable, argv, environment)
    seen = b""
    deadline = time.monotonic() + 300
    while b"ready" not in seen and time.monotonic() < deadline:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 1000):
            seen += chunk
    except OSError:
        pass  # the other end is closed
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"seen 1\r\n" in seen


def test_a_program_killed_by_a_signal_gives_128_and_the_signal(instr: Instr) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = instr("exec", "--", sys.executable, "-c", code)
    assert done.returncode == 128 + signal.SIGKILL


def test_a_closed_pipe_ends_a_program_as_usual(instr: Instr) -> None:
    done = instr("exec", "--", "sh", "-c", "yes | head -n 1")
    assert (done.returncode, done.stdout) == (0, "y\n")


def test_wrong_input_is_one_line(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "taken.log").write_text("precious")
    (tmp_path / "plain").write_text("no program")
    assert_refused(instr("exec"), "no command")
    assert_refused(instr("exec", "--", "no-such-program"), "no-such-program", "not found")
    assert_refused(instr("exec", "--", "./plain"), "./plain", "not executable")
    assert_refused(instr("exec", "--level", "loud", "--", "true"), "loud")
    assert_refused(instr("exec", "--log", "taken.log", "--", "true"), "exists; use --force")
    assert_refused(instr("exec", "--log", "none/a.log", "--", "true"), "does not exist")
    assert_refused(instr("exec", "--stats", "(", "--", "true"), "(")
    assert (tmp_path / "taken.log").read_text() == "precious"


def test_an_unpatched_library_is_refused_before_the_program_runs(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lib" / "libllama.so").write_bytes(b"\x7fELF, but not ours")
    environment = environment | {"PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    environment.pop("LLAMA_CPP_LIB_PATH", None)
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "exec", "--", sys.executable, "-c", "print(1)"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert_refused(done, "not the patched one", str(package / "lib"), "instr build")


def test_a_model_that_is_a_vocabulary_alone_has_no_layers(
    instr: Instr, demo_model: Path, tmp_path: Path
) -> None:
    code = f"import llama_cpp; llama_cpp.Llama({str(demo_model)!r}, vocab_only=True, verbose=False)"
    done = instr("exec", "--log", "a.log", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert not list(check_log(tmp_path / "a.log"))
    [model] = [event for event in read_events(tmp_path / "a.log") if event["event"] == "model"]
    assert model["hparams"]["n_layer"] == 0
    assert "n_head" not in model["hparams"]
