"""`instr exec` with programs and libraries that were built elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import Instr, assert_refused, read_events
from tests.kit.native_kit import installed_library, unpatched_library

pytestmark = pytest.mark.native


@pytest.fixture
def instr(started_instr: Instr) -> Instr:
    """A process from its start to its end, which are tested here."""
    return started_instr


# loads a library, here or in a child, and says so; goes on after a signal
LOADS = """
import ctypes, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
library, where = sys.argv[1:]
if where == "in a child":
    child = [sys.executable, __file__, library, "waits for its input"]
    with subprocess.Popen(child, stdin=subprocess.PIPE):
        signal.sigwait([signal.SIGUSR1])
else:
    ctypes.CDLL(library)
    print("ready", flush=True)
    sys.stdin.read() if where == "waits for its input" else signal.sigwait([signal.SIGUSR1])
"""


@pytest.mark.parametrize("where", ["here", "in a child"])
@pytest.mark.parametrize("other", [True, False])
def test_without_a_log_the_library_that_was_loaded_is_named(
    tmp_path: Path, environment: dict[str, str], other: bool, where: str
) -> None:
    library = (unpatched_library() if other else installed_library()) / "libllama.so"
    (tmp_path / "loads.py").write_text(LOADS)
    command = [sys.executable, "-m", "llamacpp_instr", "exec", "--", sys.executable, "loads.py"]
    with subprocess.Popen(
        [*command, str(library), where],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)  # `instr exec` looks at its program before it passes on
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    if other:
        assert errors == (
            f"no log was written: the program loaded {library.resolve()}, which is not the "
            "instrumented library; run `instr build` in its environment\n"
        )
    else:
        assert errors.startswith("no log was written: no process of the command loaded a model ")


def test_a_program_that_was_built_elsewhere_is_recorded(
    instr: Instr, demo_model: Path, tmp_path: Path
) -> None:
    """llama-perplexity of the same commit, without our patches, loads the patched libraries."""
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat. " * 100)
    program = unpatched_library() / "llama-perplexity"
    options = ("-m", demo_model, "-f", "text.txt", "-c", "64", "-b", "64", "--chunks", "2")
    done = instr("exec", "--log", "its.log", "--", program, *options)
    assert done.returncode == 0, done.stderr
    assert f"runs with the libraries in {installed_library()}" in done.stderr
    assert list(check_log(tmp_path / "its.log")) == []
    tokens = [step["n_tokens"] for step in read_events(tmp_path / "its.log", "step_begin")]
    assert tokens.count(64) == 2, "of each chunk"


OTHER = """
#include <stdio.h>
int main(void) { return puts("version: 0.4.0 (build 7, commit 1234567)") < 0; }
"""


def test_a_program_of_another_commit_is_refused(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text(OTHER)
    folder = unpatched_library()
    linked = ("-Wl,--no-as-needed", f"-L{folder}", f"-Wl,-rpath,{folder}", "-lllama")
    command = ["cc", "-o", "llama-other", "other.c", *linked]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = instr("exec", "--", "./llama-other")
    assert_refused(done, "./llama-other", "commit 1234567", "instr build --programs")
    assert not list(tmp_path.glob("*.log"))
