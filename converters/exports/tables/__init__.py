"""A session as pandas DataFrames: `load_tables(path).ops` has a row for each kernel that ran.

Invariant: rows are in the order of the log, times are ns of CLOCK_MONOTONIC, and sizes are bytes.
The properties of an op (name, shape, weight, work) are computed once for each plan and repeated by
numpy, so no Python code runs for a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.tables.cells import (
    Int64,
    Words,
    int64,
    masked,
    optional,
    rate,
    text,
)
from llamacpp_instr.converters.exports.tables.events import (
    compute_columns,
    machine_columns,
    message_columns,
    note_columns,
    session_columns,
    statistics_columns,
)
from llamacpp_instr.converters.exports.tables.static import (
    KERNEL_NUMBERS,
    KERNEL_WORDS,
    NODE_COLUMNS,
    KernelRows,
    node_columns,
    shape_text,
)
from llamacpp_instr.converters.exports.tables.timed import Rows
from llamacpp_instr.converters.exports.tables.whole_log import WHOLE_LOG, Kept, request_columns
from llamacpp_instr.log.reader import LogEnd
from llamacpp_instr.log.runs import Run
from llamacpp_instr.log.session import Session, load_parts, load_session
from llamacpp_instr.log.steps import PHASES, disturbed_steps


@dataclass(frozen=True)
class Tables:
    """The tables of one log. Columns of repeated text are categorical. What the log's level does
    not record is empty: `ops` and `nodes` at `minimal`, the column `wait` below `verbose`.

    sessions: One row for the log: id (that of a fleet's logs, too), host (a name made of the next),
        models, cpu, os, level, build, llama_cpp (commit), cores, memory [bytes], perturbed, wall
        (UTC) and begin [ns], which are one moment: wall + (t - begin) is the wall-clock time of any
        t.
    steps: One row for each decode or encode that ended: step, ctx, phase (prefill, decode, encode),
        n_tokens, n_outputs, n_seqs, pos (-1: llama.cpp chose), thread (the operating system's),
        begin, end, dur [ns], status (0: success), n_ubatch, n_reused, prepare, readback, recorder
        [ns], minflt, majflt, tokens_per_s, disturbed (the step lies in an interval in which the
        machine took more than 5 % of the process's time; false also if that is not in the log).
    requests: One row for each request, as `instr requests` numbers them: request, ctx, sequence,
        name (of its mark), arrival (missing without a mark), begin (of its first step), first_token
        (when it was there; missing without tokens), end, queued (from its arrival to begin)
        [ns], prompt (tokens computed), reused (tokens from the cache), output (tokens). Failed
        steps and those of warm-up runs serve no request.
    layers: One row for each run of kernels of one layer, on thread 0: compute, step, phase, layer
        (-1: none), begin, dur [ns].
    ops: One row for each kernel and thread that ran it: step (-1: none), phase, compute, ctx,
        thread (ggml's; 0 is the caller), plan, kernel (its place in the plan), node (the first),
        n_nodes (more than one when fused), layer (-1: none), block, op, name (of the result), label
        (op and the weight's type), type and shape of the result, weight and weight_type (of the
        first weight read), flops, bytes (moved), work_bound (both are upper bounds, because the log
        does not record what an attention mask hid), begin, dur, wait [ns], gb_per_s [10^9 bytes/s]
        and gflop_per_s [10^9/s]. flops and bytes are the kernel's, which its threads share: sum
        them over `thread == 0`, the only rows with rates. wait is the part of dur inside barriers.
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
    `requests` (WHOLE_LOG) come whole, after the others: until then, memory holds the numbers of the
    log's steps, sequences, tokens, marks and machine events (about 230 bytes a step; 0.6 kB more
    when requests are found at the end), but none of its computes and ops. `on_end` is called after
    the whole log was read, with how it ended. Raises LogError, with the line, if the log cannot be
    read; `lenient` leaves damaged lines out.
    """
    builder, kept = _Builder(), Kept()
    named: set[str] = set()
    by_part = tuple(name for name in NAMES if name not in WHOLE_LOG)
    for part in load_parts(path, on_progress, lenient=lenient, every_thread=True):
        for name, frame in builder.frames(part, by_part).items():
            if len(frame) or name not in named:
                named.add(name)
                yield name, frame
        kept.add(part)
    yield from builder.frames(kept.session(part), WHOLE_LOG).items()
    if on_end is not None:
        on_end(part.log_end)


class _Builder:
    """Builds the tables of a session, or of its parts in order."""

    def __init__(self) -> None:
        self._kernels = KernelRows()
        self._words: dict[tuple[str, str], Words] = defaultdict(Words)
        self._phases = Words(PHASES)
        self._graphs: set[int] = set()

    def frames(self, session: Session, names: Sequence[str]) -> dict[str, pd.DataFrame]:
        self._session = session
        steps = session.steps
        self._phase_of = dict(zip(steps["step"].tolist(), steps["phase"].tolist(), strict=True)) | {
            known.event.step: known.phase for known in session.open_steps
        }
        self._step_of = dict(
            zip(
                session.computes["compute"].tolist(), session.computes["step"].tolist(), strict=True
            )
        )
        try:
            return {name: pd.DataFrame(getattr(self, f"_{name}")()) for name in names}
        except OverflowError:
            raise LogError("it has numbers beyond 64 bits", session.path) from None

    # --- what was measured ---

    def _steps(self) -> dict[str, Any]:
        steps = self._session.steps
        dur = steps["end"] - steps["begin"]
        first = ("n_tokens", "n_outputs", "n_seqs", "pos", "thread", "begin", "end")
        last = ("status", "n_ubatch", "n_reused", "prepare", "readback", "recorder")
        return {
            "step": steps["step"],
            "ctx": steps["ctx"],
            "phase": self._phase(steps["step"]),
            **{name: steps[name] for name in first},
            "dur": dur,
            **{name: steps[name] for name in (*last, "minflt", "majflt")},
            "tokens_per_s": rate(steps["n_tokens"] * 1e9, dur),
            "disturbed": disturbed_steps(self._session, steps),
        }

    def _requests(self) -> dict[str, Any]:
        return request_columns(self._session)

    def _layers(self) -> dict[str, Any]:
        rows = Rows(self._session.layers)
        return {
            **self._where(rows),
            "layer": rows.column([of.label for of in rows.timings]),
            **rows.times(),
        }

    def _ops(self) -> dict[str, Any]:
        rows, kernels = Rows(self._session.ops), self._kernels
        known = kernels.rows(self._session, rows)
        thread = rows.column([np.array(ops.thread) for ops in rows.timings])
        context = [np.array(self._context_of(ops.plan)) for ops in rows.timings]
        words = {
            name: kernels.words[name].categorical(kernels.column(name)[known])
            for name in KERNEL_WORDS
        }
        times = rows.times()
        works = [self._session.work(ops).cells() for ops in rows.timings]
        n_flops = rows.column([work.flops for work in works])
        n_bytes = rows.column([work.bytes for work in works])
        caller = thread == 0
        return {
            **self._where(rows),
            "ctx": rows.column(context),
            "thread": thread,
            **{name: kernels.column(name)[known] for name in KERNEL_NUMBERS},
            **words,
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
        return {
            **{name: tokens[name] for name in ("ctx", "step", "index", "id")},
            "text": text(tokens["text"]),
            "p": np.array([np.nan if p is None else p for p in tokens["p"]], np.float64),
            "begin": tokens["t"],
            "dur": tokens["dur"],
        }

    def _kv(self) -> dict[str, Any]:
        kv = self._session.kv
        cells = [None if of is None else ",".join(map(str, of)) for of in kv["cells"]]
        return {
            **{name: kv[name] for name in ("t", "ctx", "step", "cache")},
            **{name: self._category("kv", name, kv[name]) for name in ("kind", "op")},
            **{name: kv[name] for name in ("used", "size", "n_kv", "bytes")},
            **{name: optional(kv[name]) for name in ("seq", "seq_dst", "p0", "p1", "arg")},
            "cells": text(cells),
        }

    def _memory(self) -> dict[str, Any]:
        rows = [(event, use) for event in self._session.memory for use in event.buffers]
        return {
            "t": int64([event.t for event, _ in rows]),
            "ctx": int64([event.ctx for event, _ in rows]),
            "buffer": self._category("memory", "buffer", [use.buffer for _, use in rows]),
            "model": int64([use.model for _, use in rows]),
            "context": int64([use.context for _, use in rows]),
            "compute": int64([use.compute for _, use in rows]),
            "rss": int64([event.rss for event, _ in rows]),
        }

    def _marks(self) -> dict[str, Any]:
        marks = self._session.marks
        open_ended = marks["end"] < 0
        return {
            "mark": marks["mark"],
            "name": self._category("marks", "name", marks["name"]),
            "begin": marks["begin"],
            "end": masked(marks["end"], open_ended),
            "dur": masked(marks["end"] - marks["begin"], open_ended),
            "thread": marks["thread"],
        }

    def _machine(self) -> dict[str, Any]:
        return machine_columns(self._session)

    def _computes(self) -> dict[str, Any]:
        return compute_columns(self._session, partial(self._category, "computes"), self._phase)

    def _messages(self) -> dict[str, Any]:
        return message_columns(self._session, partial(self._category, "messages"))

    def _notes(self) -> dict[str, Any]:
        return note_columns(self._session, partial(self._category, "notes"))

    def _tensor_stats(self) -> dict[str, Any]:
        category = partial(self._category, "tensor_stats")
        return statistics_columns(self._session, category, self._phase, self._step_of)

    def _sessions(self) -> dict[str, Any]:
        return session_columns(self._session)

    # --- what there is ---

    def _nodes(self) -> dict[str, Any]:
        new = [g for n, g in self._session.graphs.items() if n not in self._graphs and g.nodes]
        self._graphs = set(self._session.graphs)
        columns: dict[str, list[Any]] = defaultdict(list)
        for graph in new:
            for name, column in node_columns(graph).items():
                columns[name] += column
        return {
            name: self._category("nodes", name, columns[name])
            if unit == "word"
            else text(columns[name])
            if unit == "text"
            else np.array(columns[name], np.bool_ if unit == "bool" else np.int64)
            for name, unit in NODE_COLUMNS.items()
        }

    def _tensors(self) -> dict[str, Any]:
        tensors = self._session.tensors
        n_elements = int64([int(np.prod(t.ne, dtype=object)) for t in tensors])
        n_bytes = int64([t.bytes for t in tensors])
        return {
            "model": int64([t.model for t in tensors]),
            "tensor": int64([t.tensor for t in tensors]),
            "name": text([t.name for t in tensors]),
            "layer": int64([t.layer for t in tensors]),
            "type": self._category("tensors", "type", [t.type for t in tensors]),
            "shape": self._category("tensors", "shape", [shape_text(t.ne) for t in tensors]),
            "n_elements": n_elements,
            "bytes": n_bytes,
            "bits_per_weight": rate(n_bytes * 8, n_elements),
            "buffer": self._category("tensors", "buffer", [t.buffer for t in tensors]),
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

    def _context_of(self, plan: int) -> int:
        return self._session.graphs[self._session.plans[plan].graph].ctx

    def _phase_codes(self, step: Int64) -> NDArray[Any]:
        return self._phases.codes([self._phase_of.get(number) for number in step.tolist()])

    def _phase(self, step: Int64) -> pd.Categorical:
        return self._phases.categorical(self._phase_codes(step))

    def _category(self, table: str, name: str, values: Iterable[str | None]) -> pd.Categorical:
        words = self._words[table, name]
        return words.categorical(words.codes(values))
