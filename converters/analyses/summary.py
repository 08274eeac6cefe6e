"""The summary of a session: its speed, its time and memory, and the overhead of recording.

Invariant: the rows of "Where the time went" add up to the steps' time as the caller saw it.
Warm-up runs and failed steps are never counted, and a note says so.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.bench import bench_reports
from llamacpp_instr.converters.analyses.clock import (
    Machine,
    clock_report,
    clock_sentences,
    untimed_note,
)
from llamacpp_instr.converters.analyses.findings import Facts, compute_findings
from llamacpp_instr.converters.analyses.machines import machine_names, machine_reports
from llamacpp_instr.converters.analyses.stats import op_table, recording_notes
from llamacpp_instr.converters.analyses.step_times import adapter_names
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.log.memory import MemoryInUse
from llamacpp_instr.log.requests import step_tokens
from llamacpp_instr.log.schema import Device
from llamacpp_instr.log.session import WARM_UP, Session, Table
from llamacpp_instr.log.steps import (
    BESIDE,
    LAYERS,
    ON_DEVICES,
    Account,
    counted_steps,
    steps_inside,
)
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.report import Cell, Column, Figures, Report, shown

Int64 = NDArray[np.int64]

TOP_OPS, MOST_ROWS = 10, 100
OWN_MARK = re.compile(rf"{WARM_UP}|run \d+")
ALL_LAYERS = 12
"""all layers are shown up to this number; with more, only the slowest, and what is in none"""


def compute_summary(session: Session, probe: Probe | None = None) -> list[Report]:
    """The sections of the summary, without those that the log has no data for. `probe` is of the
    machine that recorded it, if there is one."""
    steps, notes = counted_steps(session)
    account = Account(session, steps)
    facts = Facts(account, probe)
    clock = clock_report(facts.clock, facts.requests)
    sections = [
        _overview(session, clock_sentences(clock, len(facts.requests))),
        *bench_reports(account),
        compute_findings(facts),
        clock,
        _speed(account, notes),
        _time(account),
        *machine_reports(account),
        *_devices(account),
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
    rows += [["adapter", name] for name in adapter_names(session)]
    threads = sorted(
        {n for c in session.contexts.values() for n in (c.n_threads, c.n_threads_batch) if n}
    )
    used = " and ".join(counted(n, "thread") for n in threads)
    rows.append(["machine", _joined(start.host.cpu, used)])
    rows += [["machine", name] for name in machine_names(session)]
    recorded = not start.args.get("dialect")  # logs of other formats do not have it
    if recorded and not all(context.flash_attn for context in session.contexts.values()):
        off = "off, the default of Llama(); Llama(flash_attn=True) and instr run turn it on"
        rows.append(["flash attention", off])
    rows.append(["recorded", f"{start.time}, level {start.level}"])
    notes = []
    if ended := session.log_end.sentence():
        notes.append(f"{ended[0].upper()}{ended[1:]}: the figures cover what was recorded.")
    notes += recording_notes(session)
    rows = [row for row in rows if row[1]]
    figures: Figures = {
        "threads": (max(threads, default=None), "count"),
        "parameters": (sum(model.params for model in session.models.values()), "count"),
    }
    columns = header("fact", "value")
    return Report("Session", columns, rows, notes, headed=False, figures=figures)


def _speed(account: Account, notes: list[str]) -> Report:
    session, steps = account.session, account.steps
    rows: list[list[Cell]] = []
    prompt, output = step_tokens(session, steps)
    # a decode of several tokens of one sequence verifies drafted ones
    verifies = (steps["phase"] == "decode") & (steps["n_tokens"] > steps["n_seqs"])
    given = np.where(verifies, output, steps["n_tokens"])
    for phase in account.phases:
        of_phase = steps["phase"] == phase
        dur, tokens = account.total[of_phase], given[of_phase]
        speeds: list[float | None] = [None] * 3
        if tokens.any() and dur.any():
            rates = tokens / np.maximum(dur, 1) * 1e9
            speeds = np.quantile(rates, (0.5, 0.1, 0.9)).tolist()
        counts = (int(of[of_phase].sum()) for of in (of_phase, prompt, output, account.total))
        rows.append([phase, *counts, *speeds])
    figures: Figures = {}
    if rows:
        notes = ["tokens/s are those of a step: time inside llama.cpp alone.", *notes]
    reused = session.computes["reused"][np.isin(session.computes["step"], steps["step"])]
    if n := len(reused):
        n_reused = int(reused.sum())
        figures |= {"graphs built": (n - n_reused, "count"), "graphs reused": (n_reused, "count")}
        built = counted(n - n_reused, "time")
        notes = [*notes, f"Graphs were built {built} and reused {counted(n_reused, 'time')}."]
    notes = [*notes, *_fault_notes(steps, figures)]
    dur = session.tokens["dur"][np.isin(session.tokens["step"], steps["step"])]
    if len(dur):
        mean = float(dur.mean())
        figures |= {"tokens sampled": (len(dur), "count"), "sampling, each": (mean, "ns")}
        notes.append(
            f"Sampling took {shown(mean, 'ns')} for each of {counted(len(dur), 'token')}, outside"
            " of the steps."
        )
    columns = header(
        "Phase", ("count", "steps", "prompt tokens", "output tokens"), ("ns", "time"),
        ("per_second", "tokens/s median", "p10", "p90"),
    )  # fmt: skip
    return Report("Speed", columns, rows, notes, figures=figures)


def _fault_notes(steps: Table, figures: Figures) -> Iterator[str]:
    """Page faults of the first step, which show a cold start."""
    if len(steps) < 2:
        return
    minor, major = int(steps["minflt"][0]), int(steps["majflt"][0])
    later = (steps["minflt"] + steps["majflt"])[1:]
    figures |= {
        "minor faults of the first step": (minor, "count"),
        "major faults of the first step": (major, "count"),
        "faults of later steps, mean": (float(np.mean(later)), "number"),
    }
    median = float(np.median(later))
    if minor + major > 100 and minor + major > 4 * median:
        yield (
            f"Cold start: the first step took {minor:,} minor and {major:,} major page faults, the"
            f" median of later ones is {median:,.0f}."
        )


def _time(account: Account) -> Report:
    """Every nanosecond of the steps, by block and by other activity."""
    if not len(account.session.computes):
        return Report("Where the time went", [], [])
    spent = {phase: defaultdict(int, account.of_phase(phase)) for phase in account.phases}
    rows, by_block = _block_rows(account, spent, "", (LAYERS, *BESIDE))
    notes = ["The rest is inputs, readback and llama.cpp's own bookkeeping."]
    if any(by_block["between ops"].values()):
        notes.insert(0, "Between ops, thread 0 waits until the other threads have finished theirs.")
    if any(any(by_block[part].values()) for part in ON_DEVICES):
        notes.append(
            "Submission: thread 0 gives a device its parts. Device waits: it copies their inputs,"
            " and waits while the device computes."
        )
    if account.session.start.level == "minimal":
        notes.append("No ops were recorded: blocks need the level detailed.")
    notes += untimed_note(account)
    return Report("Where the time went", _phase_columns("Block", account), rows, notes)


def _block_rows(
    account: Account, spent: dict[str, defaultdict[str, int]], device: str, others: Sequence[str]
) -> tuple[list[list[Cell]], dict[str, dict[str, int]]]:
    """A row for each block of a device's kernels, or thread 0's, and for the `others` in `spent`;
    and the same by row and phase, including what took no time."""
    for place, ns in account.by_place()[0].items():
        if place.block and place.device == device:
            spent[place.phase][place.block] += ns
    order = [*BLOCKS, *others]
    by_block = {what: {phase: of[what] for phase, of in spent.items()} for what in order}
    rows = _phase_rows({of: ns for of, ns in by_block.items() if any(ns.values())}, account)
    return rows, by_block


def _devices(account: Account) -> Iterator[Report]:
    """What devices ran behind thread 0, over the same time."""
    rows: list[list[Cell]] = []
    for device, of_steps in account.devices.items():
        ops = [of for of in account.device_ops if of.device == device]
        for phase in account.phases:
            there = account.steps["phase"] == phase
            n = sum(int(there[account.rows_of(of)].sum()) * of.dur.shape[1] for of in ops)
            whole, ran, busy = (int(of[there].sum()) for of in (account.total, *of_steps))
            if n:
                rows.append([device, phase, n, ran, busy, busy / whole if whole else None])
    columns = header(
        "Device", "phase", ("count", "kernels"), ("ns", "execution", "busy"),
        ("share", "of the steps' time"),
    )  # fmt: skip
    known = account.session.devices
    notes = [_clock_note(known[name]) for name in account.devices if name in known]
    if rows:
        notes.insert(0, "Busy is the time in which a device ran at least one kernel; it overlaps"
                        " the submission and the waits above.")  # fmt: skip
    yield Report("Devices", columns, rows, notes, labels=2)
    blocks: list[list[Cell]] = []
    for device in account.devices:
        spent: dict[str, defaultdict[str, int]] = {of: defaultdict(int) for of in account.phases}
        blocks += [[device, *row] for row in _block_rows(account, spent, device, ())[0]]
    columns = [*header("Device"), *_phase_columns("Block", account)]
    about = ["Shares are of the steps' time, which a table above accounts for."]
    yield Report("Where the time of devices went", columns, blocks, about * bool(blocks), labels=2)


def _clock_note(device: Device) -> str:
    how = {
        "calibrated": "its driver relates its clock to the log's",
        "bounded": "the submission and the wait bound its times",
        "cupti": "CUPTI gives its times on the log's clock",
        "joined": "the commands to it and their replies bound its times",
    }
    within = shown(device.uncertainty, "ns")
    return f"{device.name} ({device.description}): {how[device.clock]}, within {within}."


def _phase_columns(first: str | Column, account: Account) -> list[Column]:
    pairs = [header(("ns", phase), ("share", f"of {phase}")) for phase in account.phases]
    return header(first, *(column for pair in pairs for column in pair))


def _phase_rows(
    spent: Mapping[str, dict[str, int]] | Mapping[int, dict[str, int]], account: Account
) -> list[list[Cell]]:
    """Rows of a label, then time and share of each phase."""
    totals = {phase: sum(account.of_phase(phase).values()) for phase in account.phases}
    rows: list[list[Cell]] = []
    for label, by_phase in spent.items():
        rows.append([label])
        for phase, ns in by_phase.items():
            rows[-1] += [ns, ns / totals[phase] if totals[phase] else None]
    return rows


def _layers(account: Account) -> Report:
    spent: dict[tuple[int, str], dict[str, int]] = {}
    for phase, key, ns in _by_layer(account):
        spent.setdefault(key, dict.fromkeys(account.phases, 0))[phase] += ns
    if not spent:
        return Report("Layers", [], [])
    on_devices = bool(account.device_ops)
    keys = sorted(spent)
    of_keys = _phase_rows({i: spent[key] for i, key in enumerate(keys)}, account)
    rows = [[*key[: 1 + on_devices], *row[1:]] for key, row in zip(keys, of_keys, strict=True)]
    notes = ["From a layer's first kernel to its last; stats --by layer adds up its kernels."]
    if on_devices:
        notes = ["The kernels of each layer, where they ran; those of devices overlap the others."]
    total: Counter[int] = Counter()
    for (layer, _), by_phase in spent.items():
        if layer >= 0:
            total[layer] += sum(by_phase.values())
    figures: Figures = {"layers": (len(total), "count")}
    if len(total) > ALL_LAYERS:
        slowest = sorted(total, key=lambda layer: -total[layer])[:ALL_LAYERS]
        median = float(np.median([*total.values()]))
        figures["median layer"] = (median, "ns")
        notes.append(f"The slowest of {len(total)}; the median layer took {shown(median, 'ns')}.")
        rows = [row for row in rows if row[0] in (-1, *slowest)]
    columns = _phase_columns(Column("Layer", "layer"), account)
    columns[1:1] = header("Device") * on_devices
    return Report("Layers", columns, rows, notes, figures=figures, labels=1 + on_devices)


def _by_layer(account: Account) -> Iterator[tuple[str, tuple[int, str], int]]:
    """Phase, layer and device, and ns: of kernels if there are some on devices, else from the first
    kernel of a layer to its last."""
    if account.device_ops:
        for at, ns in account.by_place()[0].items():
            yield at.phase, (at.layer, at.device or "CPU"), ns
    else:
        for (phase, layer), ns in account.by_layer.items():
            yield phase, (layer, ""), ns


def _top_ops(account: Account) -> Report:
    table = op_table(account)
    of_device = ("device",) * (table.labels - 1)
    shown_keys = (*of_device, "op", "count", "total", "share", "mean", "flop_per_s", "bytes_per_s")
    at = [table.keys().index(key) for key in shown_keys]
    rows = [[row[i] for i in at] for row in table.rows]
    notes = [*table.notes, *(untimed_note(account) if rows else [])]
    time = len(of_device) + 2
    figures: Figures = {"ops": (len(rows), "count")}
    if len(rows) > TOP_OPS:
        ns = [int(row[time] or 0) for row in rows]
        rest = sum(ns[TOP_OPS:]) / max(sum(ns), 1)
        figures["share of other ops"] = (rest, "fraction")
        others = counted(len(rows) - TOP_OPS, "other op")
        notes.append(f"Not shown: {others}, {100 * rest:.1f} % of the time.")
    columns = header(
        *(name.capitalize() for name in of_device), "Op", ("count", "calls"), ("ns", "time"),
        ("share", "share"), ("ns", "each"),
        ("flop_per_second", "FLOP/s"), ("bytes_per_second", "bytes/s"),
    )  # fmt: skip
    labels = len(of_device) + 1
    return Report("Top ops", columns, rows[:TOP_OPS], notes, figures=figures, labels=labels)


def _marks(session: Session) -> Report:
    """The marks of the application, without those of `instr run` and the requests of llama-server:
    another thread computes them, and `instr requests` has their steps."""
    report = compute_marks(session)
    served = {note.name for note in session.notes} & {"request"}
    rows = (row for row in report.rows if not OWN_MARK.fullmatch(str(row[0])))
    report.rows = [row for row in rows if row[0] not in served]
    return report if report.rows else Report("Marks", [], [])


def compute_marks(session: Session) -> Report:
    """One row for each name of a mark (`record().mark`), in the order in which they first began; no
    rows if the application made no marks.

    Columns: how often it began; for those that ended, the total, mean, median and longest time (ns,
    of the clock); steps that began inside on the same thread, also if they failed, with their time
    (ns) and tokens. A step inside two marks counts in both. An instant has no times.
    """
    marks = session.marks
    inside = _inside(marks, session.steps)
    by_time = np.argsort(marks["begin"], kind="stable").tolist()
    rows: list[list[Cell]] = []
    for name, numbers in grouped(by_time, lambda i: str(marks["name"][i])).items():
        of = marks.rows(np.array(numbers, np.int64))
        dur = (of["end"] - of["begin"])[of["end"] > of["begin"]]
        spread: list[Cell] = [None] * 4
        if len(dur):
            spread = [int(dur.sum()), float(dur.mean()), float(np.median(dur)), int(dur.max())]
        rows.append([name, len(numbers), *spread, *inside[numbers].sum(axis=0).tolist()])
    notes = []
    if n_open := int((marks["end"] < 0).sum()):
        notes.append(f"Left out: the time of {counted(n_open, 'mark')} without an end.")
    columns = header(
        "mark", ("count", "count"), ("ns", "total", "mean", "p50", "longest"), ("count", "steps"),
        ("ns", "in steps"), ("count", "tokens"),
    )  # fmt: skip
    return Report("Marks", columns, rows, notes)


def _inside(marks: Table, steps: Table) -> Int64:
    """For each mark, the number, the time and the tokens of the steps that began in it."""
    found = np.zeros((len(marks), 3), np.int64)
    for thread in np.unique(marks["thread"]):
        of_marks = np.flatnonzero(marks["thread"] == thread)
        of_steps = steps.rows(steps["thread"] == thread)
        of_steps = of_steps.rows(np.argsort(of_steps["begin"], kind="stable"))
        first, end = steps_inside(marks.rows(of_marks), of_steps["begin"])
        dur = of_steps["end"] - of_steps["begin"]
        columns = np.stack([np.ones(len(of_steps), np.int64), dur, of_steps["n_tokens"]], axis=1)
        sums = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(columns, axis=0)])
        found[of_marks] = sums[end] - sums[first]
    return found


def _memory(session: Session) -> Report:
    latest = {memory.ctx: memory for memory in session.memory}
    rows: list[list[Cell]] = [
        [ctx, use.buffer, use.model, use.context, use.compute]
        for ctx, memory in sorted(latest.items())
        for use in memory.buffers
    ]
    figures: Figures = {}
    notes = ["Contexts of one model share its weights."] if len(latest) > 1 else []
    for ctx in sorted(latest):
        if caches := _fullest(session, ctx):
            n_bytes = sum(n for n, _, _ in caches.values())
            figures[f"bytes used of context {ctx}"] = (n_bytes, "bytes")
            for cache, (_, used, size) in sorted(caches.items()):
                of = f"context {ctx}" + (f", cache {cache}" if len(caches) > 1 else "")
                figures[f"cells used of {of}"] = (used, "count")
                figures[f"cells of {of}"] = (size, "count")
            cells = " and ".join(f"{used:,} of {size:,} cells" for _, used, size in caches.values())
            notes.append(f"Context {ctx} used at most {cells} ({shown(n_bytes, 'bytes')}).")
    in_use = MemoryInUse()
    for memory in session.memory:
        in_use.take(memory, session.contexts[memory.ctx].model)
    for name, device in in_use.devices.items():
        sizes = {"held on": in_use.on_devices[name], "free on": device.free, "of": device.total}
        figures |= {f"bytes {what} {name}": (n, "bytes") for what, n in sizes.items()}
        held, free, total = (shown(n, "bytes") for n in sizes.values())
        notes.append(f"{name}: contexts hold {held} of {total}; its driver reported {free} free.")
    if rss := max((memory.rss for memory in session.memory), default=0):
        figures["resident"] = (rss, "bytes")
        notes.append(f"The whole process had up to {shown(rss, 'bytes')} resident.")
    columns = header(
        ("id", "Context"), "buffer", ("bytes", "weights", "KV cache, state", "compute")
    )
    return Report("Memory", columns, rows, notes, figures=figures)


def _fullest(session: Session, ctx: int) -> dict[int, tuple[int, int, int]]:
    """Bytes and cells in use, and all cells, of each cache of a context, when use was greatest."""
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
        notes.append("Other work had the CPU meanwhile; the clock counts that as the recorder's.")
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


# --- the tree ---
