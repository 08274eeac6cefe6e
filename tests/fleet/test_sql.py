"""`instr sql`: the named queries, and SQL of one's own."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from llamacpp_instr.converters.fleet.queries import QUERIES, answer, open_database
from tests.conftest import assert_refused
from tests.fleet.fleet_logs import write_log
from tests.kit.in_process import instr_here, json_reports

FAST, SLOW = "0.3.36+instr.1", "0.3.37+instr.1"


def rows(dataset: Path, query: str) -> list[dict[str, Any]]:
    return json_reports("sql", dataset, query)[0]["rows"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hosts and two builds, four logs of each; on one host the later build is 10 % slower."""
    folder, dataset = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("fleet") / "fleet"
    number = 0
    for cpu in ("Sirius 9", "Vega 2"):
        for build, day in ((FAST, "2026-01-01"), (SLOW, "2026-01-02")):
            for i in range(4):
                factor = 1 + 0.002 * i + (0.1 if (cpu, build) == ("Vega 2", SLOW) else 0)
                write_log(
                    folder / f"{number}.log", number, slower=factor, build=build, cpu=cpu,
                    time=f"{day}T00:00:00Z",
                )  # fmt: skip
                number += 1
    assert instr_here("collect", folder, "-o", dataset).returncode == 0
    return dataset


@pytest.mark.parametrize("name", QUERIES)
def test_every_named_query_answers(name: str, dataset: Path) -> None:
    found = rows(dataset, name)
    assert bool(found) == (name not in ("queue", "unclosed")), "these have no marks, and are closed"


def test_the_named_queries_are_listed(dataset: Path) -> None:
    listed = instr_here("sql", dataset).stdout
    assert [name for name in QUERIES if name not in listed] == []


def test_a_slower_build_is_found_and_noise_is_no_regression(dataset: Path) -> None:
    found = rows(dataset, "regressions")
    assert {row["host"] for row in found} == {"Vega-2-2-cores-24-GiB", "Sirius-9-2-cores-24-GiB"}
    differ = {(row["host"], row["differs"]) for row in found if row["differs"]}
    assert differ == {("Vega-2-2-cores-24-GiB", "slower")}
    (decode,) = (
        row
        for row in found
        if row["phase"] == "decode" and not row["op"] and row["host"].startswith("Vega")
    )
    assert decode["ratio"] == pytest.approx(1.1, abs=0.01)
    assert decode["low"] > 1
    assert (decode["before"], decode["after"]) == (FAST, SLOW)
    assert (decode["logs before"], decode["logs after"]) == (4, 4)


BUILDS = {"0.9": (1.3, 2), "0.3": (1.0, 5), "0.5": (1.06, 6)}
"""in order of time: how slow, and how many logs"""


@pytest.fixture(scope="module")
def three_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, fleet = tmp_path_factory.mktemp("builds"), tmp_path_factory.mktemp("fleet") / "builds"
    for day, (build, (slower, n)) in enumerate(BUILDS.items(), start=1):
        for i in range(n):
            # the last log of each build is from the last day
            time = f"2026-01-{28 if i == n - 1 else day:02}T00:00:00Z"
            factor = slower * (1 + 0.01 * (i % 3))
            log = write_log(folder / f"{build}-{i}.log", 10 * day + i, slower=factor, build=build,
                time=time)  # fmt: skip
            # a step that failed does not count
            failed = log.read_text().replace('"step":5,"status":0', '"step":5,"status":1')
            log.write_text(failed)
            assert '"status":1' in failed
    assert instr_here("collect", folder, "-o", fleet).returncode == 0
    return fleet


def test_the_last_two_builds_are_compared_as_by_hand(three_builds: Path) -> None:
    """Welch's interval of the logarithms, for all rows at once: of the medians of the steps that
    count, and of the means of kernels."""
    found = rows(three_builds, "regressions")
    samples: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    steps = rows(three_builds, "select build, log, phase, ns from steps where counted")
    for row in steps:
        samples[row["phase"], "", row["build"], row["log"]].append(row["ns"])
    kernels = rows(three_builds, "select build, log, phase, op, sum(ns) as ns, sum(kernels) as n"
        " from ops group by all")  # fmt: skip
    for row in kernels:
        samples[row["phase"], row["op"], row["build"], row["log"]] = [row["ns"] / row["n"]]
    logs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (phase, op, build, _), ns in samples.items():
        logs[phase, op, build].append(math.log(np.median(ns)))
    assert {(row["phase"], row["op"]) for row in found} == {key[:2] for key in logs}
    for row in found:
        a, b = (logs[row["phase"], row["op"], build] for build in ("0.3", "0.5"))
        assert (row["before"], row["after"]) == ("0.3", "0.5")
        assert (row["logs before"], row["logs after"]) == (5, 6)
        assert row["ns before"] == pytest.approx(math.exp(np.mean(a)))
        assert row["ns after"] == pytest.approx(math.exp(np.mean(b)))
        of = [np.var(side, ddof=1) / len(side) for side in (a, b)]
        freedom = int(
            sum(of) ** 2 / sum(v**2 / (len(s) - 1) for v, s in zip(of, (a, b), strict=True))
        )
        reach = stats.t.ppf(1 - 0.05 / 2 / len(found), freedom) * math.sqrt(sum(of))
        middle = np.mean(b) - np.mean(a)
        interval = [row["ratio"], row["low"], row["high"]]
        assert interval == pytest.approx(
            [math.exp(middle + x) for x in (0, -reach, reach)], rel=1e-5
        )
        slower = middle - reach > 0
        assert row["differs"] == ("slower" if slower else "faster" if middle + reach < 0 else "")
    assert {row["differs"] for row in found} == {"slower"}


def test_what_differs_comes_first_and_the_largest_before_others(dataset: Path) -> None:
    found = rows(dataset, "regressions")
    order = [(not row["differs"], -abs(math.log(row["ratio"]))) for row in found]
    assert all(a <= b for a, b in pairwise(order))
    assert order[0][0] is False
    assert order[-1][0] is True


def test_logs_of_a_build_that_differ_too_much_have_no_interval(tmp_path: Path) -> None:
    for number, (build, slower) in enumerate((("1", 1), ("1", 1.3), ("2", 1), ("2", 1.3))):
        day = f"2026-01-0{build}T00:00:00Z"
        write_log(tmp_path / f"{number}.log", number, slower=slower, build=build, time=day)
    assert instr_here("collect", tmp_path, "-o", tmp_path / "fleet").returncode == 0
    for row in rows(tmp_path / "fleet", "regressions"):
        assert (row["low"], row["high"], row["differs"]) == (None, None, "")


def test_shares_add_up(dataset: Path) -> None:
    assert sum(row["share"] for row in rows(dataset, "ops")) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "logs"), "nowhere is not a data set"),
        (("FLEET", "select nope from steps"), 'Referenced column "nope" not found'),
        (("FLEET", "selekt 1"), "syntax error"),
        (("FLEET", "slowst"), "slowst"),
        (("FLEET", ";"), "give one SELECT; this is nothing"),
        (("9" * 400, "logs"), "File name too long"),
    ],
)
def test_a_wrong_input_is_one_line(words: tuple[str, ...], message: str, dataset: Path) -> None:
    arguments = [dataset if word == "FLEET" else word for word in words]
    assert_refused(instr_here("sql", *arguments), message)


def test_an_empty_data_set_has_all_tables(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text("no log")
    assert instr_here("collect", tmp_path / "notes.log", "-o", tmp_path / "fleet").returncode == 1
    with open_database(tmp_path / "fleet") as connection:
        for name in (*QUERIES, "regressions", "from op_percentiles"):
            assert answer(connection, name).rows == []
    for name in ("logs", "regressions"):
        assert rows(tmp_path / "fleet", name) == []


def writing_and_reading(folder: Path) -> list[str]:
    """SQL that would read or write a file outside the data set, or change one in it."""
    return [
        f"copy steps to '{folder}/x.csv'",
        f"select 1; copy steps to '{folder}/x.csv'",
        f"copy (select 1) to '{folder}/fleet/logs/x.parquet'",
        f"attach '{folder}/x.db'",
        f"export database '{folder}/x'",
        f"from read_csv('{folder}/secret.csv')",
        f"from '{folder}/secret.csv'",
        f"from read_text('{folder}/fleet/../secret.csv')",
        f"from glob('{folder}/*')",
        "set enable_external_access = true",
        "install httpfs",
        "load icu",
    ]


@pytest.mark.parametrize("number", range(12))
def test_sql_reads_the_data_set_and_nothing_else(number: int, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    instr_here("collect", write_log(tmp_path / "a.log", 1), "-o", tmp_path / "fleet")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    sql = writing_and_reading(tmp_path)
    assert len(sql) == 12
    assert_refused(instr_here("sql", tmp_path / "fleet", sql[number]), "")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


@pytest.mark.parametrize("sql", ["describe steps", "summarize logs", "show tables",
                                 "pivot steps on phase using count(*)"])  # fmt: skip
def test_other_ways_to_ask_are_answered(sql: str, dataset: Path) -> None:
    assert rows(dataset, sql)


def test_a_data_set_may_have_any_name(tmp_path: Path) -> None:
    dataset = tmp_path / "[a] * {b,c} 'd' ?"
    assert instr_here("collect", write_log(tmp_path / "a.log", 1), "-o", dataset).returncode == 0
    assert rows(dataset, "select count(*) as n from steps") == [{"n": 24}]
    assert "1 unchanged" in instr_here("collect", tmp_path / "a.log", "-o", dataset).stderr


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense PAR1", "columns", "empty"], ids=str)
def test_one_bad_file_is_one_line(content: bytes | str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    dataset = tmp_path / "fleet"
    for number in (1, 2):
        log = write_log(tmp_path / f"{number}.log", number)
        assert instr_here("collect", log, "-o", dataset).returncode == 0
    bad = next(dataset.glob("logs/*/*/*2.parquet"))
    if isinstance(content, bytes):
        bad.write_bytes(content)
    else:
        pq.write_table(pa.table({"other": [1] if content == "columns" else []}), bad)
    done = instr_here("collect", tmp_path / "1.log", "-o", dataset)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"{bad}: damaged, or not from instr collect" in done.stderr
    asked = instr_here("sql", dataset, "select log, source from logs")
    assert_refused(asked, "")


@pytest.mark.parametrize(
    ("sql", "labels"),
    [
        ("select 1 as n, 'a' as word", 1),
        ("select 'a' as word, 1 as n, 'b' as other", 1),
        ("select 'a' as word, 'b' as other, 1 as n", 2),
        ("select 'a' as word, 'b' as other, 'c' as third", 3),
    ],
)
def test_the_words_before_the_first_number_name_a_row(sql: str, labels: int, dataset: Path) -> None:
    """They are repeated where a wide table is cut."""
    with open_database(dataset) as connection:
        assert answer(connection, sql).labels == labels


def test_columns_have_the_units_of_their_names(dataset: Path) -> None:
    names = ["ns", "a_ns", "nsb", "share", "a_share", "shared", "a_per_s", "half", "n"]
    values = ", ".join(f"{0.5 if name == 'half' else 1} as {name}" for name in names)
    with open_database(dataset) as connection:
        report = answer(connection, f"select {values}, 'x' as share_of")
    assert [column.unit for column in report.columns] == [
        "ns", "ns", "count", "fraction", "fraction", "count", "per_second", "number", "count",
        "text",
    ]  # fmt: skip
