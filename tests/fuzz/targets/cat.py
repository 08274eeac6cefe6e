"""`instr cat`: lines unchanged and in the flat form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from converters.exports.flat import LineSelection, expand_lines, select_lines
from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.reader import read_events
from tests.fuzz.guard import check_message, check_terminal

KIND = "log"


def attempt(path: Path) -> None:
    try:
        _look(select_lines(read_events(path), LineSelection()))
    except InstrError as error:
        check_message(error)
    _look(expand_lines(read_events(path), LineSelection()))


def _look(lines: Iterator[bytes]) -> None:
    for line in lines:
        text = line.decode()
        json.loads(text)
        check_terminal(text.removesuffix("\n"))
