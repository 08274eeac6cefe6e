"""Whenever a converter is killed, the old output or the complete new one remains."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.kit.nursery import Nursery
from tests.parts.machine.test_converter_faults import COMMANDS, words_of

pytestmark = pytest.mark.native
KILLS = 8
"""per command, alternating between the signals"""
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


def content(path: Path) -> dict[str, bytes] | None:
    """The content at a path: of a file, of a directory's files, or None."""
    if path.is_dir():
        return {entry.name: entry.read_bytes() for entry in path.iterdir()}
    return {"": path.read_bytes()} if path.exists() else None


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_converter_leaves_what_was_there_or_all_of_the_new(
    name: str, nursery: Nursery, tmp_path: Path
) -> None:
    command, rng = [*words_of(name, tmp_path), "--force"], random.Random(name)
    output = tmp_path / command[command.index("-o") + 1]
    started = time.monotonic()
    nursery.start(command, tmp_path)
    assert nursery.status() == 0, (tmp_path / "printed").read_text()
    took, whole = time.monotonic() - started, content(output)
    assert whole
    before: dict[str, bytes] | None = whole
    for number in range(KILLS):
        if number % 2:
            # the first of two kills finds no output, the second that of an earlier command
            before = dict.fromkeys(whole, b"earlier")
            _put(output, before)
        else:
            _remove(output)
            before = None
        how = SIGNALS[number % len(SIGNALS)]
        pid = nursery.start(command, tmp_path)
        time.sleep(rng.uniform(0, 1.2 * took))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
        status = nursery.status()
        left = content(output)
        # two directories cannot be exchanged atomically: for a moment none may exist
        assert left in (before, whole) or (left is None and how == signal.SIGKILL)
        assert status in (0, 130, -how, 128 + how), (tmp_path / "printed").read_text()
        if status == 0:
            assert left == whole
        hidden = [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
        # only SIGKILL may leave a part behind, with a temporary name
        assert how == signal.SIGKILL or not hidden, (how, hidden)
        for entry in hidden:
            _remove(entry)


def _put(output: Path, files: dict[str, bytes]) -> None:
    _remove(output)
    if list(files) == [""]:
        output.write_bytes(files[""])
        return
    output.mkdir()
    for name, data in files.items():
        (output / name).write_bytes(data)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
