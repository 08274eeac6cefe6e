"""The surfaces that read a log."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.converters.analyses import memory as held
from llamacpp_instr.converters.analyses.compare import (
    Candidate,
    compute_comparison,
    recorded_memory,
    recorded_model,
    short_names,
)
from llamacpp_instr.converters.analyses.diff import KEYS, VIEWS, compute_diff
from llamacpp_instr.converters.analyses.diff.trend import compute_trend
from llamacpp_instr.converters.analyses.memory import (
    compression_reports,
    joined_tensors,
    recorded_file,
    shortened,
    stored_in_log,
)
from llamacpp_instr.converters.analyses.ops import ops_of_log
from llamacpp_instr.converters.analyses.page import compute_page
from llamacpp_instr.converters.analyses.stats import By, compute_stats
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import Measure, build_tree
from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.flashinfer.workloads import (
    coverage_report,
    find_workloads,
    load_definitions,
    write_dataset,
)
from llamacpp_instr.converters.exports.flat import LineSelection, expand_lines, select_lines
from llamacpp_instr.converters.exports.onnx.export import export_graph, with_weights_as_inputs
from llamacpp_instr.converters.exports.otlp import export_sessions, json_lines
from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.converters.exports.table_files import write_csv, write_parquet
from llamacpp_instr.converters.exports.tables import stream_tables
from llamacpp_instr.converters.exports.torch import TRACE, write_torch
from llamacpp_instr.converters.exports.traced import first_look
from llamacpp_instr.converters.fleet.collect import collect, find_sources
from llamacpp_instr.converters.fleet.dataset import TABLES
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.graph.kernels import without_copies
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import Session, load_parts, load_session
from llamacpp_instr.report.page import render_page
from llamacpp_instr.report.perfetto_ui import is_trace
from llamacpp_instr.report.tree import leaves, outline
from tests.fuzz.guard import check_figures, check_reports, check_terminal, may_refuse

SOUND = Path(__file__).parent.parent / "corpus" / "log"


@cache
def _sound(level: str) -> Session:
    return load_session(SOUND / f"seed-{level}.log")


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """An empty folder beside the input."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        yield Path(name)


def log_reader(path: Path) -> None:
    """The log reader, strict and lenient, the session and `instr check`."""
    with may_refuse():
        reader = read_events(path, lenient=True)
        for _ in reader:
            pass
        assert reader.end is not None
        check_terminal(reader.end.sentence())
    with may_refuse():
        for finding in check_log(path):
            check_terminal(printable(str(finding)))
    with may_refuse():
        for _ in read_events(path):
            pass
    with may_refuse():
        for part in load_parts(path, part_rows=20):
            for plan in part.plans:
                part.kernels(plan)
    load_session(path)


def cat(path: Path) -> None:
    """`instr cat`: lines unchanged and in the flat form."""
    for choose in (select_lines, expand_lines):
        with may_refuse():
            for line in choose(read_events(path), LineSelection()):
                text = line.decode()
                json.loads(text)
                check_terminal(text.removesuffix("\n"))


def perfetto(path: Path) -> None:
    """`instr to-perfetto`, and the time range that `instr view` shows first."""
    is_trace(path)
    for lenient in (True, False):
        with may_refuse():
            trace = io.BytesIO()
            options = Options(flows=lenient, lenient=lenient)
            write_perfetto(read_events(path, lenient), trace, options)
            pb.Trace.FromString(trace.getvalue())
    first_look(read_events(path))


def chrome(path: Path) -> None:
    """`instr to-perfetto --format json`."""
    for lenient in (True, False):
        with may_refuse():
            trace = io.BytesIO()
            write_chrome(read_events(path, lenient), trace, Options(lenient=lenient))
            json.loads(trace.getvalue())


def torch(path: Path) -> None:
    """`instr to-torch`."""
    for lenient in (True, False):
        with may_refuse(), _folder(path) as folder:
            write_torch(read_events(path, lenient), folder, Options(lenient=lenient))
            with gzip.open(folder / TRACE) as trace:
                json.load(trace)


def otlp(path: Path) -> None:
    """`instr to-otlp`."""
    lines = io.BytesIO()
    export_sessions([load_session(path)], json_lines(lines), lambda _done, _total: None)
    for line in lines.getvalue().splitlines():
        json.loads(line)


def flashinfer(path: Path) -> None:
    """`instr to-flashinfer`."""
    found = find_workloads([load_session(path)], lambda _done, _total: None)
    with _folder(path) as folder:
        write_dataset(found, folder)
        for file in folder.glob("workloads/*/*.jsonl"):
            for line in file.read_text().splitlines():
                json.loads(line)
        for file in folder.glob("definitions/*/*.json"):
            compile(json.loads(file.read_text())["reference"], file, "exec")
        there = load_definitions(folder) if len(found.catalog) else None
        check_reports([coverage_report(found, there)])


def fleet(path: Path) -> None:
    """`instr collect`."""
    for lenient in (True, False):
        with _folder(path) as folder:
            sources = find_sources([str(path)])
            for taken in collect(sources, folder, None, lenient, lambda _done, _total: None):
                check_terminal(printable(taken.message))
            assert {file.name for file in folder.iterdir()} <= {"_format", "_lock", *TABLES}


def graphs(path: Path) -> None:
    """`instr ops` and `instr to-onnx` of a log."""
    session = load_session(path)
    with may_refuse():
        check_reports(ops_of_log(session))
    for graph in session.graphs.values():
        if graph.nodes is not None and graph.nodes.nb is not None:
            whole = without_copies(graph)
            with_weights_as_inputs(export_graph(whole), whole).SerializeToString()


def tables(path: Path) -> None:
    """`instr to-parquet`, both formats."""
    with _folder(path) as folder:
        write_csv(stream_tables(path), folder)
        write_parquet(stream_tables(path), folder)


def reports(path: Path) -> None:
    """`instr summary`, `instr stats` by every key, `instr tree` by every measure, `instr page`."""
    session = load_session(path)
    check_reports(compute_summary(session))
    for by in (None, *get_args(By)):
        with may_refuse():
            check_reports(compute_stats(session, by, None, True))
    for measure in get_args(Measure):
        with may_refuse():
            tree = build_tree(session, measure)
            check_reports([outline(tree), leaves(tree)])
    check_figures(render_page(*compute_page([session])))


def diff(path: Path) -> None:
    """`instr diff` of a log with a valid one, both ways, with itself, and in a trend."""
    session, sound = load_session(path), _sound("detailed")
    for a, b in ((session, session), (session, sound), (sound, session)):
        for view in (None, *VIEWS):
            with may_refuse():
                found = compute_diff([a], [b], view)
                check_reports(found.reports)
                found.slower_by(0.0)
    for key in (None, *KEYS):
        with may_refuse():
            check_reports(compute_trend([[sound], [session], [sound]], key).reports)


def compression(path: Path) -> None:
    """`instr memory` of a log."""
    session = load_session(path)
    models = []
    memory = held.recorded_memory(session)
    for model in session.models.values():
        with contextlib.suppress(UsageError):
            recorded_file(session, model)
        stored = stored_in_log(session, model, None)
        models.append(compression_reports(stored, memory.get(model.model, [])))
    for of_model in models:
        check_reports(of_model)
        check_reports(shortened(of_model))
    if models:
        check_reports([joined_tensors(models)])


def comparison(path: Path) -> None:
    """`instr compare` of two logs: one with a valid one, both ways."""
    sessions = load_session(path), _sound("verbose")
    paths = [Path(recorded_model(session).path) for session in sessions]
    names = short_names(paths, [path, SOUND / "seed-verbose.log"])
    candidates = [_candidate(name, of) for name, of in zip(names, sessions, strict=True)]
    for sides in (candidates, candidates[::-1]):
        check_reports(compute_comparison(sides, None, every_tensor=True))
        check_reports(compute_comparison(sides, None, every_tensor=False))


def _candidate(name: str, session: Session) -> Candidate:
    stored = stored_in_log(session, recorded_model(session), None)
    return Candidate(name, stored, None, [session], recorded_memory(session))
