"""Commands leave no temporary files, however they end; and commands that need no temporary
directory work without one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_temporary import LOG, temporary, wait_until_empty
from tests.kit.native_kit import DEMO
from tests.kit.programs import in_namespace

__all__ = ["temporary"]  # fixtures

pytestmark = pytest.mark.native
COMPARE = "compare --types Q8_0,Q4_0 demo -n 400 --rounds 100"


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
