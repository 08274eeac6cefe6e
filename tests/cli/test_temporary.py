"""Commands leave no temporary files, however they end; and commands that need no temporary
directory work without one."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Instr
from tests.kit.mutants import damaged

pytestmark = pytest.mark.native
LOG = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


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
