"""The time of a session by the clock: what passed inside llama.cpp, on devices, and outside of it.

Invariant: time in which several contexts work counts once, so steps, sampling and the rest add up
to the time by the clock. All times are in ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.graph.kernels import untimed_backends
from llamacpp_instr.log.requests import Request
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.report.report import Cell, Column, Figures, Report, shown

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Clock:
    """From the start of the first step that counts to the end of the last, or of its sampling."""

    total: int
    steps: int
    """with at least one step"""
    sampling: int
    """with a sampler and no step"""
    outside: int
    """with neither: the application, and waiting for requests"""
    n_tokens: int
    """sampled, or those of decodes if the application samples by itself"""
    gaps: Int64
    """between the end of a step and the start of the next, where no other step runs"""

    @property
    def rate(self) -> float | None:
        """Tokens per second; None without any."""
        return self.n_tokens / self.total * 1e9 if self.n_tokens and self.total else None


def compute_clock(session: Session, steps: Table) -> Clock:
    """The time by the clock of `steps`, which are those that count."""
    tokens = session.tokens.rows(np.isin(session.tokens["step"], steps["step"]))
    step_begin, step_end = _merged(steps["begin"], steps["end"])
    in_steps = int((step_end - step_begin).sum())
    begin, end = _merged(
        np.concatenate([step_begin, tokens["t"]]),
        np.concatenate([step_end, tokens["t"] + tokens["dur"]]),
    )
    busy = int((end - begin).sum())
    total = int(end[-1] - begin[0]) if len(begin) else 0
    decodes = int(steps["n_tokens"][steps["phase"] == "decode"].sum())
    return Clock(
        total=total,
        steps=in_steps,
        sampling=busy - in_steps,
        outside=total - busy,
        n_tokens=len(tokens) or decodes,
        gaps=step_begin[1:] - step_end[:-1],
    )


def _merged(begin: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The union of intervals as disjoint ones, in order."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end) if len(end) else end
    first = np.ones(len(begin), np.bool_)
    first[1:] = begin[1:] > reach[:-1]
    last = np.roll(first, -1)
    return begin[first], reach[last]


def clock_report(clock: Clock, requests: Sequence[Request]) -> Report:
    """Where the time by the clock went; the notes have gaps and, with requests, latencies."""
    rows: list[list[Cell]] = [
        [what, ns, ns / clock.total]
        for what, ns in (
            ("steps", clock.steps),
            ("sampling", clock.sampling),
            ("outside of llama.cpp", clock.outside),
        )
        if clock.total
    ]
    figures: Figures = {
        "time": (clock.total, "ns"),
        "tokens": (clock.n_tokens, "count"),
        "tokens/s": (clock.rate, "per_second"),
    }
    notes = []
    if len(clock.gaps) > 1:
        points = [float(p) for p in np.quantile(clock.gaps, (0.5, 0.9, 0.99))]
        names = ("gap, median", "gap, p90", "gap, p99")
        figures |= {name: (p, "ns") for name, p in zip(names, points, strict=True)}
        figures["gap, longest"] = (int(clock.gaps.max()), "ns")
        median, p90, p99 = (shown(p, "ns") for p in points)
        notes.append(
            f"From one step to the next passed {median} (median), {p90} (p90), {p99} (p99), at most"
            f" {shown(int(clock.gaps.max()), 'ns')}: the sampler, the application, and waiting for"
            " requests."
        )
    first = [r.to_first_token for r in requests if r.to_first_token is not None]
    between = np.concatenate([np.zeros(0, np.int64), *(r.between_tokens for r in requests)])
    if first:
        figures["to the first token, median"] = (float(np.median(first)), "ns")
    if len(between):
        figures["between tokens, median"] = (float(np.median(between)), "ns")
    columns = [Column("By the clock"), Column("time", "ns"), Column("share", "share")]
    return Report("Time by the clock", columns, rows, notes, figures=figures)


def clock_sentences(report: Report, n_requests: int) -> list[list[Cell]]:
    """Wall-clock speed and latencies, from `clock_report`, as rows of an overview."""
    figures = report.figures
    rows: list[list[Cell]] = []
    total, n_tokens, rate = (figures[name][0] for name in ("time", "tokens", "tokens/s"))
    if rate is not None:
        n = shown(n_tokens, "count")
        text = f"{shown(rate, 'per_second')} tokens/s by the clock ({n} in {shown(total, 'ns')})"
        rows.append(["speed", text])
    if "to the first token, median" in figures:
        text = f"first token after {shown(figures['to the first token, median'][0], 'ns')}"
        if "between tokens, median" in figures:
            text += f", then {shown(figures['between tokens, median'][0], 'ns')} each"
        of = f"medians of {n_requests:,} requests" if n_requests > 1 else "one request"
        rows.append(["waiting", f"{text} ({of})"])
    return rows


def untimed_note(session: Session) -> str:
    """A sentence for tables of kernels; empty if all kernels are timed."""
    found = {name for graph in session.graphs.values() for name in untimed_backends(graph)}
    if not found:
        return ""
    return f"Kernels on {', '.join(sorted(found))} are not timed, so no row has them."
