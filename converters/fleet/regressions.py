"""Which builds are slower than the one before, with the noise rules of `instr diff`.

Each log is a process, and its median is one sample: two builds differ if the 95 % interval of the
ratio excludes 1. The intervals of all rows hold at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from converters.analyses.noise import (
    BLOCKS,
    MIN_BLOCKS,
    PROCESS,
    Median,
    compare,
    median_of_group,
)
from converters.fleet.database import ask
from converters.report.report import Cell, Column, Report

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

NAME = "regressions"
QUESTION = "What became slower or faster from build to build, beyond noise."
_OF_LOGS = """
    select host, model, threads, phase, '' as op, build, log, median(ns) as ns
    from steps where counted group by all
    union all
    select host, model, threads, phase, op, build, log, sum(ns) / sum(kernels) as ns
    from ops group by all"""


def regressions(connection: DuckDBPyConnection) -> Report:
    """One row for each host, model, number of threads, phase and op with two builds or more: the
    latest build against the one before, by the time of their first logs. An empty op is the whole
    step. Those that differ come first."""
    _, order = ask(connection, "select build, min(time) from logs group by build order by 2")
    age = {build: i for i, (build, _) in enumerate(order)}
    _, rows = ask(connection, _OF_LOGS)
    found: dict[tuple[Cell, ...], dict[str, list[float]]] = {}
    for *where, build, _, ns in rows:
        found.setdefault(tuple(where), {}).setdefault(build, []).append(float(ns))
    compared = {where: builds for where, builds in found.items() if len(builds) > 1}
    table: list[list[Cell]] = []
    for where, builds in compared.items():
        before, after = sorted(builds, key=lambda build: age[build])[-2:]
        # the noise within a log is not known
        a, b = (
            median_of_group([Median(ns, PROCESS, BLOCKS, BLOCKS - 2) for ns in builds[build]])
            for build in (before, after)
        )
        ratio = compare(a, b, len(compared))
        verdict = "" if not ratio.differs else "slower" if b.value > a.value else "faster"
        table.append(
            [
                *where, before, after, len(builds[before]), len(builds[after]), a.value, b.value,
                ratio.value, ratio.low, ratio.high, verdict,
            ]
        )  # fmt: skip
    table.sort(key=lambda row: (row[-1] == "", -abs(math.log(float(row[-4] or 1)))))
    columns = [
        Column("host"), Column("model"), Column("threads", "count"), Column("phase"), Column("op"),
        Column("before"), Column("after"), Column("logs before", "count"),
        Column("logs after", "count"), Column("ns before", "ns"), Column("ns after", "ns"),
        Column("ratio", "number"), Column("low", "number"), Column("high", "number"),
        Column("differs"),
    ]  # fmt: skip
    report = Report(QUESTION, columns, table, labels=7, key=NAME)
    report.notes.append(
        "Each log counts as one process: the median of its steps, or the mean of its kernels. An"
        f" empty op is the whole step. Fewer than {MIN_BLOCKS} logs of a build do not show how much"
        f" processes differ: at least {100 * PROCESS:g} % is assumed, and no interval is given if"
        " they differ by much more."
    )
    return report
