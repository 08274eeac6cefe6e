"""One page about a session: what people ask first is at the top, then what changed over time.

Invariant: figures that other commands show too come from the same functions. The size of the page
does not grow with the length of the session: charts are binned, lists have their first rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.clock import compute_requests
from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.converters.analyses.step_times import facts
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.converters.analyses.tree import NO_LAYER, build_tree, device_trees
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES, counted_steps
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.icicle import draw_icicle
from llamacpp_instr.report.page import Figure, Section
from llamacpp_instr.report.plain_charts import (
    BINS,
    Axis,
    Line,
    binned,
    heat_map,
    lines_over_time,
    tiles,
    timed_text,
)
from llamacpp_instr.report.report import Cell, Column, Report, Unit, shown
from llamacpp_instr.report.tree import Tree

MOST_ROWS = 18
"""ops of the heat map, and weights of the table"""
MOST_LAYERS = 200
"""layers of the heat map"""
MOST_LINES = 8
"""caches in a chart: those with the most cells used"""
FAR = 8.0
"""ratio of the fastest to the slowest step from which the axis is logarithmic"""
MOST_TOKENS = 3000
"""tokens shown; if there are more, half of these from each end"""
MOST_TEXT = 100
"""characters shown of one token"""
LATER = (
    "Where the time went", "Devices", "Where the time of devices went", "Layers", "Top ops",
)  # fmt: skip
"""sections of the summary that come below the tree; those on memory and the recorder come still
later, and all others first"""

_BY_THE_CLOCK: tuple[tuple[str, Unit, str], ...] = (
    ("tokens/s", "per_second", "tokens/s by the clock"),
    ("to the first token, median", "ns", "to the first token"),
    ("between tokens, median", "ns", "between tokens"),
)

_First = tuple[str, Cell, Unit]
"""what a figure is, its value and its unit"""


def compute_page(
    sessions: Sequence[Session], probe: Probe | None = None
) -> tuple[str, list[Section]]:
    """Title and sections of the page. What a reader asks first is at the top, in the order of the
    summary. Several sessions follow each other, below a table of their first figures. `probe` is
    that of `compute_summary`."""
    pages = [_page_of(session, probe) for session in sessions]
    titles = [_title(session) for session in sessions]
    if len(pages) == 1:
        return titles[0], pages[0][1]
    found: list[Section] = [_side_by_side(titles, [figures for figures, _ in pages])]
    for title, (_, sections) in zip(titles, pages, strict=True):
        found += [Figure(title, ""), *sections]
    return f"{len(pages)} sessions", found


def _page_of(session: Session, probe: Probe | None) -> tuple[list[_First], list[Section]]:
    """The first figures of a session, and its sections, which begin with these."""
    summary = {report.title: report for report in compute_summary(session, probe)}
    later = {title: summary.pop(title, None) for title in (*LATER, "Memory", "Recorder")}
    figures = list(_first_figures(summary, later["Memory"]))
    first = [(shown(value, unit), what) for what, value, unit in figures]
    requests = compute_requests(session)
    several = int(requests[0].figures.get("requests", (0,))[0] or 0) > 1
    sections: list[Section | None] = [
        *([tiles("", first)] if first else []),
        *summary.values(),
        *speed_over_time(session),
        *_trees(session),
        *(requests if several else []),
        *(later[title] for title in LATER),
        later["Memory"],
        *memory_over_time(session),
        *cells_over_time(session),
        *tokens_with_times(session),
        *_weights(session),
        _identity(session),
        later["Recorder"],
    ]
    return figures, [section for section in sections if section is not None]


def _title(session: Session) -> str:
    names = [model.name or model.path.rsplit("/", 1)[-1] for model in session.models.values()]
    return ", ".join([*dict.fromkeys(names), session.path.rsplit("/", 1)[-1]])


def _first_figures(summary: dict[str, Report], memory: Report | None) -> Iterator[_First]:
    """Wall-clock speed and latencies, the speed of each phase, and the memory."""
    if (clock := summary.get("Time by the clock")) is not None:
        for name, unit, what in _BY_THE_CLOCK:
            value = clock.figures.get(name, (None,))[0]
            if value is not None:
                yield what, value, unit
    if (speed := summary.get("Speed")) is not None and speed.rows:
        at = {column.name: i for i, column in enumerate(speed.columns)}
        # decode first: users wait for it most of the time
        for row in sorted(speed.rows, key=lambda row: row[0] != "decode"):
            if (rate := row[at["tokens/s median"]]) is not None:
                yield f"tokens/s, {row[0]}, median step", rate, "per_second"
    if memory is not None and "resident" in memory.figures:
        yield "resident, most", memory.figures["resident"][0], "bytes"


def _side_by_side(titles: Sequence[str], figures: Sequence[Sequence[_First]]) -> Report:
    """A row for each session and a column for each figure that one of them has."""
    columns = dict.fromkeys(Column(what, unit) for of in figures for what, _, unit in of)
    values = [{what: value for what, value, _ in of} for of in figures]
    rows: list[list[Cell]] = [
        [title, *(of.get(column.name) for column in columns)]
        for title, of in zip(titles, values, strict=True)
    ]
    return Report("Sessions", header("session", *columns), rows)


def _trees(session: Session) -> Iterator[Section]:
    """Layer by op as a heat map, and the tree of the session."""
    time = build_tree(session)
    trees = [time]
    devices = device_trees(session)
    if session.has_ops:
        trees += [*(replace(of, measure=f"time on {of.root.name}") for of in devices)]
        trees += [build_tree(session, "bytes"), build_tree(session, "flops")]
        for tree in (time, *devices):
            yield from _heat(tree)
    if time.root.amount > 0:
        notes = ["A box is as wide as its share. Click or press Enter to zoom, Escape to go back;"
                 " arrows move."]  # fmt: skip
        yield draw_icicle("Session, phase, layer, block, op", trees, notes)


def _heat(tree: Tree) -> Iterator[Section]:
    amounts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for names, amount in tree.stacks():
        if len(names) == 5 and amount > 0:
            _, _, layer, _, op = names
            amounts[op][layer] += amount
    if not amounts:
        return
    layers = {layer for of_op in amounts.values() for layer in of_op} - {NO_LAYER}
    in_order = sorted(layers, key=lambda name: int(name.rpartition(" ")[2]))
    ordered = [*in_order[:MOST_LAYERS], NO_LAYER]
    total = {op: sum(of_op.values()) for op, of_op in amounts.items()}
    ops = sorted(amounts, key=lambda op: -total[op])
    on = "" if tree.root.name == "session" else f" on {tree.root.name}"
    notes = [f"Time{on or ' of thread 0'} in all phases; the last column is work outside layers."]
    if len(ops) > MOST_ROWS:
        rest = sum(total[op] for op in ops[MOST_ROWS:]) / sum(total.values())
        others = counted(len(ops) - MOST_ROWS, "other op")
        notes.append(f"Not shown: {others}, {100 * rest:.1f} % of the time.")
    if len(layers) > MOST_LAYERS:
        notes.append(f"Not shown: {counted(len(layers) - MOST_LAYERS, 'further layer')}.")
    ops = ops[:MOST_ROWS]
    table = np.array([[amounts[op].get(of, 0) for of in ordered] for op in ops], np.float64)
    names = ["none" if of == NO_LAYER else of.removeprefix("layer ") for of in ordered]
    yield heat_map(f"Time{on} by layer and op", ops, names, table, "ns", "layer", notes)


def _weights(session: Session) -> Iterator[Section]:
    """The weights whose kernels took longest."""
    try:
        report = compute_stats(session, "tensor")[0]
    except UsageError:
        return
    names = {tensor.name for tensor in session.tensors}
    rows = [row for row in report.rows if row[0] in names]
    notes = ["The share is of the time of all kernels."]
    if len(rows) > MOST_ROWS:
        notes.append(f"{MOST_ROWS} of {len(rows):,} rows; stats --by tensor has all.")
    yield replace(report, title="The most expensive weights", rows=rows[:MOST_ROWS], notes=notes)


def _identity(session: Session) -> Report:
    start = session.start
    rows: list[list[Cell]] = [
        ["session", start.id + (f", part {start.part}" if start.part > 1 else "")],
        ["recorded", start.time],
        ["process", f"{start.process.pid}: {' '.join(start.process.argv)}"],
        ["memory of the machine", shown(start.host.memory, "bytes")],
    ]
    rows += [["file", model.path] for model in session.models.values()]
    rows += [[what, value] for what, value in facts(session, ()) if value]
    columns = header("fact", "value")
    return Report("Identity, machine and settings", columns, rows, headed=False)


# --- over time ---


def speed_over_time(session: Session) -> Iterator[Section]:
    """A dot for each step that counts, or for the median of many."""
    steps, _ = counted_steps(session)
    steps = steps.rows((steps["n_tokens"] > 0) & (steps["end"] > steps["begin"]))
    if not len(steps):
        return
    start = session.start.t
    x = (steps["begin"] + steps["end"]) // 2 - start
    rates = steps["n_tokens"] / (steps["end"] - steps["begin"]) * 1e9
    span = _wide(int(steps["begin"].min()) - start, int(steps["end"].max()) - start)
    lines = []
    for phase in PHASES:
        if (of_phase := steps["phase"] == phase).any():
            lines.append(binned(phase, x[of_phase], rates[of_phase], span))
    notes = []
    if sum(len(line.x) for line in lines) < len(steps):
        notes.append(f"Each dot is the median of 1/{BINS} of the time, with its range.")
    far = bool(rates.max() > FAR * rates.min())
    axis = Axis("tokens/s of each step", "per_second", logarithmic=far)
    yield lines_over_time("Speed over time", axis, lines, span, notes, dots=True)


def memory_over_time(session: Session) -> Iterator[Section]:
    """What the contexts hold by kind, stacked, and the process's resident memory. The weights of a
    model count once, whatever the number of its contexts."""
    if not session.memory:
        return
    span = _span(session)
    events = sorted(session.memory, key=lambda event: event.t)
    sizes: dict[tuple[str, int], int] = {}
    total = [0, 0, 0]
    rows: list[tuple[int, ...]] = []
    for event in events:
        model = session.contexts[event.ctx].model
        owners = (("model", model), ("context", event.ctx), ("compute", event.ctx))
        for i, (owner, key) in enumerate(owners):
            now = sum(getattr(use, owner) for use in event.buffers)
            total[i] += now - sizes.get((owner, key), 0)
            sizes[owner, key] = now
        row = (event.t - session.start.t, *total, event.rss)
        if rows and (row[0] - rows[-1][0]) * BINS < span[1] - span[0] and len(events) > BINS:
            rows[-1] = (rows[-1][0], *row[1:])
        else:
            rows.append(row)
    x, weights, cache, compute, resident = np.array(rows, np.float64).T
    kinds = {"weights": weights, "KV cache, state": cache, "compute buffers": compute}
    areas = [Line.of(kind, x, amounts) for kind, amounts in kinds.items()]
    lines = [Line.of("resident memory of the process", x, resident)] if resident.any() else []
    axis = Axis("memory by kind", "bytes")
    yield lines_over_time("Memory over time", axis, lines, span, areas=areas)


def cells_over_time(session: Session) -> Iterator[Section]:
    """The cells in use of each cache."""
    kv = session.kv
    if not len(kv):
        return
    span = _span(session)
    order = np.lexsort((kv["t"], kv["cache"], kv["ctx"]))
    changes = (np.diff(kv["ctx"][order]) != 0) | (np.diff(kv["cache"][order]) != 0)
    caches = [kv.rows(rows) for rows in np.split(order, np.flatnonzero(changes) + 1)]
    caches.sort(key=lambda rows: -int(rows["used"].max()))
    has_several = set(kv["ctx"][kv["cache"] > 0].tolist())
    lines = []
    for rows in caches[:MOST_LINES]:
        ctx, cache = int(rows["ctx"][0]), int(rows["cache"][0])
        name = f"context {ctx}" + (f", cache {cache}" if ctx in has_several else "")
        name += f", of {int(rows['size'].max()):,} cells"
        used = rows["used"].astype(np.float64)
        lines.append(binned(name, rows["t"] - session.start.t, used, span))
    left_out = len(caches) - MOST_LINES
    notes = [f"{left_out} caches with fewer used cells are left out."] if left_out > 0 else []
    yield lines_over_time("KV cache over time", Axis("cells in use", "count"), lines, span, notes)


def _span(session: Session) -> tuple[int, int]:
    """From the first context or step to the last step, since the session began."""
    begins = [event.t for event in session.memory] + session.steps["begin"].tolist()[:1]
    ends = [*begins, int(session.steps["end"].max(initial=0)), int(session.kv["t"].max(initial=0))]
    start = session.start.t
    return _wide(min(begins, default=start) - start, max(ends, default=start) - start)


def _wide(low: int, high: int) -> tuple[int, int]:
    return low, max(high, low + 1)


def tokens_with_times(session: Session) -> Iterator[Section]:
    """A passage for each request, with the tokens of steps that count. A token's time starts at the
    previous token, that of the first when the request arrived, or began."""
    steps, requests = find_requests(session)
    tokens = session.tokens.rows(np.isin(session.tokens["step"], steps["step"]))
    if not len(tokens):
        return
    begins = {(of.ctx, of.seq, of.token_times[0]): of for of in requests if of.token_times}
    tokens = tokens.rows(np.lexsort((tokens["t"], tokens["seq"], tokens["ctx"])))
    notes = ["Milliseconds are below each token; the background marks slow ones."]
    n = len(tokens)
    if n > MOST_TOKENS:
        half = MOST_TOKENS // 2
        tokens = tokens.rows(np.r_[0:half, n - half : n])
        notes.append(f"The first and the last {half:,} of {n:,} tokens.")
    passages: list[tuple[str, list[tuple[str, int]]]] = []
    pieces: list[tuple[str, int]] = []
    before: tuple[int, int, int] | None = None
    for ctx, seq, t, dur, text in tokens.tuples("ctx", "seq", "t", "dur", "text"):
        end = t + dur
        request = begins.get((ctx, max(seq, 0), end))
        if request is not None or before is None or before[:2] != (ctx, seq):
            began = t if request is None else request.first
            where = f"Context {ctx}" + (f", sequence {seq}" if seq > 0 else "")
            name = request.name if request is not None else ""
            heading = f"{name or where}, from {shown(began - session.start.t, 'ns')}"
            pieces = []
            passages.append((heading, pieces))
            before = ctx, seq, began
        pieces.append((text[:MOST_TEXT], max(end - before[2], 0)))
        before = ctx, seq, end
    yield timed_text("Tokens with their times", passages, notes)
