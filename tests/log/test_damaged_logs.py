"""Logs with missing, repeated or moved lines: every command that reads one succeeds, or refuses it
with an error of ours."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import InstrError, LogError
from llamacpp_instr.cli import main
from llamacpp_instr.log.session import load_session
from tests.kit.native_kit import ROOT
from tests.kit.strategies import damaged_logs

SOUND = (ROOT / "tests" / "fixtures" / "every-event.log").read_bytes()
LINES = SOUND.splitlines(keepends=True)
DEVICES = (ROOT / "tests" / "fixtures" / "devices.log").read_bytes()
ID = b"5f0c2a9b7d3e1846"
BY = ("op", "layer,role", "tensor", "device", "thread", "mark")
STRICT = [
    "summary LOG", "summary LOG --json", *(f"stats LOG --by {by}" for by in BY),
    "stats LOG --warmup --html", "tree LOG", "page LOG -o OUT --force", "report LOG",
    "report LOG --json", "diff LOG SOUND", "diff SOUND LOG", "diff LOG LOG --by tensor",
    "compare LOG SOUND", "compare SOUND LOG", "to-perfetto LOG --flows -o OUT --force",
    "to-perfetto LOG --format json -o OUT --force", "to-parquet LOG -o TABLES --force",
    "to-parquet LOG --csv -o TABLES --force", "ops LOG", "to-onnx LOG -o - --no-weights",
    "values LOG", "values LOG OTHER", "to-flashinfer LOG -o DATASET",
    "to-torch LOG -o PROFILE --force", "to-otlp LOG -o OUT --force",
]  # fmt: skip
READ_ON = [
    "check LOG", "check LOG --json", "cat LOG", "cat LOG --expand", "cat LOG --expand --lenient",
    "summary LOG --lenient", "to-perfetto LOG --lenient -o OUT --force",
]  # fmt: skip
"""commands that read beyond an event that others refuse, or print the lines before it"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    (place / "SOUND").write_bytes(SOUND)
    (place / "OTHER").write_bytes(SOUND.replace(ID, b"another session's", 1))
    return place


@pytest.fixture(scope="module")
def few_events(place: Path) -> list[Path]:
    """Logs with one event beside the first, and with all events but one."""
    logs = []
    for of, lines in ("every", LINES), ("device", DEVICES.splitlines(keepends=True)):
        for at in range(1, len(lines)):
            others = lines[:at] + lines[at + 1 :]
            for name, kept in ("only", [lines[0], lines[at]]), ("not", others):
                logs.append(place / f"{of}-{name}-{at + 1}")
                logs[-1].write_bytes(b"".join(kept))
    return logs


@pytest.fixture(scope="module")
def accepted(few_events: list[Path]) -> list[Path]:
    """Those that no strict reader refuses: test_resolve.py shows that all refuse the same."""
    logs = []
    for log in few_events:
        with contextlib.suppress(LogError):
            load_session(log)
            logs.append(log)
    assert 10 < len(logs) < len(few_events)
    return logs


def left(line: str, log: Path) -> BaseException | None:
    """The exception that `instr` ends with, unless it is one that it may end with."""
    shutil.rmtree(log.with_name("DATASET"), ignore_errors=True)
    names = {word: log.with_name(word) for word in line.split() if word.isupper()} | {"LOG": log}
    words = [str(names.get(word, word)) for word in line.split()]
    error = CliRunner().invoke(main, words).exception
    return None if isinstance(error, (SystemExit, InstrError)) else error


@settings(max_examples=200)
@given(line=st.sampled_from(STRICT + READ_ON), data=damaged_logs([SOUND, DEVICES]))
def test_no_log_makes_a_traceback(line: str, data: bytes, place: Path) -> None:
    log = place / "damaged"
    log.write_bytes(data)
    assert left(line, log) is None


@pytest.mark.parametrize("line", ["check LOG", "cat LOG --expand", "summary LOG"])
def test_no_value_that_is_missing_makes_a_traceback(line: str, place: Path) -> None:
    log = place / "changed"
    for lines in LINES, DEVICES.splitlines(keepends=True):
        for at, text in enumerate(lines):
            event = json.loads(text)
            for key, value in event.items():
                for other in (None, *([[], value[1:]] if isinstance(value, list) else ())):
                    changed = json.dumps({**event, key: other}).encode() + b"\n"
                    log.write_bytes(b"".join([*lines[:at], changed, *lines[at + 1 :]]))
                    assert left(line, log) is None, changed


@pytest.mark.parametrize("line", STRICT)
def test_no_event_alone_makes_a_traceback(line: str, accepted: list[Path]) -> None:
    assert [left(line, log) for log in accepted] == [None] * len(accepted)


@pytest.mark.parametrize("line", READ_ON)
def test_nor_does_one_where_a_command_reads_on(line: str, few_events: list[Path]) -> None:
    assert [left(line, log) for log in few_events] == [None] * len(few_events)
