"""`instr sql DATASET [QUERY]`: questions about many logs."""

from __future__ import annotations

from pathlib import Path

import click

from llamacpp_instr.cli.options import ReportOutput, command, report_options


@command(
    "instr sql fleet",
    "instr sql fleet regressions",
    "instr sql fleet \"select host, median(ns) from steps where phase = 'decode' group by host\"",
)
@click.argument("dataset", metavar="DATASET", type=click.Path(path_type=Path))
@click.argument("query", required=False)
@report_options
def sql(dataset: Path, query: str | None, output: ReportOutput) -> None:
    """Ask about the logs in a data set.

    `instr collect` makes data sets. QUERY is a SELECT, as DuckDB knows it, or the name of a query;
    without one, the names are listed. The tables are logs, steps, requests, ops, hosts and
    op_percentiles. A column whose name ends in ns holds nanoseconds; times are UTC. In ops, a row
    counts the kernels of one op whose durations differ by at most 2 %, and the percentiles
    of op_percentiles are within 1 %.
    """
    from llamacpp_instr.converters.fleet.queries import answer, named_queries, open_database

    output.check()
    with open_database(dataset) as connection:
        output.write([answer(connection, query) if query else named_queries()])
