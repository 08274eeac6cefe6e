"""`instr to-parquet`: what is read back is what was written, and a set of files is whole."""

from __future__ import annotations

import errno
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.base.output import open_output_directory
from llamacpp_instr.converters.exports import table_files as files
from llamacpp_instr.converters.exports.tables import NAMES, load_tables, stream_tables
from tests.conftest import Instr, assert_refused
from tests.fleet.fleet_logs import write_log
from tests.kit.in_process import full_disk, instr_here
from tests.kit.made_log import encode
from tests.kit.strategies import logs, unclosed_logs

# pandas 2 is off by a bit without this option, which pandas 3 no longer wants
EXACT = {} if int(pd.__version__.partition(".")[0]) > 2 else {"float_precision": "round_trip"}
NUMBERS = ("int64", "Int64", "float64")
WALL = "2026-01-02T03:04:05Z"
RECORDED = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


@pytest.mark.native  # takes a tenth as long as all others together
@given(events=logs() | unclosed_logs())
@settings(max_examples=15)
def test_parquet_and_csv_come_back_equal(events, tmp_path_factory):
    directory = tmp_path_factory.mktemp("log")
    path = directory / "session.log"
    path.write_bytes(encode(events))
    n_rows = files.write_parquet(stream_tables(path), directory)
    files.write_csv(stream_tables(path), directory)
    for name, table in vars(load_tables(path)).items():
        back = pd.read_parquet(directory / f"{name}.parquet")
        pd.testing.assert_frame_equal(back, table, check_categorical=False)
        assert n_rows[name] == len(table)
        text = (directory / f"{name}.csv").read_text(encoding="utf-8")
        skipped = ("category", "bool", "datetime64[ns, UTC]")
        words = {n: str(t) for n, t in table.dtypes.items() if str(t) not in skipped}
        back = pd.read_csv(
            io.StringIO(text), dtype=words, keep_default_na=False, na_values=[""], **EXACT
        )
        if name == "sessions":
            back["wall"] = pd.to_datetime(back["wall"], utc=True)
        for column in table:
            assert back[column].isna().tolist() == table[column].isna().tolist(), column
            both = back[column].dropna().astype(str), table[column].dropna().astype(str)
            assert both[0].tolist() == both[1].tolist(), column


def test_fields_have_their_units(tmp_path):
    import pyarrow.parquet as pq

    files.write_parquet(stream_tables(RECORDED), tmp_path)
    for name in NAMES:
        schema = pq.read_schema(tmp_path / f"{name}.parquet")
        units = {
            field.name: field.metadata[b"unit"].decode()
            for field in schema
            if b"unit" in (field.metadata or {})
        }
        times = {"t", "begin", "end", "dur"} & set(schema.names)
        assert all(units[column] == "ns" for column in times)
        # elsewhere a number of a compute, and the words of a processor
        assert (units.get("compute") == "bytes") == (name == "memory")
        assert (units.get("cpu") == "ns") == (name == "machine")
        assert "compute" not in units or name == "memory"
        whole = load_tables(RECORDED)
        assert all(str(getattr(whole, name)[column].dtype) in NUMBERS for column in units)


def test_sessions_join_files_with_each_other_and_with_a_fleet(tmp_path):
    logs = [write_log(tmp_path / f"{i}.log", i, cpu="Vega 2", time=WALL) for i in range(2)]
    both, fleet = tmp_path / "both", tmp_path / "fleet"
    assert instr_here("to-parquet", *logs, "-o", both).returncode == 0
    assert instr_here("collect", *logs, "-o", fleet).returncode == 0
    sessions, steps = (pd.read_parquet(both / f"{of}.parquet") for of in ("sessions", "steps"))
    assert sessions.log.astype(str).tolist() == [str(log) for log in logs]
    assert sessions.models.tolist() == ["llamacpp-instr demo storyteller"] * 2
    ours = steps.merge(sessions, on="log", suffixes=("", "_of_session"))
    ours["time"] = ours.wall + pd.to_timedelta(ours.begin - ours.begin_of_session, unit="ns")
    theirs = pd.read_parquet(fleet / "steps").merge(
        pd.read_parquet(fleet / "logs")[["log", "cpu", "llama_cpp"]], on="log"
    )
    found = ours.merge(theirs, left_on=["id", "step"], right_on=["log", "step"])
    assert len(found) == len(steps) == 48
    for column in ("host", "cpu", "llama_cpp", "n_tokens"):
        other = {"n_tokens": "tokens"}.get(column, f"{column}_y")
        assert found[column if column == "n_tokens" else f"{column}_x"].astype(str).tolist() == (
            found[other].astype(str).tolist()
        ), column
    difference = (found.time_x.dt.floor("us") - found.time_y).abs()
    assert difference.max() <= pd.Timedelta("1us")
    assert (found.time_x.dt.year == 2026).all()


def test_every_piece_is_a_row_group(tmp_path):
    import pyarrow.parquet as pq

    whole = load_tables(RECORDED).ops
    # words that the first piece does not have: its dictionary is not the file's
    pieces = [("ops", whole[:100]), ("ops", whole[100:2000]), ("ops", whole[2000:])]
    files.write_parquet(pieces, tmp_path)
    assert pq.ParquetFile(tmp_path / "ops.parquet").num_row_groups == 3
    back = pd.read_parquet(tmp_path / "ops.parquet")
    pd.testing.assert_frame_equal(back, whole, check_categorical=False)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_the_command_writes_one_file_for_each_table(tmp_path, suffix):
    form = ["--csv"] * (suffix == "csv")
    done = instr_here("to-parquet", RECORDED, "-o", tmp_path / "tables", *form)
    assert done.returncode == 0, done.stderr
    names = {entry.name for entry in (tmp_path / "tables").iterdir()}
    assert names == {f"{name}.{suffix}" for name in NAMES}
    assert "ops 3,504" in done.stderr


@pytest.mark.parametrize("form", [[], ["--csv"]])
def test_an_unclosed_log_is_written_and_reported_as_unclosed(
    tmp_path: Path, instr: Instr, form: list[str]
):
    text = RECORDED.read_bytes()
    (tmp_path / "a.log").write_bytes(text[: text.rindex(b'{"event":"session_end"')])
    done = instr("to-parquet", "a.log", "-o", "tables", *form)
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == "a.log: the log was not closed"
    assert len(list((tmp_path / "tables").iterdir())) == len(NAMES)


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path, instr: Instr):
    assert instr("to-parquet", RECORDED, "-o", "tables", "--csv").returncode == 0
    refused = instr("to-parquet", RECORDED, "-o", "tables")
    assert_refused(refused, "tables exists", "--force")
    assert instr("to-parquet", RECORDED, "-o", "tables", "--force").returncode == 0
    names = {entry.name for entry in (tmp_path / "tables").iterdir()}
    assert names == {f"{name}.parquet" for name in NAMES}, "nothing of the former set is left"
    (tmp_path / "tables" / "notes.txt").touch()
    foreign = instr("to-parquet", RECORDED, "-o", "tables", "--force")
    assert_refused(foreign, "contains another file (notes.txt)")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tables"]


def test_wrong_input_is_one_line_and_leaves_nothing(tmp_path: Path, instr: Instr):
    text = RECORDED.read_text().splitlines()
    (tmp_path / "bad.log").write_text("\n".join([*text[:100], "{", *text[100:]]))
    assert_refused(instr("to-parquet", "bad.log", "-o", "tables"), "bad.log:101")
    assert_refused(instr("to-parquet", "no.log", "-o", "tables"), "no.log: no such file")
    assert_refused(instr("to-parquet", RECORDED, "-o", "bad.log"), "bad.log is not a directory")
    assert_refused(instr("to-parquet", RECORDED, "-o", "a/b"), "there is no directory a")
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.log"]


@pytest.mark.native
@pytest.mark.parametrize("form", [[], ["--csv"]])
def test_ctrl_c_leaves_nothing(tmp_path: Path, environment: dict[str, str], form: list[str]):
    # not `python -m`: there CPython ends itself with the signal, instead of status 130, if it came
    # while a module defined a dataclass
    program = str(Path(sys.executable).with_name("instr"))
    command = [program, "to-parquet", "-", "-o", "tables", *form]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(RECORDED.read_bytes()[:50_000])
        process.stdin.flush()
        while not any(tmp_path.iterdir()):
            assert process.poll() is None
            time.sleep(0.02)
        assert [entry.name.startswith(".instr-") for entry in tmp_path.iterdir()] == [True]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
        assert process.stderr is not None
        assert process.stderr.read().strip() == b"Interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.native
@pytest.mark.parametrize("form", ["--force", "--csv"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
):
    monkeypatch.chdir(tmp_path)
    with full_disk(room=4096):
        done = instr_here("to-parquet", RECORDED, "-o", "tables", form)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("Error: tables cannot be written:"), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reason", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("before", [False, True])
def test_an_interrupted_set_is_not_seen(tmp_path: Path, reason: type[BaseException], before: bool):
    place = tmp_path / "tables"
    if before:
        place.mkdir()
        (place / "ops.csv").write_text("before")

    def write_half() -> None:
        with open_output_directory(place, ("ops.csv", "steps.csv"), force=True) as directory:
            (directory / "steps.csv").write_text("half")
            assert not (place / "steps.csv").exists()
            raise reason

    with pytest.raises(reason):
        write_half()
    found = {str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")}
    assert found == ({"tables", "tables/ops.csv"} if before else set())


def test_the_directory_may_exist_if_it_is_empty(tmp_path: Path):
    place = tmp_path / "tables"
    place.mkdir()
    with open_output_directory(place, ("a.csv",)) as directory:
        (directory / "a.csv").touch()
    assert [entry.name for entry in place.iterdir()] == ["a.csv"]
    (tmp_path / "other").mkdir()
    assert place.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.native
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_waits_until_the_old_files_are_removed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a.csv", "b.csv")
    place = tmp_path / "tables"
    place.mkdir()
    for file in names:
        (place / file).write_text("old")
    unlink = Path.unlink

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        signal.raise_signal(signal.Signals[name])

    ends = pytest.raises((SystemExit, KeyboardInterrupt))
    with ends, open_output_directory(place, names, force=True) as directory:
        (directory / "a.csv").write_text("new")
        monkeypatch.setattr(Path, "unlink", interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]
    assert {path.name: path.read_text() for path in place.iterdir()} == {"a.csv": "new"}


@pytest.mark.native
def test_a_signal_just_before_signals_wait_leaves_the_old_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal right after the exchange once left the old directory under another name."""
    place = tmp_path / "tables"
    place.mkdir()
    (place / "a.csv").write_text("old")
    install = signal.signal

    def interrupted(number: int, handler: signal._HANDLER) -> object:
        monkeypatch.setattr(signal, "signal", install)
        signal.raise_signal(signal.SIGTERM)
        return install(number, handler)

    ends = pytest.raises(SystemExit)
    with ends, open_output_directory(place, ("a.csv",), force=True) as directory:
        (directory / "a.csv").write_text("new")
        monkeypatch.setattr(signal, "signal", interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]
    assert (place / "a.csv").read_text() == "old"


def test_the_old_directory_comes_back_if_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tables"
    place.mkdir()
    (place / "a.csv").write_text("old")
    rename = Path.replace

    def failing(path: Path, target: Path) -> Path:
        if path.joinpath("new.csv").exists():
            raise OSError(errno.EIO, "Input/output error", str(target))
        return rename(path, target)

    names = ("a.csv", "new.csv")
    ends = pytest.raises(InstrError, match=r"tables cannot be written: Input/output error")
    with ends, open_output_directory(place, names, force=True) as directory:
        (directory / "new.csv").write_text("new")
        monkeypatch.setattr(Path, "replace", failing)
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]
    assert (place / "a.csv").read_text() == "old"
