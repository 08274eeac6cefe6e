"""`instr sql`: the named queries, and SQL of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from converters.fleet.answer import answer
from converters.fleet.database import open_database
from converters.fleet.queries import QUERIES
from tests.conftest import assert_refused
from tests.fleet.fleet_logs import write_log
from tests.kit.in_process import instr_here, told

FAST, SLOW = "0.3.36+instr.1", "0.3.37+instr.1"


def rows(dataset: Path, query: str) -> list[dict[str, Any]]:
    return told("sql", dataset, query)[0]["rows"]


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


def test_shares_add_up(dataset: Path) -> None:
    assert sum(row["share"] for row in rows(dataset, "ops")) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere", "logs"), "nowhere is not a data set"),
        (("FLEET", "select nope from steps"), 'Referenced column "nope" not found'),
        (("FLEET", "selekt 1"), "syntax error"),
        (("FLEET", "slowst"), "slowst"),
    ],
)
def test_a_wrong_input_is_one_line(words: tuple[str, ...], said: str, dataset: Path) -> None:
    arguments = [dataset if word == "FLEET" else word for word in words]
    assert_refused(instr_here("sql", *arguments), said)


def test_an_empty_data_set_has_all_tables(tmp_path: Path) -> None:
    (tmp_path / "notes.log").write_text("no log")
    assert instr_here("collect", tmp_path / "notes.log", "-o", tmp_path / "fleet").returncode == 1
    with open_database(tmp_path / "fleet") as connection:
        for name in (*QUERIES, "regressions", "from op_percentiles"):
            assert answer(connection, name).rows == []
    for name in ("logs", "regressions"):
        assert rows(tmp_path / "fleet", name) == []
