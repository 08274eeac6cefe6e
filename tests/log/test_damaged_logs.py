"""Logs with missing, repeated or moved lines: every command that reads one succeeds, or refuses it
with an error of ours."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from llamacpp_instr.cli import main
from llamacpp_instr.errors import InstrError
from tests.kit.native_kit import ROOT
from tests.kit.strategies import damaged_logs

LINES = (ROOT / "tests" / "fixtures" / "every-event.log").read_bytes().splitlines(keepends=True)
ID = b"5f0c2a9b7d3e1846"
BY = ("op", "layer,role", "tensor", "thread", "mark")
COMMANDS = [
    "check LOG", "check LOG --json", "cat LOG", "cat LOG --expand", "summary LOG",
    "summary LOG --json", *(f"stats LOG --by {by}" for by in BY), "stats LOG --warmup --html",
    "tree LOG", "page LOG -o OUT --force",
    "report LOG", "report LOG --json", "diff LOG SOUND", "diff SOUND LOG",
    "diff LOG LOG --by tensor", "compare LOG SOUND", "compare SOUND LOG",
    "to-perfetto LOG --flows -o OUT --force", "to-perfetto LOG --lenient -o OUT --force",
    "to-perfetto LOG --format json -o OUT --force", "to-parquet LOG -o TABLES --force",
    "to-parquet LOG --csv -o TABLES --force", "cat LOG --expand --lenient",
    "summary LOG --lenient", "ops LOG", "to-onnx LOG -o - --no-weights",
    "values LOG", "values LOG OTHER", "to-flashinfer LOG -o DATASET",
    "to-torch LOG -o PROFILE --force",
]  # fmt: skip


def _left(line: str, data: bytes) -> BaseException | None:
    """What `instr` ends with, other than what it may."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "session.log").write_bytes(data)
        (place / "sound.log").write_bytes(b"".join(LINES))
        (place / "other.log").write_bytes(b"".join(LINES).replace(ID, b"another session's", 1))
        names = {
            "LOG": "session.log",
            "SOUND": "sound.log",
            "OTHER": "other.log",
            "OUT": "out",
            "TABLES": "tables",
            "DATASET": "dataset",
            "PROFILE": "profile",
        }
        words = [str(place / names[word]) if word in names else word for word in line.split()]
        done = CliRunner().invoke(main, words)
        error = done.exception
        return None if isinstance(error, (SystemExit, InstrError)) else error


@pytest.mark.parametrize("line", COMMANDS)
@settings(max_examples=12, deadline=None)
@given(data=damaged_logs([b"".join(LINES)]))
def test_no_log_makes_a_traceback(line: str, data: bytes) -> None:
    assert _left(line, data) is None


@pytest.mark.parametrize("line", COMMANDS)
def test_no_event_alone_makes_a_traceback(line: str) -> None:
    for at in range(1, len(LINES)):
        assert _left(line, LINES[0] + LINES[at]) is None, LINES[at]
        assert _left(line, b"".join(LINES[:at] + LINES[at + 1 :])) is None, LINES[at]
