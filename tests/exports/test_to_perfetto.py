"""`instr to-perfetto`: files that are whole or absent, and one line for wrong input."""

from __future__ import annotations

import gzip
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.cli import logs
from llamacpp_instr.cli.exchange import to_perfetto
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr, assert_refused
from tests.kit import steady_log
from tests.kit.in_process import full_disk, instr_here
from tests.kit.log_readers import write_coming_and_going
from tests.kit.made_log import encode, make_log
from tests.kit.steady_log import write

pytestmark = pytest.mark.native

LOG = encode(make_log(Random(4).randint, n_contexts=1, level="detailed"))
UNCLOSED = LOG[: LOG.rindex(b'{"event":"session_end"') + 30]
DAMAGED = LOG.replace(b'"event":"layers"', b'"event":"layer"', 1)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "session.log"
    path.write_bytes(LOG)
    return path


def test_the_trace_stands_beside_the_log(instr: Instr, log: Path) -> None:
    done = instr("to-perfetto", log)
    assert (done.returncode, done.stderr) == (0, "")
    trace = log.with_suffix(".pftrace")
    assert done.stdout == f"{trace}\n"
    assert len(pb.Trace.FromString(trace.read_bytes()).packet) > 100


def test_a_compressed_log_gives_its_plain_name(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(LOG))
    assert instr("to-perfetto", "a.log.gz").returncode == 0
    assert (tmp_path / "a.pftrace").exists()


def test_compressed_it_is_the_same_trace(instr: Instr, log: Path, tmp_path: Path) -> None:
    assert instr("to-perfetto", log, "--gzip").returncode == 0
    assert instr("to-perfetto", log).returncode == 0
    plain = (tmp_path / "session.pftrace").read_bytes()
    assert gzip.decompress((tmp_path / "session.pftrace.gz").read_bytes()) == plain


def test_an_output_that_exists_is_kept(instr: Instr, log: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert_refused(instr("to-perfetto", log, "-o", "mine"), "mine exists", "--force")
    assert (tmp_path / "mine").read_text() == "mine"
    assert instr("to-perfetto", log, "-o", "mine", "--force").returncode == 0
    assert (tmp_path / "mine").read_bytes() != b"mine"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ("empty",)),
        (b"GGUF\x03\0\0\0 and so on\n", ("not a log",)),
        (b'{"event":"session_start","schema":99}\n', ("schema version 99",)),
        (DAMAGED, ("unknown event",)),
    ],
    ids=["empty", "not a log", "newer", "damaged"],
)
def test_wrong_input_is_one_line_and_no_file(
    instr: Instr, tmp_path: Path, data: bytes, words: tuple[str, ...]
) -> None:
    (tmp_path / "bad.log").write_bytes(data)
    assert_refused(instr("to-perfetto", "bad.log"), "bad.log", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.log"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "90:99"), ("no step was selected", "steps 0 to")),
        (("--layers", "90"), ("nothing was selected", "layers 0 to")),
        (("--ops", "NO_OP"), ("nothing was selected", "MUL_MAT")),
        (("--steps", "x"), ("--steps x", "7-9")),
        (("--layers", "1-y"), ("--layers 1-y", "7-9")),
        (("--format", "json", "--flows"), ("--flows needs --format protobuf",)),
        (("-o", "nowhere/a.pftrace"), ("there is no directory nowhere",)),
        (("-o", "."), ("is a directory",)),
        (("-o", "session.log/a.pftrace"), ("there is no directory session.log",)),
    ],
)
def test_what_cannot_be_done_is_one_line_and_no_file(
    instr: Instr, log: Path, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(instr("to-perfetto", log, *options), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["session.log"]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (UNCLOSED, [], "was not closed and ends in the middle of line"),
        (DAMAGED, ["--lenient"], "1 damaged line was skipped"),
        (LOG.replace(b'"event":"plan"', b'"event":"pla"', 1), ["--lenient"], "left out"),
    ],
    ids=["unclosed", "damaged", "without what others depend on"],
)
def test_such_a_log_converts_and_one_line_says_what_it_lacks(
    instr: Instr, log: Path, data: bytes, options: list[str], message: str
) -> None:
    log.write_bytes(data)
    done = instr("to-perfetto", log, *options)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert log.with_suffix(".pftrace").exists()


def test_a_device_that_is_full_is_one_line(instr: Instr, log: Path) -> None:
    done = instr("to-perfetto", log, "-o", "/dev/full")
    assert done.returncode == 1
    assert done.stderr == "Error: /dev/full cannot be written: No space left on device\n"


def test_a_range_has_its_ends_in_order(instr: Instr, log: Path) -> None:
    for option, text in (("--steps", "5:2"), ("--layers", "3-1")):
        done = instr("to-perfetto", log, option, text)
        assert done.returncode == 2
        assert done.stderr == f"Error: {option} {text}: the first is greater than the last\n"


def test_the_log_itself_is_not_overwritten(instr: Instr, log: Path) -> None:
    before = log.read_bytes()
    done = instr("to-perfetto", log, "--force", "-o", log)
    assert done.returncode == 2
    assert done.stderr == f"Error: {log} would overwrite the input {log}; name another file\n"
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        "to-perfetto session.log -o -", "cat session.log", "summary session.log",
        "stats session.log", "check session.log",
    ],
)  # fmt: skip
def test_standard_output_that_is_full_is_one_line(
    log: Path, environment: dict[str, str], command: str
) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *command.split()],
            cwd=log.parent, env=environment, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "Error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("compress", [False, True])
def test_a_full_disk_is_one_line_and_no_file(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with full_disk(room=4096):
        done = instr_here("to-perfetto", log.name, *["--gzip"] * compress)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("Error: session.pftrace"), done.stderr
    assert done.stderr.endswith("cannot be written: File too large\n")
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["session.log"]


@pytest.mark.parametrize("before", [None, b"mine"], ids=["new", "replaced"])
def test_ctrl_c_in_a_long_conversion_leaves_what_was_there(
    tmp_path: Path, environment: dict[str, str], before: bytes | None
) -> None:
    write_coming_and_going(tmp_path / "long.log", 8_000_000, 1000)
    content = (tmp_path / "long.log").read_bytes()
    (tmp_path / "long.log").unlink()
    if before is not None:
        (tmp_path / "a.pftrace").write_bytes(before)
    # not `python -m`: there CPython ends itself with the signal, instead of status 130, if it came
    # while a module defined a dataclass
    program = str(Path(sys.executable).with_name("instr"))
    command = [program, "to-perfetto", "-", "-o", "a.pftrace"]
    with subprocess.Popen(
        [*command, "--force"], cwd=tmp_path, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    ) as process, ThreadPoolExecutor(1) as writer:  # fmt: skip
        assert process.stdin is not None
        writer.submit(process.stdin.write, content)  # and never closed, so it has no end
        while not sum(path.stat().st_size for path in tmp_path.glob(".instr-*")):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.stderr is not None
        assert process.stderr.read().strip() == b"Interrupted"
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert left == ({} if before is None else {"a.pftrace": before})


def test_standard_input_needs_a_name_for_the_trace(instr: Instr) -> None:
    assert_refused(instr("to-perfetto", "-"), "-o")


def test_it_goes_to_standard_output(instr: Instr, log: Path) -> None:
    assert instr("to-perfetto", log).returncode == 0
    done = CliRunner().invoke(to_perfetto, [str(log), "-o", "-"])
    assert done.exit_code == 0
    assert done.stdout_bytes == log.with_suffix(".pftrace").read_bytes()


def test_a_run_writes_log_and_trace_at_once(instr: Instr, tmp_path: Path) -> None:
    options = ("-p", "Once", "-n", "2", "--log", "a.log", "--perfetto", "a.pftrace")
    done = instr("run", "demo", *options)
    assert done.returncode == 0
    assert done.stderr.endswith("trace: a.pftrace\n")
    written = (tmp_path / "a.pftrace").read_bytes()
    assert instr("to-perfetto", "a.log", "-o", "b.pftrace").returncode == 0
    assert (tmp_path / "b.pftrace").read_bytes() == written
    assert_refused(instr("run", "demo", "-p", "x", "--log", "c.log", "--perfetto", "a.pftrace"))
    assert not (tmp_path / "c.log").exists(), "known before the model runs"


def test_run_keeps_the_bound_of_a_trace(tmp_path: Path, environment: dict[str, str]) -> None:
    """It also keeps the log, whose steps can be converted; the bound here is one a test reaches."""
    code = "from llamacpp_instr.cli import logs, main; logs.MAX_TRACE = 5000; main()"
    words = ["run", "demo", "-p", "Once", "-n", "2", "--log", "a.log", "--perfetto", "a.pftrace"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "convert some of its steps with `instr to-perfetto a.log --steps A-B`" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]
    assert load_session(tmp_path / "a.log").steps


@pytest.mark.parametrize("command", ["to-perfetto", "to-perfetto --format json", "to-torch"])
def test_the_size_is_announced_and_bounded(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a long log. `--steps` can select any part of it."""
    monkeypatch.setattr(steady_log, "N_DECODES", 1000)
    monkeypatch.setattr(logs, "SAMPLE", 500_000)
    monkeypatch.setattr(logs, "LARGE", 1_000_000)
    log = write(tmp_path / "long.log", steady_log.steady_log(1))
    words = (*command.split(), log)
    done = instr_here(*words, "-o", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    (megabytes,) = re.findall(r"the trace will have about (\d+) MB", done.stderr)
    trace = tmp_path / "whole"
    if command == "to-torch":
        size = len(gzip.decompress((trace / "llama.cpp.pt.trace.json.gz").read_bytes()))
    else:
        size = trace.stat().st_size
    assert int(megabytes) == pytest.approx(size / 1e6, rel=0.3)
    refused = instr_here(*words, "-o", tmp_path / "no", "--max-size", "2MB")
    assert refused.returncode == 2
    assert re.search(r"would have about \d+ MB; choose steps with --steps A-B", refused.stderr)
    assert not (tmp_path / "no").exists()
    few = (*words, "-o", tmp_path / "few", "--max-size", "2MB", "--steps")
    assert instr_here(*few, "5:30").returncode == 0
    nothing = instr_here(*few, "9000:", "--force")
    assert (nothing.returncode, "selected" in nothing.stderr) == (2, True)
