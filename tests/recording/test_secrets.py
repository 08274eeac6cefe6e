"""Command lines in a log: what looks like a secret is removed, everything else is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import SessionStart
from tests.conftest import Instr
from tests.kit.programs import native_program
from tests.recording.test_text import LOADS

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_program("secrets", tmp_path_factory.mktemp("secrets"))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-key", "S", "a.py"], "--api-key [redacted] a.py"),
        (["--api-key=S"], "--api-key=[redacted]"),
        (["-token", "S"], "-token [redacted]"),
        (["OPENAI_API_KEY=S", "python"], "OPENAI_API_KEY=[redacted] python"),
        (["clientSecret=S"], "clientSecret=[redacted]"),
        (["--hf-token-read", "S"], "--hf-token-read [redacted]"),
        (["-H", "Authorization: Bearer S"], "-H Authorization: Bearer [redacted]"),
        (["-H", "X-Auth-Token:S"], "-H X-Auth-Token:[redacted]"),
        (["--auth", "--port", "80"], "--auth --port 80"),
        (["--auth", "-v", "--token", "S-S"], "--auth -v --token [redacted]"),
        (["--token", "S", "--token", "a-S"], "--token [redacted] --token [redacted]"),
        (["--token", "x-S"], "--token [redacted]"),
        (["--token", "a b", "c"], "--token a b c"),
        (["sh", "-c", "a --db-password S --n 3"], "sh -c a --db-password [redacted] --n 3"),
        (["sk-SSSSSSSSSSSS"], "[redacted]"),
        (["--x=sk-SSSSSSSSSSSS"], "--x=[redacted]"),
        (["https://user:S@host/path"], "https://user:[redacted]@host/path"),
        (["a://u:S@b", "http://c/@d:e"], "a://u:[redacted]@b http://c/@d:e"),
        (["a secret is told", "risk-free-software"], "a secret is told risk-free-software"),
        (["--max-tokens", "100", "--tokenizer", "x"], "--max-tokens 100 --tokenizer x"),
        (["--author", "me", "sk-short", ""], "--author me sk-short "),
        (["--api-key", "", "S"], "--api-key  [redacted]"),
        (["sh -c  --api-key   S"], "sh -c  --api-key   [redacted]"),
    ],
)
def test_secrets_are_redacted_and_nothing_else(
    program: Path, arguments: list[str], shown: str
) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.split("\n")[:-1]) == shown


def test_an_argument_of_a_megabyte_is_looked_at(program: Path) -> None:
    words = "sk-" + "x" * 100_000
    done = subprocess.run([program, words], capture_output=True, text=True, check=True)
    assert done.stdout == "[redacted]\n"


# a child sees the environment of its parents
LEAKS = "import os; print([name for name in os.environ if 'S3CRET' in os.environ[name]])"


@pytest.mark.parametrize("keep", [False, True])
def test_no_secret_is_in_the_log_or_in_the_environment(
    started_instr: Instr, demo_model: Path, tmp_path: Path, keep: bool
) -> None:
    options = ("--keep-args",) if keep else ()
    command = (sys.executable, "-c", f"{LOADS}; {LEAKS}", demo_model, "--api-key", "S3CRET-abc")
    done = started_instr("exec", *options, "--log", "a.log", "--", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
    _, start = next(iter(read_events(tmp_path / "a.log")))
    assert isinstance(start, SessionStart)
    assert start.process.argv[-2:] == ["--api-key", "S3CRET-abc" if keep else "[redacted]"]
    assert (tmp_path / "a.log").read_text().count("S3CRET-abc") == keep
