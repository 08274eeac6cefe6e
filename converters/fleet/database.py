"""The data set as tables of DuckDB: `logs`, `steps`, `ops`, `requests`, and views upon them."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.converters.fleet.buckets import GROWTH
from llamacpp_instr.converters.fleet.dataset import TABLES, is_dataset, schema_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

OF_LOGS = ("build", "llama_cpp", "level", "perturbed")
"""columns of `logs` that the other tables have, too"""

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
    """A connection whose tables are those of the data set, read from its files when they are asked
    for. The macro `middle_ns` gives, for a bucket, a duration in ns from which those of the bucket
    deviate by RELATIVE_ERROR at most.

    Raises UsageError if `dataset` is not one, or if duckdb is missing.
    """
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
    source = "rows_of_no_log"
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
