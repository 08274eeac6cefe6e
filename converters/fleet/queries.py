"""Questions about a data set: its tables in DuckDB, the usual queries by name, and their answers.

The tables are `logs`, `steps`, `ops`, `requests`, and views of them. `regressions` is not SQL
alone: it applies the noise rules of `instr diff`.
"""

from __future__ import annotations

import contextlib
import glob
import math
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.converters.analyses.noise import (
    BLOCKS,
    MIN_BLOCKS,
    PROCESS,
    Median,
    compare,
    median_of_group,
)
from llamacpp_instr.converters.fleet.dataset import GROWTH, TABLES, is_dataset, schema_of
from llamacpp_instr.report.report import Cell, Column, Report, Unit

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

OF_LOGS = ("build", "llama_cpp", "level", "perturbed")
"""columns of `logs` that the other tables also have"""

_VIEWS = {
    "hosts": """
        select host, any_value(cpu) as cpu, any_value(cores) as cores, any_value(memory) as memory,
            any_value(os) as os, count(*) as logs, min(time) as first, max(time) as last,
            sum(steps)::bigint as steps, sum(kernels)::bigint as kernels
        from logs group by host""",
    "op_percentiles": """
        with counted as (
            select host, build, model, threads, phase, op, bucket, sum(kernels) as kernels,
                sum(ns) as ns
            from ops group by all
        ), running as (
            select *, sum(kernels) over (of_op order by bucket) as upto,
                sum(kernels) over (partition by host, build, model, threads, phase, op) as total
            from counted
            window of_op as (partition by host, build, model, threads, phase, op)
        )
        select host, build, model, threads, phase, op, any_value(total)::bigint as kernels,
            sum(ns)::bigint as ns, sum(ns) / any_value(total) as mean_ns,
            middle_ns(min(bucket) filter (upto >= 0.5 * total)) as p50_ns,
            middle_ns(min(bucket) filter (upto >= 0.9 * total)) as p90_ns,
            middle_ns(min(bucket) filter (upto >= 0.99 * total)) as p99_ns
        from running group by host, build, model, threads, phase, op""",
}


def open_database(dataset: Path) -> DuckDBPyConnection:
    """A connection whose tables are those of the data set, read from its files when they are
    queried. The macro `middle_ns` gives, for a bucket, a duration in ns from which those of the
    bucket deviate by at most RELATIVE_ERROR. Raises UsageError if `dataset` is not one, or if
    duckdb is missing."""
    need("fleet", "duckdb")
    import duckdb

    if not is_dataset(dataset):
        raise UsageError(f"{dataset} is not a data set; make one with instr collect")
    dataset = dataset.absolute()
    connection = duckdb.connect()
    connection.execute("set TimeZone = 'UTC'")
    connection.execute(
        "create macro middle_ns(bucket) as case when bucket <= 1 then bucket::double"
        f" else {2 / (1 + GROWTH)!r} * pow({GROWTH!r}, bucket - 1) end"
    )
    with _one_line():
        for table in TABLES:
            _create(connection, dataset, table)
        for name, view in _VIEWS.items():
            connection.execute(f"create view {name} as {view}")
    # a pattern is looked for under its own name, the files under theirs
    places = ", ".join(_quoted(f"{of}/") for of in (dataset, glob.escape(str(dataset))))
    connection.execute(f"set allowed_directories = [{places}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
    return connection


def _create(connection: DuckDBPyConnection, dataset: Path, table: str) -> None:
    pattern = f"{glob.escape(str(dataset))}/{table}/*/*/*.parquet"
    if any((dataset / table).glob("*/*/*.parquet")):
        source = (
            f"read_parquet({_quoted(pattern)}, hive_partitioning = true,"
            " hive_types = {'date': date, 'host': varchar})"
        )
    else:
        import pyarrow as pa

        schema = schema_of(table).append(pa.field("date", pa.date32()))
        empty = schema.append(pa.field("host", pa.string())).empty_table()
        source = f"no_{table}"
        connection.register(source, empty)
    columns = f"select * from {source}"
    if table != "logs":  # a log counts once it has its row in `logs`
        columns = (
            f"select of_log.*, {', '.join(f'logs.{name}' for name in OF_LOGS)}"
            f" from {source} as of_log join logs using (log)"
        )
    connection.execute(f"create view {table} as {columns}")


def ask(connection: DuckDBPyConnection, sql: str) -> tuple[list[tuple[str, str]], list[Any]]:
    """Name and type of each column, and the rows. Raises UsageError for SQL that is wrong, or that
    does more than read."""
    from duckdb import StatementType

    with _one_line():
        kinds = [statement.type for statement in connection.extract_statements(sql)]
        if len(kinds) != 1 or kinds[0] not in (
            StatementType.SELECT, StatementType.EXPLAIN, StatementType.MULTI,  # PIVOT
        ):  # fmt: skip
            given = ", ".join(kind.name for kind in kinds)
            raise UsageError(f"give one SELECT; this is {given or 'nothing'}")
        found = connection.execute(sql)
        columns = [(of[0], str(of[1])) for of in found.description or ()]
        return columns, found.fetchall()


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Turns DuckDB's errors into UsageError."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        raise UsageError(" ".join(str(error).split())) from None


def _quoted(text: str) -> str:
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


GROUP = "host, build, model, threads"
OF_DECODES = "where counted and phase = 'decode'"


class Query(NamedTuple):
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
        "How long requests take: to the first token, between tokens, in total.",
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
    latest build against the previous one, by the time of their first logs. An empty op is the whole
    step. Those that differ come first. Each log is a process, and its median is one sample: two
    builds differ if the 95 % interval of the ratio excludes 1. The intervals of all rows hold
    simultaneously."""
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


NUMBERS = ("BIGINT", "INTEGER", "HUGEINT", "UBIGINT", "SMALLINT", "TINYINT", "DOUBLE", "FLOAT")


def answer(connection: DuckDBPyConnection, question: str) -> Report:
    """The rows of a named query or of SQL. A column whose name is `ns` or ends in `_ns` is a time,
    `share` a fraction of 1, and `_per_s` a rate. Raises UsageError for SQL that is wrong."""
    if question == REGRESSIONS:
        return regressions(connection)
    known = QUERIES.get(question)
    columns, rows = ask(connection, known.sql if known else question)
    units = [Column(name, _unit(name, kind), name) for name, kind in columns]
    cells = [[_cell(value) for value in row] for row in rows]
    labels = next((i for i, of in enumerate(units) if of.unit != "text"), len(units))
    title, key = (known.question, question) if known else ("Rows", "rows")
    return Report(title, units, cells, labels=max(1, labels), key=key)


def named_queries() -> Report:
    """Every named query, and what it answers."""
    rows: list[list[Cell]] = [[name, query.question] for name, query in QUERIES.items()]
    rows.append([REGRESSIONS, QUESTION])
    return Report("Named queries", [Column("name"), Column("question")], rows)


def _unit(name: str, kind: str) -> Unit:
    if not kind.startswith((*NUMBERS, "DECIMAL")):
        return "text"
    if name == "ns" or name.endswith("_ns"):
        return "ns"
    if name == "share" or name.endswith("_share"):
        return "fraction"
    if name.endswith("_per_s"):
        return "per_second"
    return "number" if kind.startswith(("DOUBLE", "FLOAT", "DECIMAL")) else "count"


def _cell(value: Any) -> Cell:
    if value is None or isinstance(value, str | int | float):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        return value.isoformat(" ", "milliseconds")
    if isinstance(value, date):
        return value.isoformat()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
