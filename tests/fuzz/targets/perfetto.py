"""`instr to-perfetto`, and the time range that `instr view` shows first."""

from __future__ import annotations

import io
from pathlib import Path

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from converters.exports.first_look import first_look
from converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.view import is_trace
from tests.fuzz.guard import check_message

KIND = "log"


def attempt(path: Path) -> None:
    is_trace(path)
    trace = io.BytesIO()
    try:
        write_perfetto(read_events(path, lenient=True), trace, Options(flows=True, lenient=True))
        pb.Trace.FromString(trace.getvalue())
    except InstrError as error:
        check_message(error)
    trace = io.BytesIO()
    write_perfetto(read_events(path), trace, Options())
    pb.Trace.FromString(trace.getvalue())
    first_look(read_events(path))
