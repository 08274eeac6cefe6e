"""`instr to-torch`."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

from converters.exports.torch.stream import TRACE, write_torch
from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.reader import read_events
from tests.fuzz.guard import check_message

KIND = "log"


def attempt(path: Path) -> None:
    try:
        _write(path, lenient=True)
    except InstrError as error:
        check_message(error)
    _write(path, lenient=False)


def _write(path: Path, lenient: bool) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        write_torch(read_events(path, lenient), Path(name), lenient)
        with gzip.open(Path(name) / TRACE) as trace:
            json.load(trace)
