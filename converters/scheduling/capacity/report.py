"""What `instr capacity` prints: the recording beside its simulation, the figures by load, the
bottleneck, what would help, and the charts.

Invariant: cells hold unrounded numbers; the shares of the server's time add up to all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.scheduling.capacity.capacity import (
    Capacity,
    Point,
    Recorded,
    Wish,
    changes,
    knee,
    measure,
)
from llamacpp_instr.converters.scheduling.capacity.server import simulate
from llamacpp_instr.converters.scheduling.capacity.workload import as_recorded
from llamacpp_instr.report.charts import Bar, Chart, curve_chart, lane_chart
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of, known, shown

P = ("p50", "p95", "p99")


def replay(of: Recorded) -> Report:
    """The recorded requests, and what the simulation makes of them."""
    load, settings = as_recorded(of.workload), of.settings
    outcome = simulate(load, settings, of.times.without_noise())
    point = measure(load.clients, settings, outcome)
    first, total = (
        np.array([getattr(request, name) for request in of.requests], np.float64)
        for name in ("to_first_token", "total")
    )
    each = [(r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1)
            for r in of.requests if len(r.token_times) > 1]  # fmt: skip
    took = max(r.end for r in of.requests) - min(r.first for r in of.requests)
    tokens = sum(len(r.token_times) for r in of.requests)
    found = outcome.end - outcome.arrival
    rows: list[list[Cell]] = []

    def row(what: str, recorded: float, simulated: float) -> None:
        rows.append([what, recorded, simulated, simulated / recorded - 1 if recorded else None])

    for p in (50, 95):
        row(f"first token, p{p}", _at(first, p), _at(outcome.first - outcome.arrival, p))
    row("between tokens, p50", _at(each, 50), point.each[0])
    row("request, p50", _at(total, 50), _at(found, 50))
    rates = tokens / max(took, 1) * 1e9, point.tokens_per_s
    speeds = [shown(of, "per_second") for of in rates]
    notes = [f"{speeds[0]} tokens/s were recorded, {speeds[1]} are simulated."]
    figures: Figures = {
        "recorded tokens/s": (rates[0], "per_second"),
        "simulated tokens/s": (rates[1], "per_second"),
    }
    for what, ends, recorded in (
        ("first token", outcome.first, first),
        ("end", outcome.end, total),
    ):
        error = np.abs(ends - outcome.arrival - recorded) / np.maximum(total, 1)
        middle, most = np.percentile(error, [50, 99]).tolist()
        figures[f"error of the {what}, median"] = middle, "fraction"
        figures[f"error of the {what}, p99"] = most, "fraction"
        notes.append(
            f"A request's {what} differs by {100 * middle:.1f} % of its time (median) and"
            f" {100 * most:.1f} % (p99)."
        )
    notes += of.notes
    columns = [Column("Time", key="what"), *columns_of("ns", "recorded", "simulated"),
               Column("difference", "fraction")]  # fmt: skip
    return Report("The recording, simulated", columns, rows, notes, figures=figures, key="replay")


def _at(values: object, p: int) -> float:
    return float(np.percentile(np.array(values, np.float64), p))


def reports(
    capacity: Capacity, points: Sequence[Point], wishes: Sequence[Wish] = (),
    reached: Point | None = None,
) -> list[Report]:  # fmt: skip
    """What is printed for these points, which are in the order of their loads for each setting."""
    best = knee([of for of in points if of.settings == points[0].settings])
    found = [replay(capacity.recorded)]
    if reached is not None:
        found.insert(0, _goal(capacity, wishes, reached))
        best = reached
    found += [_loads(capacity, points), _waits(capacity, points)]
    return [*found, _where(capacity, best), _changes(capacity, best)]


def _goal(capacity: Capacity, wishes: Sequence[Wish], reached: Point) -> Report:
    settings = reached.settings
    rows: list[list[Cell]] = [[wish.text, wish.shown(wish.of(reached))] for wish in wishes]
    notes = [
        f"Most: {capacity.load.text(reached.load)} with {counted(settings.slots, 'slot')} of"
        f" {settings.slot_ctx:,} tokens; {shown(reached.tokens_per_s, 'per_second')} tokens/s."
    ]
    figures: Figures = {
        capacity.load.by: (reached.load, "number"),
        "slots": (settings.slots, "count"),
        "tokens/s": (reached.tokens_per_s, "per_second"),
    }
    columns = [Column("Goal", key="goal"), Column("simulated")]
    return Report("The goal", columns, rows, notes, figures=figures, key="goal")


def _loads(capacity: Capacity, points: Sequence[Point]) -> Report:
    rows: list[list[Cell]] = [
        [
            of.load, of.settings.slots, of.settings.slot_ctx, of.tokens_per_s, of.requests_per_s,
            of.slots_busy, of.server_busy, capacity.cache_bytes(of.settings), of.unmeasured,
        ]
        for of in points
    ]  # fmt: skip
    notes = []
    for settings in dict.fromkeys(of.settings for of in points):
        best = knee([of for of in points if of.settings == settings])
        slots, speed = counted(settings.slots, "slot"), shown(best.tokens_per_s, "per_second")
        notes.append(
            f"{slots}: {speed} tokens/s with {capacity.load.text(best.load)}; with more, requests"
            " wait longer."
            if best.waits
            else f"{slots}: {capacity.load.text(best.load)} are served as they come, {speed}"
            " tokens/s; with more, the queue grows."
        )
    if any(of.unmeasured > 0.01 for of in points):
        notes.append(
            "Not recorded: the share of the time in steps unlike any in the log; their times are"
            + (
                " predicted."
                if capacity.predicts
                else f" on a line through others: {capacity.why}."
            )
        )
    columns = [
        Column(capacity.load.by, "number", key="load"),
        *columns_of("count", "slots", "slot's context"),
        *columns_of("per_second", "tokens/s", "requests/s"),
        *columns_of("fraction", "slots busy", "server busy"), Column("cache", "bytes"),
        Column("not recorded", "fraction"),
    ]  # fmt: skip
    return Report("Capacity", columns, rows, notes, labels=2, key="capacity")


def _waits(capacity: Capacity, points: Sequence[Point]) -> Report:
    rows: list[list[Cell]] = [
        [of.load, of.settings.slots, *_known(of.queue), *_known(of.first), *_known(of.each)]
        for of in points
    ]
    names = [f"{what} {p}" for what in ("queue", "first token", "per token") for p in P]
    columns = [Column(capacity.load.by, "number", key="load"), Column("slots", "count"),
               *columns_of("ns", *names)]  # fmt: skip
    return Report("How long requests wait", columns, rows, labels=2, key="waits")


def _known(values: Sequence[float]) -> list[Cell]:
    return [None if value != value else round(value) for value in values]


SERVER = ("prompts", "answers: each ubatch", "answers: each token", "cells of the cache",
          "between steps", "nothing to do")  # fmt: skip
LIMITS = {
    "prompts": "computing prompts",
    "answers: each ubatch": "memory bandwidth: each ubatch reads the weights",
    "answers: each token": "computing the tokens of answers",
    "cells of the cache": "reading the cache",
    "between steps": "the server's own work",
    "nothing to do": "too few requests at once",
}


def shares(capacity: Capacity, of: Point) -> dict[str, float]:
    """The time of the server by what takes it, ns."""
    outcome, times = of.outcome, capacity.times(of.settings)
    fixed = min(max(2 * times.ubatch(1, 1) - times.ubatch(2, 2), 0.0) * outcome.ubatches,
                outcome.decode_ns)  # fmt: skip
    cells = outcome.attention_ns
    answers = max(outcome.decode_ns - fixed - outcome.cells_ns, 0.0)
    prompts = outcome.prompt_ns - (cells - outcome.cells_ns)
    busy = outcome.prompt_ns + outcome.decode_ns + outcome.between_ns
    rest = max(outcome.took - busy, 0.0)
    return dict(
        zip(SERVER, (prompts, fixed, answers, cells, outcome.between_ns, rest), strict=True)
    )


def _where(capacity: Capacity, of: Point) -> Report:
    found = shares(capacity, of)
    whole = sum(found.values())
    rows: list[list[Cell]] = [[what, round(ns), ns / whole] for what, ns in found.items()]
    limit = LIMITS[max(found, key=lambda what: found[what])]
    notes = [f"What limits {capacity.load.text(of.load)} most: {limit}."]
    if of.queue[0] > of.first[0] / 2 and of.slots_busy > 0.9:
        notes.append("Requests wait for a slot most of the time before their first token.")
    columns = [
        Column("The server's time", key="what"),
        Column("time", "ns"),
        Column("share", "share"),
    ]
    title = f"What limits {capacity.load.text(of.load)} on {counted(of.settings.slots, 'slot')}"
    return Report(title, columns, rows, notes, key="limits")


def _changes(capacity: Capacity, of: Point) -> Report:
    rows: list[list[Cell]] = [
        [
            what,
            _more(other.requests_per_s, of.requests_per_s),
            _more(other.first[1], of.first[1]),
            _more(other.each[0], of.each[0]),
            other.unmeasured,
        ]
        for what, other in changes(capacity, of)
    ]
    columns = [Column("With", key="change"), *columns_of(
        "fraction", "requests/s", "first token p95", "per token p50", "not recorded")]  # fmt: skip
    title = f"Effects of changes with {capacity.load.text(of.load)}, most requests first"
    return Report(title, columns, rows, key="changes")


def _more(new: float, old: float) -> float | None:
    """The relative growth; None without figures."""
    return known(new / old - 1) if old else None


# --- charts ---


def charts(
    capacity: Capacity, points: Sequence[Point], title: str, wishes: Sequence[Wish] = ()
) -> list[Chart]:
    """The wait for the first token and the tokens per second over the load; and what clients wait
    for, at a point with more clients than slots if there is one."""
    by = {(of.load, of.settings): of for of in points}
    amounts, settings = sorted({of.load for of in points}), list(dict.fromkeys(p[1] for p in by))
    names = {of: counted(of.slots, "slot") for of in settings}
    waits = {
        f"{name}, {P[i]}": [by[x, of].first[i] / 1e9 for x in amounts]
        for of, name in names.items()
        for i in ((1, 0) if len(settings) == 1 else (1,))
    }
    waits |= {w.text: [w.most / 1e9] * len(amounts) for w in wishes if w.figure == "first"}
    speed = {name: [by[x, of].tokens_per_s for x in amounts] for of, name in names.items()}
    own = [of for of in points if of.settings == settings[0]]
    crowded = next((of for of in own if of.load > of.settings.slots), knee(own))
    what = f"{capacity.load.text(crowded.load)} on {names[crowded.settings]}"
    return [
        curve_chart(f"{title}: first token", capacity.load.by, "first token, s", amounts, waits),
        curve_chart(f"{title}: tokens/s", capacity.load.by, "tokens/s", amounts, speed),
        waiting_chart(crowded, f"What {what} wait for"),
    ]


LANES, SHOWN = 16, 3
"""concurrent requests in a chart, and how many follow one another"""


def waiting_chart(of: Point, title: str) -> Chart:
    """Requests from the middle of a simulation, one below the other if they overlap: their time in
    the queue, their prompt and their answer."""
    outcome = of.outcome
    order = np.argsort(outcome.arrival, kind="stable")
    some = order[len(order) // 2 :][: SHOWN * min(LANES, max(round(of.load), of.settings.slots))]
    start = int(outcome.arrival[some].min()) if len(some) else 0
    free: list[int] = []
    bars: list[Bar] = []
    for i in some.tolist():
        names = ("arrival", "begin", "first", "end")
        times = [int(getattr(outcome, name)[i]) - start for name in names]
        lane = next((n for n, t in enumerate(free) if t <= times[0]), len(free))
        if lane == LANES:
            continue
        free[lane : lane + 1] = [times[-1]]
        for what, begin, end in zip(("queue", "prompt", "answer"), times, times[1:], strict=False):
            bars.append(Bar(lane, begin, end, what, ""))
    return lane_chart(title, [f"{n + 1}" for n in range(len(free))], bars, "")
