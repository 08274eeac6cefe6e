"""The log reader, strict and lenient, the session and `instr check`."""

from __future__ import annotations

from pathlib import Path

from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import load_parts, load_session
from llamacpp_instr.terminal import printable
from tests.fuzz.guard import check_message, check_terminal

KIND = "log"


def attempt(path: Path) -> None:
    for work in (_lenient, _check, _strict, _parts):
        try:
            work(path)
        except InstrError as error:
            check_message(error)
    load_session(path)


def _strict(path: Path) -> None:
    for _ in read_events(path):
        pass


def _lenient(path: Path) -> None:
    reader = read_events(path, lenient=True)
    for _ in reader:
        pass
    assert reader.end is not None
    check_terminal(reader.end.sentence())


def _check(path: Path) -> None:
    for finding in check_log(path):
        check_terminal(printable(str(finding)))


def _parts(path: Path) -> None:
    for part in load_parts(path, part_rows=20):
        for plan in part.plans:
            part.kernels(plan)
