"""The summary of a session: its speed, its time and memory, and the overhead of recording.

Invariant: the rows of "Where the time went" add up to the steps' time as the caller saw it.
Warm-up runs and failed steps are never counted, and a note says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.clock import clock_report, clock_sentences, untimed_note
from llamacpp_instr.converters.analyses.findings import compute_findings, gather_facts
from llamacpp_instr.converters.analyses.machine import Machine
from llamacpp_instr.converters.analyses.marks import compute_marks
from llamacpp_instr.converters.analyses.stats import op_table
from llamacpp_instr.log.graph import ops as knowledge
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.steps import BESIDE, LAYERS, WARM_UP, Account, counted_steps
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.report import Cell, Column, Figures, Report, shown

TOP_OPS, MOST_ROWS = 10, 100
OWN_MARK = re.compile(rf"{WARM_UP}|run \d+")
ALL_LAYERS = 12
"""all layers are shown up to this number; with more, only the slowest, and what is outside"""


def compute_summary(session: Session, probe: Probe | None = None) -> list[Report]:
    """The sections of the summary, without those that the log has no data for. `probe` is of the
    machine that recorded it, if there is one."""
    steps, notes = counted_steps(session)
    account = Account(session, steps)
    facts = gather_facts(account, probe)
    clock = clock_report(facts.clock, facts.requests)
    sections = [
        _overview(session, clock_sentences(clock, len(facts.requests))),
        compute_findings(facts),
        clock,
        _speed(account, notes),
        _time(account),
        _layers(account),
        _top_ops(account),
        _marks(session),
        _memory(session),
        _recorder(session, facts.machine),
    ]
    return [replace(of, most=MOST_ROWS) for of in sections if of.rows or of.notes]


# --- sections ---


def _overview(session: Session, speed: list[list[Cell]]) -> Report:
    start = session.start
    rows: list[list[Cell]] = [["log", session.path], *speed]
    for model in session.models.values():
        name = model.name or model.path.rsplit("/", 1)[-1]
        rows.append(["model", _joined(name, model.arch, model.ftype, _parameters(model.params))])
    threads = sorted(
        {n for c in session.contexts.values() for n in (c.n_threads, c.n_threads_batch) if n}
    )
    used = " and ".join(counted(n, "thread") for n in threads)
    rows.append(["machine", _joined(start.host.cpu, used)])
    recorded = not start.args.get("dialect")  # logs of other formats do not have it
    if recorded and not all(context.flash_attn for context in session.contexts.values()):
        off = "off, as Llama() has it; Llama(flash_attn=True) and instr run turn it on"
        rows.append(["flash attention", off])
    rows.append(["recorded", f"{start.time}, level {start.level}"])
    notes = []
    if ended := session.log_end.sentence():
        notes.append(f"{ended[0].upper()}{ended[1:]}: the figures cover what was recorded.")
    if start.perturbed:
        notes.append("Tensor values were read (--stats): do not compare times.")
    if start.args.get("dialect"):
        notes.append("Converted from an earlier fork's log: it measured times differently.")
    rows = [row for row in rows if row[1]]
    figures: Figures = {
        "threads": (max(threads, default=None), "count"),
        "parameters": (sum(model.params for model in session.models.values()), "count"),
    }
    columns = [Column("fact"), Column("value")]
    return Report("Session", columns, rows, notes, headed=False, figures=figures)


def _speed(account: Account, notes: list[str]) -> Report:
    session, steps = account.session, account.steps
    rows: list[list[Cell]] = []
    for phase in account.phases:
        of_phase = steps.rows(steps["phase"] == phase)
        dur = of_phase["end"] - of_phase["begin"]
        tokens, total = int(of_phase["n_tokens"].sum()), int(dur.sum())
        row: list[Cell] = [phase, len(of_phase), tokens, total, *[None] * 3]
        if tokens and total:
            rates = of_phase["n_tokens"] / np.maximum(dur, 1) * 1e9
            row[4:] = [float(q) for q in np.quantile(rates, (0.5, 0.1, 0.9))]
        rows.append(row)
    figures: Figures = {}
    if rows:
        notes = ["tokens/s are those of a step: time inside llama.cpp alone.", *notes]
    notes = [*notes, *_graph_notes(session, steps, figures), *_fault_notes(steps, figures)]
    dur = session.tokens["dur"][np.isin(session.tokens["step"], steps["step"])]
    if len(dur):
        mean = float(dur.mean())
        each = shown(mean, "ns")
        notes.append(
            f"Sampling took {each} for each of {counted(len(dur), 'token')}, outside of the steps."
        )
        figures |= {"tokens sampled": (len(dur), "count"), "sampling, each": (mean, "ns")}
    columns = [
        Column("Phase"), Column("steps", "count"), Column("tokens", "count"), Column("time", "ns"),
        *(Column(name, "per_second") for name in ("tokens/s median", "p10", "p90")),
    ]  # fmt: skip
    return Report("Speed", columns, rows, notes, figures=figures)


def _graph_notes(session: Session, steps: Table, figures: Figures) -> Iterator[str]:
    computes = session.computes
    inside = np.isin(computes["step"], steps["step"])
    reused = int((computes["reused"] & inside).sum())
    built = int(inside.sum()) - reused
    if built + reused:
        figures |= {"graphs built": (built, "count"), "graphs reused": (reused, "count")}
        yield f"Graphs were built {counted(built, 'time')} and reused {counted(reused, 'time')}."


def _fault_notes(steps: Table, figures: Figures) -> Iterator[str]:
    """Page faults of the first step, which show a cold start."""
    if len(steps) < 2:
        return
    faults = steps["minflt"] + steps["majflt"]
    figures |= {
        "minor faults of the first step": (int(steps["minflt"][0]), "count"),
        "major faults of the first step": (int(steps["majflt"][0]), "count"),
        "faults of later steps, mean": (float(np.mean(faults[1:])), "number"),
    }
    later = float(np.median(faults[1:]))
    if faults[0] > 100 and faults[0] > 4 * later:
        yield (
            f"Cold start: the first step took {steps['minflt'][0]:,} minor and"
            f" {steps['majflt'][0]:,} major page faults, the median of later ones is"
            f" {later:,.0f}."
        )


def _time(account: Account) -> Report:
    """Every nanosecond of the steps, by block and by other activity."""
    spent = {phase: defaultdict(int, account.of_phase(phase)) for phase in account.phases}
    for place, ns in account.by_place()[0].items():
        if place.block:
            spent[place.phase][place.block] += ns
    order = [*knowledge.BLOCKS, LAYERS, *BESIDE]
    by_block = {what: {phase: of[what] for phase, of in spent.items()} for what in order}
    rows = _phase_rows(
        [(what, by_block[what]) for what in order if any(by_block[what].values())], account
    )
    notes = ["The rest is inputs, readback and llama.cpp's own bookkeeping."]
    if any(by_block["between ops"].values()):
        notes.insert(0, "Between ops, thread 0 waits until the other threads have ended theirs.")
    if not account.session.ops:
        notes.append("No ops were recorded: blocks need the level detailed.")
    if not len(account.session.computes):
        return Report("Where the time went", [], [])
    columns = _phase_columns(Column("Block"), account.phases)
    return Report("Where the time went", columns, rows, notes)


def _phase_columns(first: Column, phases: list[str]) -> list[Column]:
    pairs = [(Column(phase, "ns"), Column(f"of {phase}", "share")) for phase in phases]
    return [first, *(column for pair in pairs for column in pair)]


def _phase_rows(
    spent: list[tuple[str | int, dict[str, int]]], account: Account
) -> list[list[Cell]]:
    """Rows of a label, then time and share of each phase."""
    totals = {phase: sum(account.of_phase(phase).values()) for phase in account.phases}
    rows: list[list[Cell]] = []
    for label, by_phase in spent:
        row: list[Cell] = [label]
        for phase, ns in by_phase.items():
            row += [ns, ns / totals[phase] if totals[phase] else None]
        rows.append(row)
    return rows


def _layers(account: Account) -> Report:
    found = account.by_layer
    spent = {
        layer: {phase: found.get((phase, layer), 0) for phase in account.phases}
        for layer in sorted({layer for _, layer in found})
    }
    rows = _phase_rows(list(spent.items()), account)
    notes = ["From a layer's first kernel to its last; stats --by layer adds up its kernels."]
    if not rows:
        return Report("Layers", [], [])
    total = {layer: sum(spent[layer].values()) for layer in spent if layer >= 0}
    figures: Figures = {"layers": (len(total), "count")}
    if len(total) > ALL_LAYERS:
        slowest = sorted(total, key=lambda layer: -total[layer])[:ALL_LAYERS]
        median = float(np.median([*total.values()]))
        figures["median layer"] = (median, "ns")
        notes.append(f"The slowest of {len(total)}; the median layer took {shown(median, 'ns')}.")
        rows = [row for row in rows if row[0] in (-1, *slowest)]
    columns = _phase_columns(Column("Layer", "layer"), account.phases)
    return Report("Layers", columns, rows, notes, figures=figures)


def _top_ops(account: Account) -> Report:
    table = op_table(account)
    shown_keys = ("op", "count", "total", "share", "mean", "flop_per_s", "bytes_per_s")
    at = [table.keys().index(key) for key in shown_keys]
    rows = [[row[i] for i in at] for row in table.rows]
    notes = list(table.notes)
    if rows and (untimed := untimed_note(account.session)):
        notes.append(untimed)
    figures: Figures = {"ops": (len(rows), "count")}
    if len(rows) > TOP_OPS:
        ns = [int(row[2] or 0) for row in rows]
        rest = sum(ns[TOP_OPS:]) / max(sum(ns), 1)
        figures["share of other ops"] = (rest, "fraction")
        others = counted(len(rows) - TOP_OPS, "other op")
        notes.append(f"Not shown: {others}, {100 * rest:.1f} % of the time.")
    columns = [
        Column("Op"), Column("calls", "count"), Column("time", "ns"), Column("share", "share"),
        Column("each", "ns"), Column("FLOP/s", "flop_per_second"),
        Column("bytes/s", "bytes_per_second"),
    ]  # fmt: skip
    return Report("Top ops", columns, rows[:TOP_OPS], notes, figures=figures)


def _marks(session: Session) -> Report:
    """The marks of the application, without those of `instr run`."""
    report = compute_marks(session)
    report.rows = [row for row in report.rows if not OWN_MARK.fullmatch(str(row[0]))]
    return report if report.rows else Report("Marks", [], [])


def _memory(session: Session) -> Report:
    rows: list[list[Cell]] = []
    latest = {memory.ctx: memory for memory in session.memory}
    for ctx, memory in sorted(latest.items()):
        for use in memory.buffers:
            rows.append([ctx, use.buffer, use.model, use.context, use.compute])
    notes = []
    figures: Figures = {}
    if len(latest) > 1:
        notes.append("Contexts of one model share its weights.")
    for ctx in sorted(latest):
        if caches := _fullest(session, ctx):
            n_bytes = sum(n for n, _, _ in caches.values())
            figures[f"bytes used of context {ctx}"] = (n_bytes, "bytes")
            for cache, (_, used, size) in sorted(caches.items()):
                of = f"context {ctx}" + (f", cache {cache}" if len(caches) > 1 else "")
                figures |= {
                    f"cells used of {of}": (used, "count"),
                    f"cells of {of}": (size, "count"),
                }
            cells = " and ".join(f"{used:,} of {size:,} cells" for _, used, size in caches.values())
            notes.append(f"Context {ctx} used at most {cells} ({shown(n_bytes, 'bytes')}).")
    if rss := max((memory.rss for memory in session.memory), default=0):
        figures["resident"] = (rss, "bytes")
        notes.append(f"The whole process had up to {shown(rss, 'bytes')} resident.")
    uses = ("weights", "KV cache, state", "compute")
    columns = [Column("Context", "id"), Column("buffer"), *(Column(n, "bytes") for n in uses)]
    return Report("Memory", columns, rows, notes, figures=figures)


def _fullest(session: Session, ctx: int) -> dict[int, tuple[int, int, int]]:
    """Bytes and cells in use, and all cells, of each cache of a context, when most was in use."""
    now: dict[int, tuple[int, int, int]] = {}
    most, fullest = [-1, -1], now
    kv = session.kv.rows(session.kv["ctx"] == ctx)
    for cache, *of in kv.tuples("cache", "bytes", "used", "size"):
        now[cache] = (of[0], of[1], of[2])
        if (total := [sum(of[i] for of in now.values()) for i in (0, 1)]) > most:
            most, fullest = total, dict(now)
    return fullest


def _recorder(session: Session, machine: Machine | None) -> Report:
    end = session.end
    if end is None:
        return Report("Recorder", [], [])
    steps = session.steps
    in_steps = end.decode_ns + int((steps["end"] - steps["returned"]).sum())
    share = end.overhead_ns / in_steps if in_steps else 0.0
    n_events = sum(end.events.values()) + 1
    notes = [
        f"Including warm-up runs, it spent {shown(end.overhead_ns, 'ns')},"
        f" {100 * share:.2f} % of the time in decode by the clock, and wrote"
        f" {counted(n_events, 'event')} ({shown(end.bytes, 'bytes')}). It dropped"
        f" {counted(end.dropped, 'event')} and {counted(end.dropped_ops, 'op')}."
    ]
    if machine is not None and machine.is_disturbed:
        notes.append("Other work had the CPU meanwhile, which the clock counts as the recorder's.")
    figures: Figures = {
        "overhead": (end.overhead_ns, "ns"),
        "overhead, of decode": (share, "fraction"),
        "events": (n_events, "count"),
        "bytes": (end.bytes, "bytes"),
        "events dropped": (end.dropped, "count"),
        "ops dropped": (end.dropped_ops, "count"),
    }
    return Report("Recorder", [], [], notes, figures=figures)


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _parameters(n: int) -> str:
    if not n:
        return ""
    if n < 1e5:
        return f"{n:,} parameters"
    return f"{n / 1e9:.2f}B parameters" if n >= 1e9 else f"{n / 1e6:.1f}M parameters"
