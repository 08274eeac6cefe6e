"""`instr collect --dask`: the workers of a scheduler make the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.fleet_logs import write_logs
from tests.fleet.test_collect import collect, rows


@pytest.mark.native
def test_the_workers_of_a_dask_scheduler_make_the_same_rows(tmp_path: Path) -> None:
    from distributed import LocalCluster

    folder = write_logs(tmp_path / "logs", 4)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        done = collect(folder, "-o", tmp_path / "far", "--dask", address)
    assert "logs: 4 new" in done.stderr
    collect(folder, "-o", tmp_path / "near")
    sql = "select * exclude (date) from ops order by all"
    assert rows(tmp_path / "far", sql) == rows(tmp_path / "near", sql)
