"""`instr collect`: every log once, whole or not at all, with the figures of the log itself."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.converters.fleet.collect import collect as collected
from llamacpp_instr.converters.fleet.collect import find_sources
from llamacpp_instr.converters.fleet.dataset import (
    RELATIVE_ERROR,
    bucket_of,
    known_logs,
    only_writer,
    open_dataset,
)
from llamacpp_instr.converters.fleet.queries import ask, open_database
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import load_session
from tests.conftest import assert_refused
from tests.fleet.fleet_logs import RECORDED, write_log, write_logs
from tests.kit.in_process import full_disk, instr_here, json_reports
from tests.kit.native_kit import ROOT


def collect(*words: object) -> subprocess.CompletedProcess[str]:
    return instr_here("collect", *words)


def rows(dataset: Path, sql: str) -> list[Any]:
    with open_database(dataset) as connection:
        return ask(connection, sql)[1]


def test_the_middle_of_a_bucket_is_within_the_error_of_all_in_it(tmp_path: Path) -> None:
    """The middle that SQL takes percentiles from."""
    ns = np.unique(np.geomspace(1, 1e15, 10_000).astype(np.int64))
    buckets = np.concatenate([[0], bucket_of(ns)]).tolist()
    assert collect(RECORDED, "-o", tmp_path / "fleet").returncode == 0
    asked = rows(tmp_path / "fleet", f"select middle_ns(unnest({buckets}))")
    middles = np.array(asked).ravel()
    assert middles[:2].tolist() == [0, 1]
    assert np.abs(middles[1:] / ns - 1).max() <= RELATIVE_ERROR * 1.0001


@pytest.mark.parametrize(
    "log", sorted((ROOT / "tests" / "fixtures").glob("*.log")), ids=lambda log: log.name
)
def test_the_figures_are_those_of_the_log(log: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    assert collect(log, "-o", dataset).returncode == 0
    session = load_session(log)
    steps = session.steps
    of_steps = rows(dataset, "select step, phase, ns, tokens from steps order by step")
    ns = (steps["end"] - steps["begin"]).tolist()
    columns = (steps["step"].tolist(), steps["phase"].tolist(), ns, steps["n_tokens"].tolist())
    assert of_steps == sorted(zip(*columns, strict=True))
    _, requests = find_requests(session)
    of_requests = rows(dataset, "select ns, first_token_ns, prompt, reused, output from requests")
    assert sorted(of_requests) == sorted(
        (of.total, of.to_first_token, of.prompt, of.reused, len(of.token_times)) for of in requests
    )
    if not session.ops:
        return
    stats, *_ = compute_stats(session, by="op")
    names = [column.name for column in stats.columns]
    sql = "select op, sum(kernels), sum(ns) from ops group by op"
    found = {op: figures for op, *figures in rows(dataset, sql)}
    for row in (dict(zip(names, row, strict=True)) for row in stats.rows):
        kernels, total = found[str(row["op"])]
        assert (kernels, total) == (row["count"], row["total"])
    sql = "select op, p50_ns, p90_ns, p99_ns from op_percentiles where phase = 'decode'"
    percentiles = {op: values for op, *values in rows(dataset, sql)}
    durations = of_decodes(log)
    assert percentiles.keys() == durations.keys()
    for op, values in percentiles.items():
        exact = np.quantile(durations[op], [0.5, 0.9, 0.99], method="inverted_cdf")
        assert np.abs(np.array(values) / exact - 1).max() <= RELATIVE_ERROR * 1.0001


def of_decodes(log: Path) -> dict[str, list[int]]:
    """The durations of the kernels of decodes, by op."""
    from llamacpp_instr.converters.exports.tables import load_tables

    ops = load_tables(log).ops
    ops = ops[(ops.thread == 0) & (ops.phase == "decode")]
    return {str(op): of.dur.tolist() for op, of in ops.groupby("label", observed=True)}


def test_what_is_known_is_skipped_and_what_has_grown_is_taken_again(tmp_path: Path) -> None:
    dataset, folder = tmp_path / "fleet", write_logs(tmp_path / "logs", 3)
    packed = folder / "deep" / "packed.log.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(write_log(tmp_path / "3.log", 3).read_bytes()))
    (folder / "notes.txt").write_text("no log")
    assert "logs: 4 new" in collect(folder, "-o", dataset).stderr
    before = {path: path.stat().st_mtime_ns for path in dataset.rglob("*.parquet")}
    assert "logs: 4 unchanged" in collect(folder, "-o", dataset).stderr
    assert before == {path: path.stat().st_mtime_ns for path in dataset.rglob("*.parquet")}
    write_log(folder / "1.log", 1, repeat=3)
    done = collect(folder, "-o", dataset)
    assert "logs: 1 grown, 3 unchanged" in done.stderr
    assert "was not closed" in done.stderr
    steps = dict(rows(dataset, "select log, count(*) from steps group by log"))
    assert steps[f"{0:016x}"] == 24
    assert steps[f"{1:016x}"] > 60
    assert rows(dataset, "select count(*) from logs") == [(4,)]
    done = collect(write_log(tmp_path / "copy.log", 2), "-o", dataset)
    assert "logs: 1 copy" in done.stderr
    assert "2.log" in done.stderr


def test_another_log_with_the_same_id_is_named_and_kept(tmp_path: Path) -> None:
    """It has more steps, so it must not pass for a log that has grown."""
    dataset, folder = tmp_path / "fleet", tmp_path / "logs"
    folder.mkdir()
    logs = [
        write_log(folder / f"{i}.log", 1, slower=1 + i, repeat=1 + i, build=f"build {i}")
        for i in range(3)
    ]
    for i, log in enumerate(logs):
        done = collect(log, "-o", dataset)
        assert ("logs: 1 new" if i == 0 else "logs: 1 conflict") in done.stderr
        assert i == 0 or f"{log}: " in done.stderr
    check(dataset)
    found = rows(dataset, "select log, build, count(*) from steps group by all order by 2")
    names = [f"{1:016x}", f"{1:016x}~2", f"{1:016x}~3"]
    assert [log for log, _, _ in found] == names
    assert [n for *_, n in found] == [len(load_session(log).steps) for log in logs]
    assert "logs: 3 unchanged" in collect(folder, "-o", dataset).stderr
    (tmp_path / "copy.log").write_bytes(logs[1].read_bytes())
    assert "logs: 1 copy" in collect(tmp_path / "copy.log", "-o", dataset).stderr
    write_log(logs[1], 1, slower=2, repeat=5, build="build 1")
    assert "logs: 1 grown" in collect(logs[1], "-o", dataset).stderr
    steps = dict(rows(dataset, "select log, count(*) from steps group by log"))
    assert steps[names[1]] == len(load_session(logs[1]).steps)
    assert len(steps) == 3


def test_each_part_of_a_rotated_log_has_its_rows(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", 1)
    first, *others = log.read_text().splitlines(keepends=True)
    event = json.loads(first) | {"part": 2}
    (tmp_path / "a.part2.log").write_text(json.dumps(event) + "\n" + "".join(others))
    assert "logs: 2 new" in collect(tmp_path, "-o", tmp_path / "fleet").stderr
    check(tmp_path / "fleet")
    for table in ("steps", "ops", "requests"):
        found = rows(tmp_path / "fleet", f"select distinct log from {table} order by 1")
        assert found == [(f"{1:016x}",), (f"{1:016x}-2",)]


def test_times_are_those_of_utc_wherever_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    log = write_log(tmp_path / "a.log", 1, time="2026-01-02T03:04:05Z")
    dataset = tmp_path / "fleet"
    collect(log, "-o", dataset)
    (row,) = json_reports("sql", dataset, "select time, time::date as day from logs")[0]["rows"]
    assert row == {"time": "2026-01-02 03:04:05.000+00:00", "day": "2026-01-02"}
    for table in ("logs", "steps", "requests"):
        (path,) = (dataset / table).rglob("*.parquet")
        assert str(pq.read_schema(path).field("time").type) == "timestamp[us, tz=UTC]"


def test_patterns_and_urls_name_logs_too(tmp_path: Path) -> None:
    import fsspec

    folder = write_logs(tmp_path / "logs", 3)
    assert "2 new" in collect(f"{folder}/[01].log", "-o", tmp_path / "fleet").stderr
    store = fsspec.filesystem("memory")
    for log in folder.iterdir():
        store.pipe(f"/bucket/day/{log.name}", log.read_bytes())
    dataset = tmp_path / "other"
    assert "3 new" in collect("memory://bucket", "-o", dataset).stderr
    assert "3 unchanged" in collect("memory://bucket/*/*.log", "-o", dataset).stderr
    assert rows(dataset, "select min(source) from logs")[0][0] == "memory://bucket/day/0.log"


def test_damaged_logs_are_named_and_the_others_taken(tmp_path: Path) -> None:
    write_log(tmp_path / "good.log", 1)
    broken = write_log(tmp_path / "bad.log", 2)
    lines = broken.read_text().splitlines(keepends=True)
    broken.write_text("".join([*lines[:50], "nonsense\n", *lines[50:]]))
    (tmp_path / "empty.log").write_text("")
    done = collect(tmp_path, "-o", tmp_path / "fleet")
    assert done.returncode == 1
    assert "logs: 1 new, 2 damaged" in done.stderr
    assert f"left out: {broken}:51: " in done.stderr
    assert str(tmp_path / "empty.log") in done.stderr
    done = collect(tmp_path, "-o", tmp_path / "fleet", "--lenient")
    assert "logs: 1 new, 1 unchanged, 1 damaged" in done.stderr
    assert rows(tmp_path / "fleet", "select left_out from logs order by log") == [(0,), (1,)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere.log", "-o", "fleet"), "nowhere.log: no such file"),
        (("LOG", "-o", "occupied"), "occupied exists and is not a data set"),
        (("nowhere://a/b", "-o", "fleet"), "nowhere://a/b"),
        (("LOG", "-o", "missing/fleet"), "missing/fleet"),
        (("LOG", "-o", "fleet", "--dask", "nothing"), "--dask nothing"),
        (("LOG", "-o", "9" * 400), "File name too long"),
        (("LOG", "-o", "fleet", "--host", ""), "give a name of 1 to 200 bytes"),
        (("LOG", "-o", "fleet", "--host", "é" * 40), "give a name of 1 to 200 bytes"),
    ],
)
def test_a_wrong_input_is_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "thesis.txt").write_text("mine")
    assert_refused(collect(*(RECORDED if word == "LOG" else word for word in words)), message)
    assert (tmp_path / "occupied" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "start",
    [
        {"time": "../../../x"},
        {"time": "a\0b"},
        {"id": "../../../../x"},
        {"id": "9" * 300},
        {"host": {"cpu": "x" * 300}},
        {"host": {"cpu": "../../../../x"}},
    ],
    ids=str,
)
def test_no_log_chooses_where_its_rows_are_written(start: dict[str, Any], tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", 1)
    first, *others = log.read_text().splitlines(keepends=True)
    event = json.loads(first)
    host = event["host"] | start.get("host", {})
    log.write_text(json.dumps(event | start | {"host": host}) + "\n" + "".join(others))
    done = collect(log, "-o", tmp_path / "fleet")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a.log", "fleet"}
    tables = {"_format", "_lock", "logs", "steps", "ops", "requests"}
    assert {path.name for path in (tmp_path / "fleet").iterdir()} <= tables
    date = datetime.fromtimestamp(event["wall"] // 10**9, timezone.utc).date()
    assert rows(tmp_path / "fleet", "select date from logs") == [(date,)]


def test_a_full_disk_is_one_line_and_nothing_half_written(tmp_path: Path) -> None:
    log, dataset = write_log(tmp_path / "a.log", 1), tmp_path / "fleet"
    with full_disk(room=500):
        done = collect(log, "-o", dataset)
    assert done.returncode == 1
    assert done.stderr == f"Error: {dataset}: File too large\n"
    assert {path.name for path in dataset.iterdir()} == {"_format", "_lock"}
    assert collect(log, "-o", dataset).returncode == 0


# `instr`, killed before a file gets its name, once that many have
KILLED = """if True:
    import os, signal, sys
    from llamacpp_instr.__main__ import main
    named, most = [], int(sys.argv.pop(1))
    def look(event, _):
        if event == "os.rename":
            named.append(event)
            if len(named) > most:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)
    main()
"""


@pytest.mark.native
def test_a_killed_collect_leaves_each_log_whole_or_absent(tmp_path: Path) -> None:
    folder, dataset = tmp_path / "logs", tmp_path / "fleet"
    folder.mkdir()
    for i in range(8):
        write_log(folder / f"{i}.log", i, repeat=2)
    seen = set()
    for most in (0, 1, 2, 4, 5, 9):
        command = [sys.executable, "-c", KILLED, str(most), "collect", folder, "-o", dataset]
        done = subprocess.run(command, stderr=subprocess.DEVNULL, cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        if not (dataset / "_format").is_file():
            continue
        check(dataset)
        seen.add(len(known_logs(dataset)))
    assert len(seen) > 2, "it was killed in the middle"
    done = collect(folder, "-o", dataset)
    assert done.returncode == 0
    check(dataset)
    assert len(known_logs(dataset)) == 8
    assert list(dataset.glob(".*")) == []


def check(dataset: Path) -> None:
    """Every log of the data set has all its rows."""
    sql = """select steps, (select count(*) from steps where log = logs.log), kernels,
        (select sum(kernels) from ops where log = logs.log) from logs"""
    for n_steps, found_steps, n_kernels, found_kernels in rows(dataset, sql):
        assert (n_steps, n_kernels) == (found_steps, found_kernels)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    open_dataset(dataset)
    with only_writer(dataset):
        assert_refused(collect(RECORDED, "-o", dataset), "another instr collect")


def test_other_engines_read_the_files(tmp_path: Path) -> None:
    """The partitions are Hive's, and files that are not tables have names that engines skip."""
    import pandas as pd

    dataset = tmp_path / "fleet"
    collect(write_log(tmp_path / "a.log", 1, cpu="Sirius/9 100%"), "-o", dataset)
    collect(RECORDED, "-o", dataset, "--host", "rack 7/é%")
    frame = pd.read_parquet(dataset / "steps")
    assert len(frame) == 48
    hosts = rows(dataset, "select host from hosts order by host")
    assert hosts == [("Sirius-9-100-2-cores-24-GiB",), ("rack 7/é%",)]
    assert sorted(frame.host.unique()) == [host for (host,) in hosts]
    assert all(path.name.startswith("_") for path in dataset.iterdir() if path.is_file())


def test_logs_with_one_id_that_are_taken_at_once_are_all_kept(tmp_path: Path) -> None:
    """As the workers of a Dask scheduler do."""
    logs = [write_log(tmp_path / f"{i}.log", 1, slower=1 + i, repeat=1 + i) for i in range(4)]
    dataset, sources = tmp_path / "fleet", find_sources([str(log) for log in logs])
    with ThreadPoolExecutor(len(logs)) as workers:
        taken = list(collected(sources, dataset, None, False, lambda *_: None, workers.map))
    assert sorted(of.fate for of in taken) == ["conflict", "conflict", "conflict", "new"]
    check(dataset)
    found = rows(dataset, "select count(*) from steps group by log order by 1")
    assert [n for (n,) in found] == [len(load_session(log).steps) for log in logs]


def test_json_has_raw_numbers(tmp_path: Path) -> None:
    collect(RECORDED, "-o", tmp_path / "fleet")
    (table,) = json_reports("sql", tmp_path / "fleet", "select ns, time from steps limit 1")
    assert table["units"] == {"ns": "ns", "time": "text"}
    assert isinstance(table["rows"][0]["ns"], int)
