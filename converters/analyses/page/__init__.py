"""One page about a session: what people ask first is at the top.

Invariant: figures that other commands show too come from the same functions. The size of the page
does not grow with the length of the session: charts are binned, lists have their first rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.page.over_time import (
    cells_over_time,
    memory_over_time,
    speed_over_time,
    tokens_with_times,
)
from llamacpp_instr.converters.analyses.requests import compute_requests
from llamacpp_instr.converters.analyses.settings import facts
from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import NO_LAYER, build_tree
from llamacpp_instr.log.session import Session
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.icicle import draw_icicle
from llamacpp_instr.report.page import Figure, Section
from llamacpp_instr.report.plain_charts import Heat, Tile, heat_map, tiles
from llamacpp_instr.report.report import Cell, Column, Report, Unit, shown
from llamacpp_instr.report.tree import Tree

MOST_ROWS = 18
"""ops of the heat map, and weights of the table"""
MOST_LAYERS = 200
"""layers of the heat map"""
LATER = ("Where the time went", "Layers", "Top ops")
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
    """Title and sections of the page. What a reader asks first, as the summary has it in its order,
    is at the top. Several sessions follow each other, below a table of their first figures. `probe`
    is that of `compute_summary`."""
    pages = [_page_of(session, probe) for session in sessions]
    titles = [_title(session) for session in sessions]
    if len(pages) == 1:
        ((figures, sections),) = pages
        return titles[0], [*_tiles(figures), *sections]
    found: list[Section] = [_side_by_side(titles, [figures for figures, _ in pages])]
    for title, (figures, sections) in zip(titles, pages, strict=True):
        found += [Figure(title, ""), *_tiles(figures), *sections]
    return f"{len(pages)} sessions", found


def _page_of(session: Session, probe: Probe | None) -> tuple[list[_First], list[Section]]:
    """The first figures of a session, and the sections below them."""
    summary = {report.title: report for report in compute_summary(session, probe)}
    later = {title: summary.pop(title, None) for title in (*LATER, "Memory", "Recorder")}
    sections: list[Section | None] = [
        *summary.values(),
        *speed_over_time(session),
        *_trees(session),
        *_requests(session),
        *(later[title] for title in LATER),
        later["Memory"],
        *memory_over_time(session),
        *cells_over_time(session),
        *tokens_with_times(session),
        *_weights(session),
        _identity(session),
        later["Recorder"],
    ]
    figures = list(_first_figures(summary, later["Memory"]))
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


def _tiles(figures: Sequence[_First]) -> Iterator[Section]:
    if figures:
        yield tiles("", [Tile(shown(value, unit), what) for what, value, unit in figures])


def _side_by_side(titles: Sequence[str], figures: Sequence[Sequence[_First]]) -> Report:
    """A row for each session and a column for each figure that one of them has."""
    columns = dict.fromkeys(Column(what, unit) for of in figures for what, _, unit in of)
    rows: list[list[Cell]] = []
    for title, of in zip(titles, figures, strict=True):
        values = {what: value for what, value, _ in of}
        rows.append([title, *(values.get(column.name) for column in columns)])
    return Report("Sessions", [Column("session"), *columns], rows)


def _requests(session: Session) -> list[Report]:
    """The latencies and the slowest requests, if there are several."""
    reports = compute_requests(session)
    return reports if int(reports[0].figures.get("requests", (0,))[0] or 0) > 1 else []


def _trees(session: Session) -> Iterator[Section]:
    """Layer by op as a heat map, and the tree of the session."""
    time = build_tree(session)
    trees = [time]
    if session.ops:
        trees += [build_tree(session, "bytes"), build_tree(session, "flops")]
        yield from _heat(time)
    if time.root.amount > 0:
        notes = ["A box is as wide as its part. Click or press Enter to zoom, Escape to go back;"
                 " arrows move."]  # fmt: skip
        yield draw_icicle("Session, phase, layer, block, op", trees, notes)


def _heat(tree: Tree) -> Iterator[Section]:
    amounts: dict[str, dict[str, int]] = {}
    for names, amount in tree.stacks():
        if len(names) == 5 and amount > 0:
            _, _, layer, _, op = names
            of_op = amounts.setdefault(op, {})
            of_op[layer] = of_op.get(layer, 0) + amount
    if not amounts:
        return
    layers = {layer for of_op in amounts.values() for layer in of_op} - {NO_LAYER}
    in_order = sorted(layers, key=lambda name: int(name.rpartition(" ")[2]))
    ordered = [*in_order[:MOST_LAYERS], NO_LAYER]
    ops = sorted(amounts, key=lambda op: -sum(amounts[op].values()))
    notes = ["Time of thread 0 in all phases; the last column is outside of layers."]
    if len(ops) > MOST_ROWS:
        whole = sum(sum(of_op.values()) for of_op in amounts.values())
        rest = sum(sum(amounts[op].values()) for op in ops[MOST_ROWS:]) / whole
        others = counted(len(ops) - MOST_ROWS, "other op")
        notes.append(f"Not shown: {others}, {100 * rest:.1f} % of the time.")
    if len(layers) > MOST_LAYERS:
        notes.append(f"Not shown: {counted(len(layers) - MOST_LAYERS, 'further layer')}.")
    ops = ops[:MOST_ROWS]
    table = np.array([[amounts[op].get(of, 0) for of in ordered] for op in ops], np.float64)
    names = ["none" if of == NO_LAYER else of.removeprefix("layer ") for of in ordered]
    yield heat_map("Time by layer and op", Heat(ops, names, table, "ns"), "layer", notes)


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
    columns = [Column("fact"), Column("value")]
    return Report("Identity, machine and settings", columns, rows, headed=False)
