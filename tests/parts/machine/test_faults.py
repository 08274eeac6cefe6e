"""A log on a disk that is full or read-only: one line, counted losses, no crash."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kit.programs import in_namespace, python
from tests.recording.test_faults import RECORD, assert_closed_with_gaps

pytestmark = pytest.mark.native


def test_a_full_disk_is_reported_once_and_inference_goes_on(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept.log"
    disk.mkdir()
    done = in_namespace(
        'disk=$1 kept=$2; shift 2; mount -t tmpfs -o size=512k none "$disk";'
        '"$@" "$disk/s.log"; cp "$disk/s.log" "$kept"',
        str(disk), str(kept), *python(RECORD),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    lines = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]
    # the recorder freed enough space for the last line, which counts what is missing
    assert assert_closed_with_gaps(kept) > 0


def test_a_full_disk_stops_the_program_where_that_was_asked_for(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = RECORD.replace('level="verbose"', 'level="verbose", on_log_error="stop"')
    done = in_namespace(
        'mount -t tmpfs -o size=256k none "$1"; shift; "$@"',
        str(disk), *python(script, disk / "s.log"),
    )  # fmt: skip
    assert done.returncode == 74  # EX_IOERR
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "stopping, as asked" in done.stderr


def test_a_disk_that_is_read_only_is_one_line(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = in_namespace(
        'mount -t tmpfs -o ro none "$1"; shift; "$@"',
        str(disk), sys.executable, "-m", "llamacpp_instr", "run", "demo", "-p", "Once", "-n", "2",
        "--log", str(disk / "s.log"),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
