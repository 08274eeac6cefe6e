"""`instr to-perfetto --format json`."""

from __future__ import annotations

import io
import json
from pathlib import Path

from converters.exports.chrome import write_chrome
from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.reader import read_events
from tests.fuzz.guard import check_message

KIND = "log"


def attempt(path: Path) -> None:
    trace = io.BytesIO()
    try:
        write_chrome(read_events(path, lenient=True), trace, lenient=True)
        json.loads(trace.getvalue())
    except InstrError as error:
        check_message(error)
    trace = io.BytesIO()
    write_chrome(read_events(path), trace)
    json.loads(trace.getvalue())
