"""The threads of a session: how long each worked, and how evenly the work was spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from converters.report.report import Cell, Column, Report, columns_of, shown
from llamacpp_instr.log.session import Timed


def thread_report(ops: Sequence[Timed]) -> Report:
    """Busy and waiting time of every thread, and how evenly the work of a compute is spread.

    Busy is the time in kernels without their barriers. Imbalance is the sum over computes of the
    busiest thread's time, divided by that of the mean thread: 1 if all threads work equally.
    """
    recorded = [of for of in ops if of.wait is not None]
    per_thread: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    busy_of: dict[int, list[int]] = defaultdict(list)
    for of in recorded:
        assert of.wait is not None
        dur, wait = int(of.dur.sum()), int(of.wait.sum())
        between = 0 if of.gap is None else int(of.gap.sum())
        per_thread[of.thread].append((len(of.dur), dur - wait, wait + between))
        busy_of[of.compute].append(dur - wait)
    rows: list[list[Cell]] = []
    for thread, of_thread in sorted(per_thread.items()):
        n, busy, waiting = (sum(column) for column in zip(*of_thread, strict=True))
        share = waiting / (busy + waiting) if busy + waiting else None
        rows.append([thread, n, busy, waiting, share])
    columns = [
        Column("thread", "id"),
        Column("kernels", "count"),
        *columns_of("ns", "busy", "waiting"),
        Column("of its time", "fraction"),
    ]
    report = Report("Threads", columns, rows)
    mean = sum(sum(busy) / len(busy) for busy in busy_of.values())
    longest = sum(max(busy) for busy in busy_of.values())
    if rows:
        report.notes.append("Waiting is time in barriers, inside kernels and between them.")
    if mean and len(rows) > 1:
        report.notes.append(
            f"Imbalance {longest / mean:.3f}: over all computes, the busiest thread worked"
            f" {shown(longest - mean, 'ns')} longer than the average thread."
        )
        report.figures["imbalance"] = (longest / mean, "ratio")
        report.figures["busiest thread beyond the mean one"] = (longest - mean, "ns")
    return report
