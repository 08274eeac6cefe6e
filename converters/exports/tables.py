"""A session as pandas DataFrames: `load_tables(path).ops` has a row for each kernel that ran.

Invariant: rows are in the order of the log, times are ns of CLOCK_MONOTONIC, and sizes are bytes.
The properties of an op (name, shape, weight, work) are computed once for each plan and repeated by
numpy, so no Python code runs for a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.names import host_of, id_of, name_of
from llamacpp_instr.converters.exports.table_columns import (
    NODE_COLUMNS,
    Int64,
    KernelRows,
    Rows,
    Words,
    int64,
    masked,
    node_columns,
    optional,
    rate,
    shape_text,
    text,
)
from llamacpp_instr.log.parts import JoinedParts
from llamacpp_instr.log.reader import LogEnd
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.runs import Run
from llamacpp_instr.log.session import Session, Table, load_parts, load_session
from llamacpp_instr.log.steps import PHASES, disturbed_steps


@dataclass(frozen=True)
class Tables:
    """The tables of one log. Columns of repeated text are categorical. What the log's level does
    not record is empty: `ops` and `nodes` at `minimal`, the column `wait` below `verbose`.

    sessions: One row for the log: id (the same in a fleet's tables), host (a name made from
        cpu, cores and memory), models, cpu, os, level, build, llama_cpp (commit), cores, memory
        [bytes], perturbed, wall (UTC) and begin [ns], which are the same moment: wall + (t - begin)
        is the wall-clock time of any t.
    steps: One row for each decode or encode that ended: step, ctx, phase (prefill, decode, encode),
        n_tokens, n_outputs, n_seqs, pos (-1: llama.cpp chose), thread (the operating system's),
        begin, end, dur [ns], status (0: success), n_ubatch, n_reused, prepare, readback, recorder
        [ns], minflt, majflt, tokens_per_s, disturbed (the step lies in an interval in which the
        machine took more than 5 % of the process's time; also false if that is not in the log).
    requests: One row for each request, as `instr requests` numbers them: request, ctx, sequence,
        name (of its mark), arrival (missing without a mark), begin (of its first step), first_token
        (when it was ready; missing without tokens), end, queued (from its arrival to begin)
        [ns], prompt (tokens computed), reused (tokens from the cache), output (tokens). Failed
        steps and those of warm-up runs serve no request.
    layers: One row for each run of kernels of one layer, on thread 0: compute, step, phase, layer
        (-1: none), begin, dur [ns].
    ops: One row for each kernel and thread or device that ran it: step (-1: none), phase, compute,
        ctx, thread (ggml's; 0 is the caller, -1 a device that runs behind it), plan, kernel (its
        place in the plan), node (the first), n_nodes (more than one when fused), layer (-1: none),
        device (the backend), block, op, name (of the result), label (op and the weight's type),
        type and shape of the result, weight and weight_type (of the first weight read), flops,
        bytes (moved), work_bound (both are upper bounds, because the log does not record what an
        attention mask hid), begin, dur, wait [ns], gb_per_s [10^9 bytes/s] and gflop_per_s
        [10^9/s]. flops and bytes are the kernel's, which its threads share: sum them over
        `thread <= 0`, the only rows with rates. wait is the part of dur inside barriers. The
        kernels of devices overlap those of threads.
    nodes: One row for each node of each graph: graph, node, name (not unique), op, layer, block,
        type, shape, bytes (of the result), executed, flops, bytes_moved, backend, buffer, weight,
        weight_type, params (decoded), src (nodes; leaf n is -1-n). flops and bytes_moved of
        attention are those of the whole window of the cache; `ops` has what was computed.
    tensors: One row for each weight: model, tensor, name, layer, type, shape, n_elements, bytes,
        bits_per_weight, buffer.
    tokens: One row for each sampled token: ctx, step (whose logits), index, id, text, p
        (probability, when known), begin, dur [ns, in the sampler].
    kv: One row for each change of a context's memory: t [ns], ctx, step, cache, kind, op, used,
        size, n_kv [cells], bytes (of the cells in use), seq, seq_dst, p0, p1, arg, cells (verbose).
    memory: One row for each buffer type of each memory event: t [ns], ctx, buffer, model, context,
        compute, rss (of the whole process) [bytes].
    marks: One row for each span or instant of the application: mark, name, begin, end, dur [ns; end
        and dur are missing if the span has no end], thread.
    machine: One row for each interval of about 100 ms: begin, end, dur, cpu (time of the process,
        all threads), delay (its threads waited for a CPU; missing if the system does not report it)
        [ns], nvcsw, nivcsw (voluntary and involuntary context switches), load (average of the
        machine), running (threads on the machine), steal (CPU time that a hypervisor gave to
        others) [ns].
    computes: One row for each graph compute: compute, graph, ctx, step (-1: none), phase, source
        (decode, encode, memory_update), reused (the graph was built before), n_tokens, n_threads, t
        (when its preparation began), apply, build, alloc, inputs (parts of that), begin (of the
        compute itself), dur [ns], status (0: success).
    messages: One row for each warning or error of llama.cpp or the recorder: t [ns], level, text.
    notes: One row for each note of the application: t [ns], name, data (JSON).
    tensor_stats: One row for each node and compute whose values were read (`--stats`): t [ns],
        compute, step, phase, graph, node, name, layer (-1: none), n (elements), min, max, mean, std
        (of the finite ones, NaN if there are none), nan, inf, zero (how many), hist (counts in
        equal bins from min to max, separated by commas).
    """

    sessions: pd.DataFrame
    steps: pd.DataFrame
    requests: pd.DataFrame
    layers: pd.DataFrame
    ops: pd.DataFrame
    nodes: pd.DataFrame
    tensors: pd.DataFrame
    tokens: pd.DataFrame
    kv: pd.DataFrame
    memory: pd.DataFrame
    marks: pd.DataFrame
    machine: pd.DataFrame
    computes: pd.DataFrame
    messages: pd.DataFrame
    notes: pd.DataFrame
    tensor_stats: pd.DataFrame


NAMES: tuple[str, ...] = tuple(field.name for field in fields(Tables))
WHOLE_LOG = ("sessions", "steps", "requests")
"""The tables that need the whole log: a request may go on in its next part, and a `machine` event
covers the steps before it."""
_KINDS = {
    "sessions": {"text": "id host models cpu os level build llama_cpp", "bool": "perturbed"},
    "requests": {"text": "name", "optional": "arrival first_token queued"},
    "nodes": {
        "word": "name op block type shape backend buffer weight weight_type params",
        "text": "src", "bool": "executed",
    },
    "tensors": {"text": "name", "word": "type shape buffer"},
    "tokens": {"text": "text", "float": "p"},
    "kv": {"word": "kind op", "optional": "seq seq_dst p0 p1 arg", "text": "cells"},
    "memory": {"word": "buffer device"},
    "marks": {"word": "name"},
    "machine": {"optional": "delay running steal", "float": "load"},
    "computes": {"word": "source"},
    "messages": {"word": "level", "text": "text"},
    "notes": {"word": "name", "text": "data"},
    "tensor_stats": {"word": "name", "float": "min max mean std", "text": "hist"},
}  # fmt: skip
"""of the columns of each table; other lists become integers, and other arrays are columns"""
_COLUMN: dict[str, Callable[[Any], Any]] = {
    "text": text,
    "optional": optional,
    "float": lambda values: np.array(values, np.float64),  # None becomes NaN
    "bool": lambda values: np.array(values, np.bool_),
}


def load_tables(
    path: str | Path | Run, on_progress: OnProgress | None = None, lenient: bool = False
) -> Tables:
    """The tables of the log at `path` (`-` is standard input), which may lack its end, or of a run.

    Raises LogError, with the line, if the log cannot be read; `lenient` leaves damaged lines out.
    """
    return tables_of(load_session(path, on_progress, lenient, every_thread=True))


def tables_of(session: Session) -> Tables:
    """The tables of a loaded session. Raises LogError for numbers beyond 64 bits."""
    return Tables(**_Builder().frames(session, NAMES))


def requests_of(session: Session) -> pd.DataFrame:
    """`Tables.requests` alone, which is quicker."""
    return _Builder().frames(session, ("requests",))["requests"]


def stream_tables(
    path: str | Path | Run,
    on_progress: OnProgress | None = None,
    on_end: Callable[[LogEnd], object] | None = None,
    lenient: bool = False,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the tables in pieces, as (name, some rows), for logs larger than memory.

    The pieces of one name, joined in order, are the rows of that table. Each name comes at least
    once; its first piece may be empty. Categories grow from piece to piece. `sessions`, `steps` and
    `requests` (WHOLE_LOG) come whole, after the others: until then, memory holds what `JoinedParts`
    keeps (0.6 kB more for each step when requests are found at the end). `on_end` is called after
    the whole log was read, with how it ended. Raises LogError, with the line, if the log cannot be
    read; `lenient` leaves damaged lines out.
    """
    builder = _Builder()
    whole = JoinedParts()
    named: set[str] = set()
    by_part = tuple(name for name in NAMES if name not in WHOLE_LOG)
    for part in load_parts(path, on_progress, lenient=lenient, every_thread=True):
        for name, frame in builder.frames(part, by_part).items():
            if len(frame) or name not in named:
                named.add(name)
                yield name, frame
        whole.add(part)
    yield from builder.frames(whole.session(), WHOLE_LOG).items()
    if on_end is not None:
        on_end(part.log_end)


def _each(rows: Table | Iterable[object], *names: str) -> dict[str, Any]:
    """The values of each row or event, by name."""
    if isinstance(rows, Table):
        return {name: rows[name] for name in names}
    return {name: [getattr(row, name) for row in rows] for name in names}


class _Builder:
    """Builds the tables of a session, or of its parts in order."""

    def __init__(self) -> None:
        self._kernels = KernelRows()
        self._words: dict[tuple[str, str], Words] = defaultdict(Words)
        self._phases = Words(PHASES)
        self._graphs: set[int] = set()

    def frames(self, session: Session, names: Sequence[str]) -> dict[str, pd.DataFrame]:
        self._session = session
        steps, computes = session.steps, session.computes
        self._phase_of = dict(steps.tuples("step", "phase")) | {
            known.event.step: known.phase for known in session.open_steps
        }
        self._step_of = dict(computes.tuples("compute", "step"))
        try:
            return {name: pd.DataFrame(self._columns(name)) for name in names}
        except OverflowError:
            raise LogError("it has numbers beyond 64 bits", session.path) from None

    def _columns(self, table: str) -> dict[str, Any]:
        """The columns of a table as _KINDS has them."""
        kinds = {
            name: kind for kind, names in _KINDS.get(table, {}).items() for name in names.split()
        }
        columns: dict[str, Any] = getattr(self, f"_{table}")()
        for name, values in columns.items():
            if (kind := kinds.get(name)) == "word":
                words = self._words[table, name]
                columns[name] = words.categorical(words.codes(values))
            elif kind:
                columns[name] = _COLUMN[kind](values)
            elif isinstance(values, list):
                columns[name] = int64(values)
        return columns

    # --- what was measured ---

    def _steps(self) -> dict[str, Any]:
        steps = self._session.steps
        dur = steps["end"] - steps["begin"]
        last = ("prepare", "readback", "recorder", "minflt", "majflt")
        return {
            **_each(steps, "step", "ctx"),
            "phase": self._phase(steps["step"]),
            **_each(steps, "n_tokens", "n_outputs", "n_seqs", "pos", "thread", "begin", "end"),
            "dur": dur,
            **_each(steps, "status", "n_ubatch", "n_reused", *last),
            "tokens_per_s": rate(steps["n_tokens"] * 1e9, dur),
            "disturbed": disturbed_steps(self._session, steps),
        }

    def _requests(self) -> dict[str, Any]:
        _, requests = find_requests(self._session)
        return {
            "request": list(range(1, len(requests) + 1)),
            "ctx": [of.ctx for of in requests],
            "sequence": [of.seq for of in requests],
            "name": [of.name or None for of in requests],
            "arrival": [None if of.arrival < 0 else of.arrival for of in requests],
            "begin": [of.begin for of in requests],
            "first_token": [of.token_times[0] if of.token_times else None for of in requests],
            "end": [of.end for of in requests],
            **_each(requests, "queued", "prompt", "reused"),
            "output": [len(of.token_times) for of in requests],
        }

    def _layers(self) -> dict[str, Any]:
        rows = Rows(self._session.layers)
        return {
            **self._where(rows),
            "layer": rows.column([of.label for of in rows.timings]),
            **rows.times(),
        }

    def _ops(self) -> dict[str, Any]:
        rows = Rows([*self._session.ops, *self._session.device_ops])
        thread = rows.column([np.array(-1 if of.device else of.thread) for of in rows.timings])
        graphs = [self._session.graphs[self._session.plans[of.plan].graph] for of in rows.timings]
        times = rows.times()
        works = [self._session.work(ops).cells() for ops in rows.timings]
        n_flops = rows.column([work.flops for work in works])
        n_bytes = rows.column([work.bytes for work in works])
        caller = thread <= 0
        return {
            **self._where(rows),
            "ctx": rows.column([np.array(graph.ctx) for graph in graphs]),
            "thread": thread,
            **self._kernels.columns(self._session, rows),
            "flops": n_flops,
            "bytes": n_bytes,
            "work_bound": rows.column([work.bound for work in works]) > 0,
            **times,
            "wait": rows.waits(),
            # bytes a nanosecond are 10^9 bytes a second
            "gb_per_s": rate(n_bytes * caller, times["dur"]),
            "gflop_per_s": rate(n_flops * caller, times["dur"]),
        }

    def _tokens(self) -> dict[str, Any]:
        tokens = self._session.tokens
        first = _each(tokens, "ctx", "step", "index", "id", "text", "p")
        return {**first, "begin": tokens["t"], "dur": tokens["dur"]}

    def _kv(self) -> dict[str, Any]:
        kv = self._session.kv
        names = (
            "t", "ctx", "step", "cache", "kind", "op", "used", "size", "n_kv", "bytes", "seq",
            "seq_dst", "p0", "p1", "arg",
        )  # fmt: skip
        cells = [None if of is None else ",".join(map(str, of)) for of in kv["cells"]]
        return _each(kv, *names) | {"cells": cells}

    def _memory(self) -> dict[str, Any]:
        rows = [(event, use) for event in self._session.memory for use in event.buffers]
        events, uses = [event for event, _ in rows], [use for _, use in rows]
        return {
            **_each(events, "t", "ctx"),
            **_each(uses, "buffer"),
            "device": [use.device or None for use in uses],
            **_each(uses, "model", "context", "compute"),
            **_each(events, "rss"),
        }

    def _marks(self) -> dict[str, Any]:
        marks = self._session.marks
        open_ended = marks["end"] < 0
        return {
            **_each(marks, "mark", "name", "begin"),
            "end": masked(marks["end"], open_ended),
            "dur": masked(marks["end"] - marks["begin"], open_ended),
            **_each(marks, "thread"),
        }

    def _machine(self) -> dict[str, Any]:
        machine = self._session.machine
        begin = machine["t"] - machine["dur"]
        names = ("dur", "cpu", "delay", "nvcsw", "nivcsw", "load", "running", "steal")
        return {"begin": begin, "end": machine["t"], **_each(machine, *names)}

    def _computes(self) -> dict[str, Any]:
        computes = self._session.computes
        last = ("source", "reused", "n_tokens", "n_threads", "t", "apply", "build", "alloc")
        return {
            **_each(computes, "compute", "graph", "ctx", "step"),
            "phase": self._phase(computes["step"]),
            **_each(computes, *last, "inputs"),
            "begin": computes["t"] + computes["start"],
            **_each(computes, "dur", "status"),
        }

    def _messages(self) -> dict[str, Any]:
        return _each(self._session.messages, "t", "level", "text")

    def _notes(self) -> dict[str, Any]:
        notes = self._session.notes
        data = [msgspec.json.encode(event.data).decode("utf-8", "replace") for event in notes]
        return _each(notes, "t", "name") | {"data": data}

    def _tensor_stats(self) -> dict[str, Any]:
        stats = self._session.stats
        step = int64([self._step_of.get(event.compute, -1) for event in stats])
        names = ("graph", "node", "name", "layer", "n", "min", "max", "mean", "std", "nan", "inf")
        return {
            **_each(stats, "t", "compute"),
            "step": step,
            "phase": self._phase(step),
            **_each(stats, *names, "zero"),
            "hist": [",".join(map(str, event.hist)) for event in stats],
        }

    def _sessions(self) -> dict[str, Any]:
        session, start = self._session, self._session.start
        return {
            "id": [id_of(start, session.path)],
            "host": [host_of(start)],
            "models": [", ".join(sorted(map(name_of, session.models.values()))) or None],
            "cpu": [start.host.cpu],
            "os": [start.host.os],
            "level": [start.level],
            "build": [start.producer.llama_cpp],
            "llama_cpp": [start.producer.commit],
            "cores": [start.host.cores],
            "memory": [start.host.memory],
            "perturbed": [start.perturbed],
            "wall": pd.to_datetime([start.wall], unit="ns", utc=True),
            "begin": [start.t],
        }

    # --- what there is ---

    def _nodes(self) -> dict[str, Any]:
        new = [g for n, g in self._session.graphs.items() if n not in self._graphs and g.nodes]
        self._graphs = set(self._session.graphs)
        pieces = [node_columns(graph) for graph in new]
        return {name: [*chain.from_iterable(of[name] for of in pieces)] for name in NODE_COLUMNS}

    def _tensors(self) -> dict[str, Any]:
        tensors = self._session.tensors
        n_elements = int64([int(np.prod(t.ne, dtype=object)) for t in tensors])
        n_bytes = int64([t.bytes for t in tensors])
        return {
            **_each(tensors, "model", "tensor", "name", "layer", "type"),
            "shape": [shape_text(t.ne) for t in tensors],
            "n_elements": n_elements,
            "bytes": n_bytes,
            "bits_per_weight": rate(n_bytes * 8, n_elements),
            **_each(tensors, "buffer"),
        }

    # --- columns that several tables have ---

    def _where(self, rows: Rows) -> dict[str, Any]:
        computes = [of.compute for of in rows.timings]
        # a compute that is missing from this part ran outside of a step: see load_parts
        step = [int64([self._step_of.get(n, -1) for n in of.tolist()]) for of in computes]
        return {
            "step": rows.of_computes(step),
            "phase": self._phases.categorical(rows.of_computes(list(map(self._phase_codes, step)))),
            "compute": rows.of_computes(computes),
        }

    def _phase_codes(self, step: Int64) -> NDArray[Any]:
        return self._phases.codes([self._phase_of.get(number) for number in step.tolist()])

    def _phase(self, step: Int64) -> pd.Categorical:
        return self._phases.categorical(self._phase_codes(step))
