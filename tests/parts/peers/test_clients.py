"""Notebooks and table engines that users install today read what we write.

Not part of `make test`: it needs these packages. `make test-all PARTS=peers` runs it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.parquet as pq
import pytest

from llamacpp_instr.log.session import load_session
from tests.fleet.fleet_logs import write_log
from tests.kit.native_kit import ROOT
from tests.parts.peers.run_instr import instr

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import llamacpp_instr

    log = llamacpp_instr.load({log!r})
    log.page({page!r})
    log
    return (log,)


@app.cell
def _(log):
    log.diff(log)
    return
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("logs")
    return [write_log(folder / f"{i}.log", i, time="2026-01-02T03:04:05Z") for i in range(2)]


def test_marimo_shows_a_log(logs: list[Path], tmp_path: Path) -> None:
    """It replaces the standard streams by ones of text."""
    notebook, page = tmp_path / "notebook.py", tmp_path / "page.html"
    notebook.write_text(NOTEBOOK.format(log=str(logs[0]), page=str(page)))
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "export", "html", notebook.name, "-o", "out.html"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Where the time went" in (tmp_path / "out.html").read_text(encoding="utf-8")
    assert page.is_file()


def test_polars_and_duckdb_join_sessions_with_a_fleet(logs: list[Path], tmp_path: Path) -> None:
    instr("to-parquet", *logs, "-o", "tables", cwd=tmp_path)
    instr("collect", *logs, "-o", "fleet", cwd=tmp_path)
    sql = """
        select sum(steps.dur), min(sessions.wall::timestamptz + to_microseconds((steps."begin" -
            sessions."begin") // 1000) - fleet.time), count(*)
        from 'tables/steps.parquet' as steps join 'tables/sessions.parquet' as sessions using (log)
        join 'fleet/steps/*/*/*.parquet' as fleet
            on fleet.log = sessions.id and fleet.step = steps.step""".replace(
        "'tables", f"'{tmp_path}/tables"
    ).replace("'fleet", f"'{tmp_path}/fleet")
    (row,) = duckdb.sql(sql).fetchall()
    steps = [load_session(log).steps for log in logs]
    spent = sum(int((of["end"] - of["begin"]).sum()) for of in steps)
    assert row[0] == spent
    assert abs(row[1].total_seconds()) <= 2e-6, "both have the time of day"
    assert row[2] == sum(map(len, steps))

    tables = {
        of: pl.read_parquet(tmp_path / f"tables/{of}.parquet") for of in ("steps", "sessions")
    }
    joined = tables["steps"].join(tables["sessions"], on="log", suffix="_of_session")
    assert joined["dur"].sum() == spent
    assert joined["wall"].dtype == pl.Datetime("ns", "UTC")
    fleet = pl.read_parquet(tmp_path / "fleet/steps/**/*.parquet", hive_partitioning=True)
    assert fleet["ns"].sum() == spent
    assert set(fleet["log"]) == set(tables["sessions"]["id"])
    assert fleet["time"].dtype == pl.Datetime("us", "UTC")
    unit = pq.read_schema(tmp_path / "tables/steps.parquet").field("dur").metadata[b"unit"]
    assert unit == b"ns"
