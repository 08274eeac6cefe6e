"""The parts of a rotated log are one log, in every reader."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import LogError, UsageError
from llamacpp_instr.converters.exports.tables import tables_of
from llamacpp_instr.log.check import missing_parts
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.schema import Event
from llamacpp_instr.log.session import load_session
from tests.kit.made_log import encode, make_log
from tests.kit.native_kit import ROOT
from tests.kit.split_log import split_log
from tests.kit.strategies import damaged_logs

EVERY_EVENT = (ROOT / "tests" / "fixtures" / "every-event.log").read_bytes()


def write_parts(directory: Path, parts: list[list[Event]]) -> list[Path]:
    paths = [directory / f"it.part{n}.log" for n in range(1, len(parts) + 1)]
    for path, events in zip(paths, parts, strict=True):
        path.write_bytes(encode(events))
    return paths


def rows(table: pd.DataFrame, *left_out: str) -> list[str]:
    """Sorted, because threads that work at once come in another order."""
    kept = table[[name for name in table if name not in left_out]]
    return sorted(kept.to_csv(index=False).splitlines())


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), n_parts=st.integers(2, 5))
def test_parts_equal_one_file(
    tmp_path_factory: pytest.TempPathFactory, seed: int, n_parts: int
) -> None:
    random = Random(seed)
    events = make_log(random.randint)
    directory = tmp_path_factory.mktemp("parts")
    (single,) = write_parts(directory, split_log(events, 1, random))
    whole = load_session(single)
    parts = split_log(events, n_parts, random)
    paths = write_parts(directory, parts)
    random.shuffle(paths)
    (run,) = find_runs(paths)
    joined = load_session(run)

    one, several = tables_of(whole), tables_of(joined)
    renumbered = {"ops": ("compute", "plan"), "layers": ("compute",)}
    for name in ("steps", "ops", "layers", "tokens", "kv", "tensors", "marks"):
        left_out = renumbered.get(name, ())
        assert rows(getattr(several, name), *left_out) == rows(getattr(one, name), *left_out), name
    computes = [
        rows(pd.DataFrame(of.computes.columns), "compute", "graph") for of in (joined, whole)
    ]
    assert computes[0] == computes[1]
    assert joined.models == whole.models
    assert joined.contexts == whole.contexts
    assert joined.start == whole.start
    assert joined.end is not None
    assert whole.end is not None
    assert joined.end.decode_ns == whole.end.decode_ns
    assert joined.end.events.get("step_end", 0) == whole.end.events.get("step_end", 0)
    assert joined.log_end.sentence() == ""


def recorded(directory: Path) -> list[Path]:
    """Four parts of a session with a single context and four steps."""
    events = make_log(lambda _low, high: high, n_contexts=1, level="detailed")
    return write_parts(directory, split_log(events, 4, Random(7)))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, _second, third, fourth = recorded(tmp_path)
    (run,) = find_runs([fourth, first, third])
    assert load_session(run).log_end.sentence() == "part 2 is missing"
    (finding,) = missing_parts([first, third, fourth])
    assert (finding.path, finding.line) == (str(third), 1)
    assert "part 2 of this session is missing" in finding.message
    (run,) = find_runs([third, fourth])  # what came before need not be there
    assert load_session(run).log_end.sentence() == ""


def test_a_part_given_twice_is_an_error(tmp_path: Path) -> None:
    first, second, *_ = recorded(tmp_path)
    copy = tmp_path / "copy.log"
    copy.write_bytes(second.read_bytes())
    with pytest.raises(UsageError, match=r"part2\.log and .*copy\.log are the same part"):
        find_runs([first, second, copy])
    assert len(find_runs([first, second, copy], repeated=True)) == 2
    with pytest.raises(UsageError, match="only one"):
        find_runs(["-", first, "-"])


def test_logs_of_other_sessions_stay_apart(tmp_path: Path) -> None:
    (other,) = write_parts(tmp_path, [make_log(Random(1).randint)])
    apart = other.rename(tmp_path / "other.log")
    parts = recorded(tmp_path)
    runs = find_runs([parts[2], apart, *parts[:2]])
    assert [run.paths for run in runs] == [tuple(map(str, parts[:3])), (str(apart),)]
    assert [run.name for run in runs] == [f"{parts[0]} and 2 more parts", str(apart)]


def test_an_error_names_the_part_and_its_line(tmp_path: Path) -> None:
    parts = recorded(tmp_path)
    lines = parts[1].read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b'"event":"step_end"' in line)
    lines[at] = b"{damaged}\n"
    parts[1].write_bytes(b"".join(lines))
    (run,) = find_runs(parts)
    with pytest.raises(LogError, match=rf"part2\.log:{at + 1}: not a line of JSON"):
        load_session(run)
    whole, rest = load_session(run, lenient=True), load_session(parts[0])
    assert "1 damaged line was skipped" in whole.log_end.sentence()
    assert len(whole.open_steps) == 1
    assert len(whole.steps) > len(rest.steps)


@settings(max_examples=25)
@given(data=damaged_logs([EVERY_EVENT]))
def test_a_lenient_reader_keeps_what_is_whole(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "session.log"
    path.write_bytes(data)
    if not data.startswith(EVERY_EVENT.partition(b"\n")[0] + b"\n"):
        return  # without its first line it is not a log
    session = load_session(path, lenient=True)
    n_lines = sum(1 for _ in read_events(path, lenient=True))
    end = session.log_end
    assert end.skipped + n_lines == end.lines
    assert 0 <= end.left_out < n_lines
    if end.left_out:
        with pytest.raises(LogError):
            load_session(path)
    tables_of(session)
