"""An output file is complete or does not exist; nothing is overwritten without `force`."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import (
    check_not_input,
    check_output,
    open_output,
    open_output_directory,
)

NOBODY = 65534


def test_the_file_takes_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    with open_output(path) as file:
        file.write(b"half")
        assert not path.exists()
        file.write(b" and whole")
    assert path.read_bytes() == b"half and whole"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.bin"]


@pytest.mark.parametrize("reason", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there_before(tmp_path: Path, reason: type[BaseException]) -> None:
    path = tmp_path / "out.bin"
    path.write_bytes(b"before")

    def write_half() -> None:
        with open_output(path, force=True) as file:
            file.write(b"half")
            raise reason

    with pytest.raises(reason):
        write_half()
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.bin"]


def test_an_existing_file_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    path.write_bytes(b"before")
    with pytest.raises(UsageError, match=r"out\.bin exists; use --force"), open_output(path):
        pass
    assert path.read_bytes() == b"before"


def test_the_first_of_two_that_write_one_file_at_once_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"

    def write_both(force: bool) -> None:
        with open_output(path, force) as slow, open_output(path, force) as fast:
            slow.write(b"slow")
            fast.write(b"fast")

    with pytest.raises(UsageError, match=r"out\.bin exists now; use --force"):
        write_both(force=False)
    assert path.read_bytes() == b"fast"
    write_both(force=True)
    assert path.read_bytes() == b"slow"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.bin"]


def test_the_first_of_two_that_write_one_directory_at_once_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tables"

    def write_both(force: bool) -> None:
        with open_output_directory(path, ("slow.csv", "fast.csv"), force) as slow:
            (slow / "slow.csv").touch()
            with open_output_directory(path, ("slow.csv", "fast.csv"), force) as fast:
                (fast / "fast.csv").touch()

    with pytest.raises(UsageError, match="tables exists now; use --force"):
        write_both(force=False)
    assert [entry.name for entry in path.iterdir()] == ["fast.csv"]
    write_both(force=True)
    assert [entry.name for entry in path.iterdir()] == ["slow.csv"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["tables"]


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "in.log"
    path.touch()
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link", str(path), tmp_path / ".." / tmp_path.name / "in.log"):
        with pytest.raises(UsageError, match=r"would overwrite the input .*; name another file"):
            check_not_input(name, tmp_path / "other", None, path)
    check_not_input(tmp_path / "new", path, tmp_path / "new")
    check_not_input("-", "-", "", path)


def test_the_mode_is_that_of_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with open_output(tmp_path / "out.bin"):
        pass
    assert (tmp_path / "out.bin").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_place_where_nothing_can_be_written_is_named_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory; name a file"):
        check_output(tmp_path)
    with pytest.raises(UsageError, match="there is no directory"):
        check_output(tmp_path / "no" / "out.bin")


def test_a_full_disk_is_one_line() -> None:
    full = pytest.raises(InstrError, match="/dev/full cannot be written: No space left")
    with full, open_output("/dev/full") as file:
        file.write(b"x" * 100_000)


def status_for_a_user(act: Callable[[], None]) -> int:
    """The exit status of a process that calls it; a user's, if this one is root's."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        act()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def test_a_device_can_be_written_where_a_user_can_write_no_file() -> None:
    def write() -> None:
        with open_output("/dev/null") as file:
            file.write(b"gone")
        with pytest.raises(UsageError, match="the directory /dev cannot be written to"):
            check_output("/dev/new")

    assert status_for_a_user(write) == 0


def test_what_is_no_regular_file_stays_what_it_is() -> None:
    with open_output("/dev/null") as file:
        file.write(b"gone")
    assert not Path("/dev/null").is_file()
