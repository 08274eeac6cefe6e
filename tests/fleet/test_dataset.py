"""The files of a data set, and the cells that the values of SQL become."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.converters.fleet.dataset import (
    FORMAT,
    TABLES,
    LogFiles,
    Place,
    is_dataset,
    known_logs,
    only_writer,
    open_dataset,
    remove,
    schema_of,
)
from llamacpp_instr.converters.fleet.queries import QUERIES, REGRESSIONS, _cell, named_queries


def log_row(**of: object) -> dict[str, Any]:
    row: dict[str, Any] = {field.name: None for field in schema_of("logs")}
    return {**row, "source": "a.log", "size": 7, "version": "1", "steps": 1, "kernels": 2,
            "requests": 3, **of}  # fmt: skip


def steps(*times: int) -> list[dict[str, Any]]:
    empty: dict[str, Any] = {field.name: None for field in schema_of("steps")}
    return [{**empty, "ctx": 0, "step": i, "time": t} for i, t in enumerate(times)]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    open_dataset(tmp_path / "fleet")
    return tmp_path / "fleet"


PLACE = Place("2026-01-02", "a/b c", "x~2")


def put(dataset: Path, place: Place, *times: int, replaced: Place | None = None) -> None:
    with LogFiles(dataset) as files:
        if times:
            files.write("steps", steps(*times))
        files.write("logs", [log_row()])
        files.place(place, replaced)


def test_a_log_is_where_its_date_and_host_say(dataset: Path) -> None:
    put(dataset, PLACE, 1, 2)
    path = dataset / "logs" / "date=2026-01-02" / "host=a%2Fb%20c" / "x~2.parquet"
    assert path.exists()
    assert [of.name for of in dataset.glob("*/*/*/*")] == ["x~2.parquet"] * 2
    (name, known), = known_logs(dataset).items()  # fmt: skip
    assert (name, known.place) == ("x~2", PLACE)
    assert (known.source, known.size, known.version) == ("a.log", 7, "1")
    assert (known.steps, known.kernels, known.requests) == (1, 2, 3)
    assert known_logs(dataset, "x~2").keys() == {"x~2"}
    assert known_logs(dataset, "y") == {}
    remove(dataset, PLACE)
    assert known_logs(dataset) == {}
    assert not list(dataset.glob("*/*/*/*"))
    remove(dataset, PLACE)


def test_an_earlier_state_of_a_log_vanishes(dataset: Path) -> None:
    put(dataset, PLACE, 1, 2)
    later = Place("2026-01-03", "c", "x~2")
    put(dataset, later, replaced=PLACE)
    assert known_logs(dataset)["x~2"].place == later
    assert [path.parts[-4] for path in dataset.glob("*/*/*/*")] == ["logs"], "it has no steps"


def test_what_is_not_placed_is_removed(dataset: Path) -> None:
    with LogFiles(dataset) as files:
        files.write("steps", steps(1))
        assert len(list(dataset.glob(".steps-*.part"))) == 1
    assert {path.name for path in dataset.iterdir()} == {"_format"}


@pytest.mark.parametrize(
    ("times", "same"),
    [((1, 2), True), ((1,), True), ((1, 2, 3), True), ((), True), ((1, 3), False), ((5, 6), False)],
)
def test_states_of_a_session_share_their_steps(
    times: tuple[int, ...], same: bool, dataset: Path
) -> None:
    """The steps of one are among those of the other."""
    put(dataset, PLACE, 1, 2)
    with LogFiles(dataset) as files:
        if times:
            files.write("steps", steps(*times))
        assert files.is_of_session(PLACE) == same


def test_rows_are_appended(dataset: Path) -> None:
    import pyarrow.parquet as pq

    with LogFiles(dataset) as files:
        files.write("steps", steps(1, 2))
        files.write("steps", steps(3))
        files.place(PLACE, None)
    assert pq.read_table(PLACE.path(dataset, "steps")).num_rows == 3
    assert known_logs(dataset) == {}, "it has no row in logs"


def test_durations_and_bytes_have_their_units() -> None:
    fields = {(table, field.name): field for table in TABLES for field in schema_of(table)}
    units = {key: (of.metadata or {}).get(b"unit") for key, of in fields.items()}
    assert {key for key, unit in units.items() if unit == b"bytes"} == {("logs", "memory")}
    assert {name for (_, name), unit in units.items() if unit == b"ns"} == {
        "ns", "prepare_ns", "readback_ns", "queued_ns", "first_token_ns", "between_tokens_ns",
    }  # fmt: skip


def test_a_folder_is_a_data_set_by_its_mark(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet"
    assert not is_dataset(fleet)
    open_dataset(fleet)
    open_dataset(fleet)
    assert is_dataset(fleet)
    assert (fleet / "_format").read_text() == FORMAT
    (fleet / "_format").write_text("another")
    for asked in (is_dataset, open_dataset):
        with pytest.raises(UsageError, match="a data set of another version"):
            asked(fleet)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """An empty one is used, and so is one that a killed process started."""
    for name in ("empty", "begun", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "begun" / "_format.part").write_text("lla")
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "begun"):
        open_dataset(tmp_path / name)
        assert is_dataset(tmp_path / name)
    for name in ("full", "file"):
        with pytest.raises(UsageError, match=f"{name} exists and is not a data set"):
            open_dataset(tmp_path / name)


def test_one_process_writes_and_removes_what_a_killed_one_left(dataset: Path) -> None:
    (dataset / ".steps-1.part").write_text("")
    with only_writer(dataset):
        assert not (dataset / ".steps-1.part").exists()
        other = only_writer(dataset)
        with pytest.raises(UsageError, match="another instr collect is writing to it"):
            other.__enter__()
    with only_writer(dataset):
        pass


def test_a_damaged_file_is_named(dataset: Path) -> None:
    put(dataset, PLACE, 1)
    PLACE.path(dataset, "logs").write_text("no parquet")
    with pytest.raises(InstrError, match="damaged, or not from instr collect; remove it and"):
        known_logs(dataset)


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, None), ("a", "a"), (3, 3), (1.5, 1.5), (Decimal("2.50"), 2.5),
        (datetime(2026, 1, 2, 3, 4, 5, 678901), "2026-01-02 03:04:05.678"),
        (date(2026, 1, 2), "2026-01-02"), (["a", 1], "a, 1"), ({"a": 1}, "{'a': 1}"),
    ],
)  # fmt: skip
def test_values_of_sql_are_cells(value: object, cell: object) -> None:
    assert _cell(value) == cell
    assert type(_cell(value)) is type(cell)


def test_truth_is_a_number() -> None:
    assert [type(_cell(of)) for of in (True, False)] == [int, int]
    assert [_cell(True), _cell(False)] == [1, 0]


def test_every_query_has_a_question() -> None:
    rows = named_queries().rows
    assert [row[0] for row in rows] == [*QUERIES, REGRESSIONS]
    assert all(str(row[1]).endswith(".") for row in rows)
