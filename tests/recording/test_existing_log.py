"""An existing log: what replaces it, when, and which files are never touched; and logs that are
incomplete when their program has ended."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.schema import FIRST_BYTES
from tests.conftest import Instr, assert_refused, read_events, start_run

pytestmark = pytest.mark.native

OLD_LOG = Path(__file__).parent.parent / "fixtures" / "every-event.log"

APPLICATION = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False)
model.create_completion("Once upon a time", max_tokens=8, temperature=0)
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APPLICATION)
    return path


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ("demo", ("-p", "word " * 500, "--ctx", "64")),
        ("llama.gguf", ("-p", "a", "--chat")),
        ("bert.gguf", ("-p", "a")),
        ("bert.gguf", ("--embed", "-p", "a" * 2000)),
        ("demo", ("-p", "a", "--stats", "(")),
        ("missing.gguf", ("-p", "a")),
    ],
)
def test_a_refused_run_keeps_the_existing_log(
    instr: Instr, models: Path, tmp_path: Path, model: str, args: tuple[str, ...]
) -> None:
    log = tmp_path / "session.log"
    shutil.copyfile(OLD_LOG, log)
    done = instr("run", model if model == "demo" else models / model, *args, "--force")
    assert_refused(done)
    assert log.read_bytes() == OLD_LOG.read_bytes()
    assert list(tmp_path.iterdir()) == [log]


def test_a_killed_run_leaves_its_log_by_name(environment: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    shutil.copyfile(OLD_LOG, log)
    process = start_run(environment, tmp_path, "demo", "-p", "Once", "-n", "200", "--force")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.kill()
    process.communicate()
    assert list(tmp_path.iterdir()) == [log]
    first = log.read_bytes().splitlines()[0]
    assert json.loads(first)["process"]["pid"] == process.pid


@pytest.mark.usefixtures("application")
def test_force_overwrites(instr: Instr, demo_model: Path, tmp_path: Path) -> None:
    shutil.copyfile(OLD_LOG, tmp_path / "a.log")
    done = instr("exec", "--force", "--log", "a.log", "--", sys.executable, "app.py", demo_model)
    assert done.stderr.splitlines() == [f"log: {tmp_path}/a.log"]
    assert read_events(tmp_path / "a.log")[-1]["event"] == "session_end"


def test_force_replaces_nothing_but_a_log(instr: Instr, tmp_path: Path) -> None:
    program = tmp_path / "a.py"
    program.write_text("print('it runs')")
    python = (sys.executable, "a.py")
    assert_refused(instr("exec", "--force", "--log", "a.py", "--", *python), "a.py is not a log")
    assert program.read_text() == "print('it runs')"


@pytest.mark.parametrize("program", ["#!/no/such/interpreter\n", "#!/bin/true\n"])
def test_the_old_log_stays_until_there_is_another(
    instr: Instr, tmp_path: Path, program: str
) -> None:
    """The command cannot start, or loads no model."""
    log = tmp_path / "a.log"
    shutil.copyfile(OLD_LOG, log)
    script = tmp_path / "script"
    script.write_text(program)
    script.chmod(0o700)
    done = instr("exec", "--force", "--log", "a.log", "--", "./script")
    assert done.returncode == (2 if "no" in program else 0), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert log.read_bytes() == OLD_LOG.read_bytes()


def test_a_process_id_in_the_logs_directory_is_refused(instr: Instr, tmp_path: Path) -> None:
    """The recorder would also replace %p there, and record nothing."""
    (tmp_path / "%p").mkdir()
    assert_refused(instr("exec", "--log", "%p/a.log", "--", "true"), "%p", "directory")


# the log of a program when the disk is full or the process is killed
ENDS = {
    "empty": ("", "it is empty"),
    "cut": (OLD_LOG.read_text()[:-100], "it has no end"),
    "dropped": (
        OLD_LOG.read_text().replace('"dropped":0', '"dropped":17'),
        "lost while writing: 17 events",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_log_that_lacks_something_is_reported(instr: Instr, tmp_path: Path, name: str) -> None:
    content, words = ENDS[name]
    (tmp_path / "content").write_text(content)
    done = instr("exec", "--log", "a.log", "--", "cp", "content", "a.log")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"incomplete log: {tmp_path}/a.log: {words}")


FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize(
    ("n_bytes", "message"), [(0, "nothing is recorded: "), (20_000, "incomplete log: ")]
)
def test_a_full_disk_is_reported_even_where_the_program_is_not_verbose(
    started_instr: Instr, application: Path, demo_model: Path, tmp_path: Path, n_bytes: int,
    message: str,
) -> None:  # fmt: skip
    application.write_text(FULL_DISK + APPLICATION)
    command = (sys.executable, "app.py", demo_model, n_bytes)
    # its streams are pipes, for which the limit does not count
    done = started_instr("exec", "--log", "a.log", "--level", "verbose", "--", *command)
    assert done.returncode == 0, done.stderr
    assert "\nlog: " not in f"\n{done.stderr}"
    assert f"{message}{tmp_path}/a.log: " in done.stderr


def test_a_command_that_removes_its_directory(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = instr("exec", "--log", "gone/a.log", "--", "rmdir", "gone")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr


LOOK_ALIKES = (
    "server2.part2.log", "server7.part9.log", "server-2025.part3.log", "server.part.log",
    "server.part02.log", "server.part1.log", "server.123.log", "server.123.part2.log",
    "server.old.part2.log", "server.part2.log.gz", "xserver.part2.log", "serverpart2.log",
)  # fmt: skip


@pytest.mark.usefixtures("application")
def test_the_parts_of_other_logs_are_kept(instr: Instr, demo_model: Path, tmp_path: Path) -> None:
    """Their names only look like those of parts of this log."""
    for name in LOOK_ALIKES:
        (tmp_path / name).write_bytes(FIRST_BYTES + name.encode())
    options = ("--force", "--rotate", "1GB", "--log", "server.log")
    done = instr("exec", *options, "--", sys.executable, "app.py", demo_model)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} >= set(LOOK_ALIKES)
    for name in LOOK_ALIKES:
        assert (tmp_path / name).read_bytes() == FIRST_BYTES + name.encode()
    assert f"log: {tmp_path}/server.log" in done.stderr.splitlines()
    assert done.stderr.count("log: ") == 1, "no other log was written"


@pytest.mark.usefixtures("application")
def test_old_parts_go_when_there_is_a_new_log(
    instr: Instr, demo_model: Path, tmp_path: Path
) -> None:
    old = [tmp_path / name for name in ("it.log", "it.part2.log", "it.part12.log")]
    for path in old:
        path.write_bytes(FIRST_BYTES)
    options = ("--force", "--rotate", "1GB", "--log", "it.log")
    assert instr("exec", *options, "--", "true").returncode == 0
    assert instr("exec", *options, "--", "./no-such-program").returncode == 2
    assert [path.read_bytes() for path in old] == [FIRST_BYTES] * 3, "nothing has replaced them"
    done = instr("exec", *options, "--", sys.executable, "app.py", demo_model)
    assert done.returncode == 0, done.stderr
    assert [path.exists() for path in old] == [True, False, False]
    assert list(check_log(old[0])) == []
