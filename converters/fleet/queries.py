"""The usual questions about a data set: a name, what it answers, and its SQL.

`regressions` is no SQL alone: it has the noise rules of `instr diff`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from llamacpp_instr.converters.analyses.noise import (
    BLOCKS,
    MIN_BLOCKS,
    PROCESS,
    Median,
    compare,
    median_of_group,
)
from llamacpp_instr.converters.fleet.database import ask
from llamacpp_instr.report.report import Cell, Column, Report

GROUP = "host, build, model, threads"
OF_DECODES = "where counted and phase = 'decode'"


class Query(NamedTuple):
    """A question with a name."""

    question: str
    sql: str


QUERIES: dict[str, Query] = {
    "logs": Query(
        "How many logs there are, by host, build and model.",
        """select host, build, model, count(*) as logs, sum(steps)::bigint as steps,
            sum(kernels)::bigint as kernels, min(time) as first, max(time) as last
        from (select *, unnest(models) as model from logs) group by all order by host, build""",
    ),
    "speed": Query(
        "How fast each host decodes and prefills each model.",
        f"""select {GROUP}, phase, count(*) as steps, median(ns) as p50_ns,
            quantile_cont(ns, 0.9) as p90_ns, quantile_cont(ns, 0.99) as p99_ns,
            sum(tokens) / sum(ns) * 1e9 as tokens_per_s
        from steps where counted group by all order by model, phase, tokens_per_s desc""",
    ),
    "percentiles": Query(
        "Percentiles of the time of a kernel, by op; within 1 %.",
        f"""select {GROUP}, phase, op, kernels, mean_ns, p50_ns, p90_ns, p99_ns
        from op_percentiles order by host, build, model, phase, ns desc""",
    ),
    "ops": Query(
        "Where the time of decodes goes, by op.",
        """select model, op, sum(kernels)::bigint as kernels, sum(ns)::bigint as ns,
            sum(ns) / sum(sum(ns)) over (partition by model) as share
        from ops where phase = 'decode' group by model, op order by model, ns desc""",
    ),
    "blocks": Query(
        "Where the time of decodes goes, by block.",
        """select model, block, sum(ns)::bigint as ns,
            sum(ns) / sum(sum(ns)) over (partition by model) as share
        from ops where phase = 'decode' group by model, block order by model, ns desc""",
    ),
    "days": Query(
        "The median decode of each day.",
        f"""select date, {GROUP}, count(*) as steps, median(ns) as p50_ns
        from steps {OF_DECODES} group by all order by model, host, build, date""",
    ),
    "hosts": Query(
        "Which hosts there are, and how their decodes compare with the median of all.",
        f"""with of_host as (
            select model, threads, host, count(*) as steps, median(ns) as p50_ns
            from steps {OF_DECODES} group by all
        ) select *, p50_ns / median(p50_ns) over (partition by model, threads) as to_median
        from of_host order by to_median desc""",
    ),
    "requests": Query(
        "How long requests take: to the first token, between tokens, in all.",
        f"""select {GROUP}, count(*) as requests, median(first_token_ns) as first_token_p50_ns,
            quantile_cont(first_token_ns, 0.99) as first_token_p99_ns,
            median(between_tokens_ns) as between_tokens_p50_ns, median(ns) as p50_ns,
            quantile_cont(ns, 0.99) as p99_ns
        from requests group by all order by model, host""",
    ),
    "queue": Query(
        "How long requests wait before their first step.",
        f"""select {GROUP}, count(*) as requests, median(queued_ns) as queued_p50_ns,
            quantile_cont(queued_ns, 0.99) as queued_p99_ns, sum(queued_ns) / sum(ns) as share
        from requests where queued_ns is not null group by all order by share desc""",
    ),
    "slowest": Query(
        "The twenty slowest requests, and their logs.",
        """select log, host, build, model, name, time, ns, queued_ns, first_token_ns, prompt, output
        from requests order by ns desc limit 20""",
    ),
    "caches": Query(
        "How much of the prompts came from the cache.",
        f"""select {GROUP}, count(*) as requests, sum(reused)::bigint as reused,
            sum(prompt)::bigint as computed, sum(reused) / sum(reused + prompt) as share
        from requests group by all order by share desc""",
    ),
    "unclosed": Query(
        "Logs that were not closed, lost events, or have failed steps.",
        """select log, source, host, build, time, state, left_out, failed
        from logs where state <> 'closed' or left_out > 0 or failed > 0 order by time""",
    ),
}


if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

REGRESSIONS = "regressions"
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
    step. Those that differ come first. Each log is a process, and its median is one sample: two
    builds differ if the 95 % interval of the ratio excludes 1. The intervals of all rows hold at
    once."""
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
    report = Report(QUESTION, columns, table, labels=7, key=REGRESSIONS)
    report.notes.append(
        "Each log counts as one process: the median of its steps, or the mean of its kernels. An"
        f" empty op is the whole step. Fewer than {MIN_BLOCKS} logs of a build do not show how much"
        f" processes differ: at least {100 * PROCESS:g} % is assumed, and no interval is given if"
        " they differ by much more."
    )
    return report
